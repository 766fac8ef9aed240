"""`paceline draft train` and `paceline draft eval`."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import get_args

import torch
from rich.console import Console
from rich.table import Table

from paceline.build import choose_device, find_drafter, make_sampling
from paceline.config import Config, load_config
from paceline.draft.neural import NeuralDrafter, load_drafter, new_drafter, save_drafter
from paceline.draft.strategy import Strategy
from paceline.draft.trainer import DrafterTrainer, TrainSettings
from paceline.draft.training import Loss, batches, read_texts, suitable_rate
from paceline.errors import UserError
from paceline.model import Decoder, load_model
from paceline.model.tokenizer import Tokenizer, load_tokenizer
from paceline.rollout import Engine, EngineSettings, Request, Sampling
from paceline.tasks import make_task
from paceline.tasks.tasks import choose_style

HELD_OUT = 1_000_003  # added to the seed for prompts that training has not seen
DEPTH = 7
POSITIONS = (64, 128, 256, 512, 10**9)


def train_command(
    model: str,
    task: str,
    out: Path,
    minutes: float,
    answers: int,
    loss: str,
    window: int,
    vocab: int | None,
    overrides: list[str],
) -> None:
    if loss not in get_args(Loss):
        raise UserError(f"--loss is '{loss}', but must be one of: {', '.join(get_args(Loss))}")
    if (out / "config.json").exists():
        raise UserError(f"{out} holds a model or drafter already; name another folder with --out")
    config, policy, tokenizer = _load(model, task, overrides)
    console = Console(highlight=False)
    started = time.perf_counter()
    texts = _answers(config, policy, tokenizer, answers)
    tokens = sum(len(t) for t, _ in texts)
    seconds = time.perf_counter() - started
    console.print(f"{len(texts)} answers, {tokens:,} tokens, in {seconds:.0f} s ({tokens / seconds:,.0f} tokens/s)")

    drafter = new_drafter(policy, window, config.seed, _common(texts, vocab, policy) if vocab else None)
    trainer = DrafterTrainer(drafter, TrainSettings(lr=suitable_rate(policy), loss=loss))  # type: ignore[arg-type]
    limit, shuffle = 60 * minutes, random.Random(config.seed).shuffle
    started = time.perf_counter()
    shown, value, agree, seen = started, 0.0, [0.0], 0
    while (elapsed := time.perf_counter() - started) < limit:
        for batch in batches(texts, trainer.settings.batch_tokens, shuffle, lambda text: len(text[0])):
            elapsed = time.perf_counter() - started
            value, agree = trainer.step(read_texts(drafter, batch), min(1.0, elapsed / limit))
            seen += sum(len(t) for t, _ in batch)
            if time.perf_counter() - shown > max(2.0, limit / 20):
                shown = time.perf_counter()
                same = " ".join(f"{a:.2f}" for a in agree)
                console.print(f"{elapsed:5.0f} s  step {trainer.steps}  loss {value:.3f}  agrees by depth {same}")
            if elapsed > limit:
                break
    trainer.publish()
    trained = {
        "policy": model,
        "task": task,
        "answers": len(texts),
        "tokens": seen,
        "steps": trainer.steps,
        "loss": loss,
    }
    save_drafter(drafter, out, trained)
    console.print(f"saved to {out}; see how it does with: paceline draft eval {out} --model {model}")
    result = {"steps": trainer.steps, "tokens": seen, "seconds": round(elapsed, 1), "loss": round(value, 4)}
    print(json.dumps(result | {"agree": [round(a, 4) for a in agree], "out": str(out)}))


def eval_command(name: str, model: str, task: str, prompts: int, overrides: list[str]) -> None:
    config, policy, tokenizer = _load(model, task, overrides)
    folder = find_drafter(name, model)
    if folder is None:
        raise UserError(f"there is no drafter beside the model {model}; name its folder")
    drafter = load_drafter(folder, policy)
    console = Console(highlight=False)
    by_depth = Table("temperature", "accept length", *(f"depth {d + 1}" for d in range(DEPTH)), box=None)
    rows = []
    for temperature in (0.0, 0.6, 1.0):
        row = examine(config, policy, tokenizer, drafter, prompts, temperature)
        rows.append(row)
        by_depth.add_row(f"{temperature}", f"{row['accept_length']:.2f}", *(f"{h:.2f}" for h in row["holds"]))
    console.print(f"tokens per check with chains of {DEPTH} guesses, and how often the guess at each depth holds")
    console.print(by_depth)
    by_place = Table("tokens into the answer", *(f"T = {r['temperature']}" for r in rows), box=None)
    for i, end in enumerate(POSITIONS):
        start = POSITIONS[i - 1] if i else 0
        label = f"{start} – {end}" if end < 10**9 else f"from {start}"
        by_place.add_row(label, *("-" if (v := r["by_position"][i]) is None else f"{v:.2f}" for r in rows))
    console.print(by_place)
    print(json.dumps({"drafter": str(folder), "prompts": prompts, "rows": rows}))


def examine(
    config: Config,
    policy: Decoder,
    tokenizer: Tokenizer,
    drafter: NeuralDrafter,
    prompts: int,
    temperature: float,
    depth: int = DEPTH,
) -> dict:
    """Answer held-out prompts with chains of guesses, and count those that hold."""
    strategy = Strategy.parse(f"neural:{depth}")
    engine = Engine(policy, EngineSettings(max_batch=min(64, prompts)), None, [drafter], [strategy])
    engine.choose = lambda batch: strategy
    reached, held = Counter[int](), Counter[int]()
    lengths: list[list[int]] = [[] for _ in POSITIONS]
    engine.submit(_requests(config, policy, tokenizer, prompts, HELD_OUT, temperature))
    while engine.unfinished:
        before = {s.request.id: s.generated for s in engine.scheduler.running}
        alive = list(engine.scheduler.running)
        engine.step()
        for seq in alive:
            gained = seq.generated - before[seq.request.id]
            if not gained:  # others were admitted
                continue
            reached.update(range(min(gained, depth)))
            held.update(range(gained - 1))
            place = next(i for i, end in enumerate(POSITIONS) if before[seq.request.id] < end)
            lengths[place].append(gained)
    return {
        "temperature": temperature,
        "accept_length": round(engine.stats.accept_length, 3),
        "holds": [round(held[d] / max(1, reached[d]), 3) for d in range(depth)],
        "by_position": [round(sum(n) / len(n), 3) if n else None for n in lengths],
    }


def _load(model: str, task: str, overrides: list[str]) -> tuple[Config, Decoder, Tokenizer]:
    config = load_config(None, [f"model.path={model}", f"task.name={task}", *overrides])
    device = choose_device(config.model.device)
    return config, load_model(model, config.model.dtype, device), load_tokenizer(model)


def _requests(
    config: Config, policy: Decoder, tokenizer: Tokenizer, count: int, seed: int, temperature: float
) -> list[Request]:
    style = choose_style(config.task.style, policy.config.hf, bool(tokenizer.hf.chat_template))
    task = make_task(config.task.model_copy(update={"problems": None}), config.seed + seed, style)
    s = make_sampling(config, tokenizer.eos_ids)
    sampling = Sampling(temperature, max_tokens=s.max_tokens, stop_token_ids=s.stop_token_ids)
    prompts = [tuple(tokenizer.encode_prompt(task.sample(i).prompt)) for i in range(count)]
    return [Request(i, prompt, sampling, config.seed) for i, prompt in enumerate(prompts)]


def _answers(config: Config, policy: Decoder, tokenizer: Tokenizer, count: int) -> list[tuple[list[int], int]]:
    most = 512 if policy.device.type == "cuda" else 64
    engine = Engine(policy, EngineSettings(max_batch=min(most, count)))
    requests = _requests(config, policy, tokenizer, count, 0, config.rollout.temperature)
    return [([*c.request.prompt, *c.tokens], len(c.request.prompt)) for c in engine.run(requests)]


def _common(texts: list[tuple[list[int], int]], size: int, policy: Decoder) -> torch.Tensor:
    """The tokens that occur most often in answers, in order; then, if those are fewer, the first others."""
    counts = Counter(t for text, prompt in texts for t in text[prompt:])
    chosen = [token for token, _ in counts.most_common(size)]
    rest = (t for t in range(policy.config.vocab_size) if t not in counts)
    while len(chosen) < min(size, policy.config.vocab_size):
        chosen.append(next(rest))
    return torch.tensor(sorted(chosen), device=policy.device)
