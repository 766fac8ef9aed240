"""`paceline draft train` and `paceline draft eval`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast, get_args

from rich.console import Console
from rich.table import Table

from paceline.config import Config, describe_recipe, load_config
from paceline.core import Request, SamplingParams
from paceline.draft.eagle.files import find_drafter, load_drafter, save_drafter
from paceline.draft.eagle.loss import DraftLoss
from paceline.draft.eagle.model import EagleModel
from paceline.errors import UserError
from paceline.library.fit import (
    DEPTH,
    POSITIONS,
    DrafterKind,
    Fitted,
    count_accepted,
    drafter_for,
    fit,
    generate_sequences,
)
from paceline.model import Decoder, load_model
from paceline.model.tokenizer import Tokenizer, load_tokenizer
from paceline.setup.build import make_sampling
from paceline.setup.device import choose_device
from paceline.tasks import make_task
from paceline.tasks.prompts import PromptStream
from paceline.tasks.tasks import choose_style

HELD_OUT_SEED = 1_000_003  # added to the seed for prompts that training has not seen


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
    as_json: bool = False,
    kind: str = "chain",
) -> None:
    if kind not in get_args(DrafterKind):
        raise UserError(f"--kind is '{kind}', but must be one of: {', '.join(get_args(DrafterKind))}")
    if loss not in get_args(DraftLoss):
        raise UserError(f"--loss is '{loss}', but must be one of: {', '.join(get_args(DraftLoss))}")
    if (out / "config.json").exists():
        raise UserError(f"{out} holds a model or drafter already; name another folder with --out")
    config, policy, tokenizer = _load(model, task, overrides)
    console = Console(highlight=False, stderr=as_json)
    started = time.perf_counter()
    requests = _requests(config, policy, tokenizer, answers, 0, config.rollout.temperature)
    sequences = generate_sequences(policy, requests)
    tokens = sum(len(sequence) for sequence, _ in sequences)
    seconds = time.perf_counter() - started
    console.print(f"{len(sequences)} answers, {tokens:,} tokens, in {seconds:.0f} s ({tokens / seconds:,.0f} tokens/s)")

    drafter = drafter_for(policy, sequences, window, vocab, config.seed, cast(DrafterKind, kind))
    if drafter.vocab is not None:
        console.print(f"draft vocabulary: {len(drafter.vocab):,} of {policy.config.vocab_size:,} tokens")
    show = _progress_printer(console, interval_s=max(2.0, 3 * minutes))
    f = fit(drafter, sequences, 60 * minutes, cast(DraftLoss, loss), config.seed, show)
    trained = {"policy": model, "task": task, "answers": len(sequences), "tokens": f.tokens, "steps": f.steps}
    save_drafter(drafter, out, trained | {"loss": loss})
    console.print(f"saved to {out}; measure its acceptance with: paceline draft eval {out} --model {model}")
    result = {"steps": f.steps, "tokens": f.tokens, "seconds": round(f.seconds, 1), "loss": round(f.loss, 4)}
    if as_json:
        print(json.dumps(result | {"agree": [round(a, 4) for a in f.agree], "out": str(out)}))


def _progress_printer(console: Console, interval_s: float) -> Callable[[Fitted], None]:
    """Prints how training goes, at most once in so many seconds."""
    shown = time.perf_counter()

    def show(f: Fitted) -> None:
        nonlocal shown
        if time.perf_counter() - shown > interval_s:
            shown = time.perf_counter()
            agreement = " ".join(f"{a:.2f}" for a in f.agree)
            line = f"{f.seconds:5.0f} s  step {f.steps}  loss {f.loss:.3f}  top-1 agreement by depth {agreement}"
            console.print(line)

    return show


def eval_command(name: str, model: str, task: str, prompts: int, overrides: list[str], as_json: bool = False) -> None:
    config, policy, tokenizer = _load(model, task, overrides)
    folder = find_drafter(name, model)
    if folder is None:
        raise UserError(f"there is no drafter beside the model {model}; name its folder")
    drafter = load_drafter(folder, policy)
    console = Console(highlight=False, stderr=as_json)
    by_depth = Table("T", "accept length", "depth 1", *(str(d) for d in range(2, DEPTH + 1)), box=None)
    rows = []
    for temperature in (0.0, 0.6, 1.0):
        row = measure_acceptance(config, policy, tokenizer, drafter, prompts, temperature)
        rows.append(row)
        by_depth.add_row(
            f"{temperature}", f"{row['accept_length']:.2f}", *(f"{rate:.2f}" for rate in row["accept_rates"])
        )
    console.print(f"accept length with chains of {DEPTH} draft tokens, and the acceptance rate at each depth")
    console.print(by_depth)
    by_position = Table("position in the answer", *(f"T = {r['temperature']}" for r in rows), box=None)
    for i, end in enumerate(POSITIONS):
        start = POSITIONS[i - 1] if i else 0
        label = f"{start} – {end}" if end < 10**9 else f"from {start}"
        by_position.add_row(label, *("-" if (v := r["by_position"][i]) is None else f"{v:.2f}" for r in rows))
    console.print("accept length by position")
    console.print(by_position)
    if as_json:
        print(json.dumps({"drafter": str(folder), "prompts": prompts, "rows": rows}))


def measure_acceptance(
    config: Config,
    policy: Decoder,
    tokenizer: Tokenizer,
    drafter: EagleModel,
    prompts: int,
    temperature: float,
    depth: int = DEPTH,
) -> dict:
    """Answer held-out prompts with chains of draft tokens, and count those that are accepted."""
    requests = _requests(config, policy, tokenizer, prompts, HELD_OUT_SEED, temperature)
    return {"temperature": temperature} | count_accepted(drafter, requests, depth)


def _load(model: str, task: str, overrides: list[str]) -> tuple[Config, Decoder, Tokenizer]:
    words = [f"model.path={model}", f"task.name={task}", *overrides]
    config = load_config(None, words)
    Console(highlight=False, stderr=True).print(describe_recipe(None, words), markup=False)
    device = choose_device(config.model.device)
    tokenizer = load_tokenizer(model, config.task.chat_template_kwargs)
    return config, load_model(model, config.model.dtype, device), tokenizer


def _requests(
    config: Config, policy: Decoder, tokenizer: Tokenizer, count: int, seed: int, temperature: float
) -> list[Request]:
    style = choose_style(config.task.style, policy.config.hf, bool(tokenizer.hf.chat_template))
    task = make_task(config.task.model_copy(update={"problems": None}), config.seed + seed, style)
    s = make_sampling(config, tokenizer.eos_ids)
    sampling = SamplingParams(temperature, max_tokens=s.max_tokens, stop_token_ids=s.stop_token_ids)
    stream = PromptStream(task, tokenizer, sampling, config, policy.config.max_positions)
    return [Request(i, stream.group(i).prompt, sampling, config.seed) for i in range(count)]
