"""Train a Countdown reasoner from scratch on search traces, and save it in Hugging Face form with its tokenizer.

    python benchmarks/make_reasoner.py --preset embedded --minutes 4 --out OUT      # the model that ships with Paceline

No data and no weights are needed: traces come from `search_traces.py`, as many as there is time for. Minutes on a
GPU; on a CPU in principle. The last line is JSON.

A model with the cost of a large one and real behaviour, without downloads: train the active layers, train a drafter on
their completions, and grow both to the geometry of Qwen2.5-7B (or 1.5B) with idle layers (`grow.py`).

    python benchmarks/make_reasoner.py --preset 7b --minutes 4.5 --out SHALLOW
    paceline draft train --model SHALLOW --out SHALLOW/drafter --minutes 2 --answers 4096 --window 256 \\
        --set task.difficulty=tail --set rollout.max_tokens=1984
    python benchmarks/make_reasoner.py --grow 7b --trained SHALLOW --out DEEP
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from grow import IDLE_LAYERS, grow, lean_away, push_down
from paceline.core import Request, SamplingParams
from paceline.draft.eagle.files import DRAFTER, load_drafter, save_drafter
from paceline.draft.eagle.model import EagleModel
from paceline.draft.eagle.vocabulary import MIN_DRAFT_VOCAB
from paceline.learn.optimizer import AdamW
from paceline.model import Decoder, DecoderConfig, load_model, save_model
from paceline.model.attention import PackedAttention
from paceline.model.decoder import as_dtype
from paceline.model.tokenizer import Tokenizer, load_tokenizer
from paceline.rollout import EngineSettings, RolloutEngine
from paceline.tasks.countdown import LEVELS, TAIL, Countdown, Level, make_problem, prompt_of, solves
from search_traces import Searcher, full_answer

WORDS = ["<pad>", "<eos>", "<unk>", "<think>", "</think>", "<answer>", "</answer>"]
CHARACTERS = ["\n", *map(chr, range(32, 127))]
VOCAB = 104  # seven words, 96 characters, and one to make it a multiple of eight
CONTEXT = 1280
LONG_CONTEXT = 9216
# Shares of the training traces: a little easier than the tasks that it is asked later, which are left to RL.
TRACE_LEVELS = {
    Level((3,), 20, (1, 100)): 0.2,
    Level((3, 4), 50, (1, 200)): 0.6,
    Level((4,), 99, (1, 500)): 0.2,
}


@dataclass(frozen=True)
class Preset:
    shape: dict[str, Any]
    lr: float
    batch_tokens: int
    tail: bool = False
    """Whether it learns to search for very long, and with a context for it."""
    grown: tuple[int, int] | None = None
    """Layers and vocabulary of the model that it is grown to."""

    @property
    def context(self) -> int:
        return LONG_CONTEXT if self.tail else CONTEXT


def _shape(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, tied: bool = False) -> dict:
    return {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": hidden // heads, "intermediate_size": intermediate,
            "tie_word_embeddings": tied}  # fmt: skip


PRESETS = {
    "embedded": Preset(_shape(192, 10, 6, 2, 384), 2e-3, 65536),
    "100m": Preset(_shape(768, 16, 12, 4, 2048), 6e-4, 65536),
    # The active layers, as wide as those of Qwen2.5-7B and 1.5B, and what they are grown to.
    "7b": Preset(_shape(3584, 4, 28, 4, 18944), 2e-4, 16384, tail=True, grown=(28, 152064)),
    "1.5b": Preset(_shape(1536, 6, 12, 2, 8960, tied=True), 4e-4, 16384, tail=True, grown=(28, 151936)),
    "tiny": Preset(_shape(64, 4, 4, 2, 128), 3e-3, 10240, tail=True, grown=(12, 512)),
}
DRAFT_VOCAB = MIN_DRAFT_VOCAB  # that the drafter of a grown model can propose: completions have few distinct tokens


def make_tokenizer(folder: Path, context: int = CONTEXT) -> Tokenizer:
    """One token per character, and one for each tag: small models should not have to spell."""
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.WordLevel({w: i for i, w in enumerate(WORDS + CHARACTERS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_tokens([AddedToken(w, special=False, normalized=False) for w in WORDS[3:]])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=context,
    )
    fast.chat_template = "{{ messages[-1]['content'] }}\n"
    fast.save_pretrained(folder)
    return load_tokenizer(str(folder))


def make_traces(job: tuple[int, int, bool]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`count` traces from a seed as one row of tokens, their lengths, and the lengths of their prompts."""
    seed, count, tail = job
    context = LONG_CONTEXT if tail else CONTEXT
    ids = {c: i + len(WORDS) for i, c in enumerate(CHARACTERS)}
    tags = {w: i for i, w in enumerate(WORDS)}
    r = random.Random(seed)
    tokens: list[int] = []
    lengths, prompts = [], []
    while len(lengths) < count:
        level = r.choice(TAIL) if tail else r.choices(list(TRACE_LEVELS), list(TRACE_LEVELS.values()))[0]
        problem = make_problem(level, r)
        prompt = str(prompt_of(problem, "search"))
        searcher = Searcher.draw_patient(r, len(problem.numbers)) if tail else Searcher.draw(r)
        answer = full_answer(problem, searcher, r)
        row = [ids[c] for c in prompt]
        thoughts, _, final = answer.removeprefix("<think>").partition("</think>")
        final = final.removeprefix("\n<answer>").removesuffix("</answer>")
        row += [tags["<think>"], *(ids[c] for c in thoughts), tags["</think>"], ids["\n"]]
        row += [tags["<answer>"], *(ids[c] for c in final), tags["</answer>"], tags["<eos>"]]
        if len(row) <= context:
            tokens += row
            lengths.append(len(row))
            prompts.append(len(prompt))
    return np.array(tokens, np.uint8), np.array(lengths, np.int32), np.array(prompts, np.int32)


class Traces:
    """Packed batches of whole traces, made by a pool of processes a little ahead of the training."""

    def __init__(self, batch_tokens: int, device: torch.device, seed: int, workers: int, tail: bool = False):
        assert batch_tokens >= (LONG_CONTEXT if tail else CONTEXT), "a batch must fit the longest trace"
        self.batch_tokens = batch_tokens
        self.device = device
        self.tail = tail
        self.pool = multiprocessing.get_context("spawn").Pool(workers)
        self.count = 2 * batch_tokens // 100
        self.seed = seed * 10**6
        self.pending = []
        for _ in range(3 * workers):
            self._order()

    def _order(self) -> None:
        self.seed += 1
        self.pending.append(self.pool.apply_async(make_traces, ((self.seed, self.count, self.tail),)))

    def __iter__(self):
        while True:
            tokens, lengths, prompts = self.pending.pop(0).get()
            self._order()
            ends = lengths.cumsum()
            first = 0
            while True:  # as many whole traces as fit, until the chunk is used up
                last = int(np.searchsorted(ends, (ends[first - 1] if first else 0) + self.batch_tokens, "right"))
                if last >= len(lengths):
                    break
                yield self._batch(tokens, ends, lengths[first:last], prompts[first:last], first, last)
                first = last

    def _batch(self, tokens, ends, lengths, prompts, first, last):
        row = torch.from_numpy(tokens[ends[first - 1] if first else 0 : ends[last - 1]].astype(np.int64))
        within = np.concatenate([np.arange(n) for n in lengths])
        answer = torch.from_numpy(within >= np.repeat(prompts, lengths))
        # A token's target is the next one, if that is part of the same trace's answer.
        targets = torch.where(answer, row, -100).roll(-1)
        targets[torch.from_numpy(np.cumsum(lengths) - 1)] = -100
        return row.to(self.device), targets.to(self.device), lengths.tolist()


def train(model: Decoder, traces: Traces, minutes: float, lr: float, max_steps: int, unused: int = 0) -> dict:
    """`unused` tokens, which no trace has, will be added to the vocabulary: they take part in the loss."""
    optimizer = AdamW(model.named_parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    started, seen, steps, loss = time.time(), 0, 0, torch.tensor(0.0)
    for row, targets, lengths in traces:
        done = max((time.time() - started) / (60 * minutes), steps / max_steps)
        if done >= 1:
            break
        rate = min(1.0, (steps + 1) / 200) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        attention = PackedAttention(lengths, row.device)
        hidden, _ = model(row, attention.positions(), attention)
        logits = model.logits(hidden).float()
        loss = F.cross_entropy(push_down(logits, unused) if unused else logits, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(lr * rate)
        optimizer.zero_grad()
        steps += 1
        seen += len(row)
        if steps in (1, 10, 50) or steps % 200 == 0:
            speed = seen / (time.time() - started)
            print(f"step {steps}  loss {loss.item():.4f}  {speed / 1e6:.2f}M tokens/s", flush=True)
            if not math.isfinite(loss.item()):
                raise SystemExit("the loss is not finite")
    return {"steps": steps, "tokens": seen, "loss": loss.item(), "seconds": time.time() - started}


def evaluate(model: Decoder, tokenizer: Tokenizer, difficulty: str, prompts: int, longest: int) -> dict:
    """Solved problems and answer lengths at temperature 1, on problems that it was not trained on."""
    task = Countdown(difficulty, "search", seed=987_654)
    engine = RolloutEngine(model, EngineSettings(max_batch=min(prompts, 512)))
    samples = [task.sample(i) for i in range(prompts)]
    sampling = SamplingParams(max_tokens=longest, stop_token_ids=tokenizer.eos_ids)
    requests = [Request(s.index, tuple(tokenizer.encode_prompt(s.prompt)), sampling) for s in samples]
    lengths, solved, ended = [], 0, 0
    for completion in engine.run(requests):
        columns = samples[completion.request.id].columns
        solved += solves(tokenizer.decode(completion.tokens), columns["numbers"], columns["target"])
        ended += completion.finish_reason == "stop"
        lengths.append(len(completion.tokens))
    p50, p90, p99 = (float(x) for x in np.percentile(lengths, [50, 90, 99]))
    return {
        "difficulty": difficulty,
        "solved": round(solved / prompts, 4),
        "ended": round(ended / prompts, 4),
        "mean": round(float(np.mean(lengths)), 1),
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "max": max(lengths),
        "tail": round(p99 / p50, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="embedded")
    parser.add_argument("--grow", choices=[n for n, p in PRESETS.items() if p.grown], help="instead of training")
    parser.add_argument("--trained", type=Path, help="folder of the model to grow")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--eval-prompts", type=int, default=1024)
    parser.add_argument("--eval-tokens", type=int, help="longest answer in the evaluation; all that fits by default")
    parser.add_argument("--batch-tokens", type=int)
    args = parser.parse_args()
    if args.grow:
        if args.trained is None:
            parser.error("--grow needs the model to grow: --trained FOLDER")
        print(json.dumps(grow_folder(args.grow, args.trained, args.out, args.seed)))
    else:
        print(json.dumps(train_preset(args)))


def train_preset(args: argparse.Namespace) -> dict:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    preset = PRESETS[args.preset]
    theta = 100000.0 if preset.tail else 10000.0
    hf = preset.shape | {
        "model_type": "llama", "vocab_size": VOCAB, "max_position_embeddings": preset.context, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"}, "rope_theta": theta,
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "initializer_range": 0.02, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None, "use_cache": True,
        "paceline": {"style": "search"},  # the only format of questions that it will know
    }  # fmt: skip
    traces = Traces(args.batch_tokens or preset.batch_tokens, device, args.seed, args.workers, preset.tail)
    model = Decoder(DecoderConfig.from_hf(hf)).init_weights(args.seed)
    model = (lean_away(model) if preset.grown else model).to(device, as_dtype("auto", device))
    size = sum(p.numel() for p in model.parameters())
    print(f"{args.preset}: {size / 1e6:.2f}M parameters on {device}", flush=True)
    unused = preset.grown[1] - VOCAB if preset.grown else 0
    result = train(model, traces, args.minutes, preset.lr, args.max_steps, unused)
    traces.pool.terminate()

    if preset.grown:  # a drafter trained on this one, with three idle layers, fits what is grown from it
        model = grow(model, model.config.layers + IDLE_LAYERS, min(DRAFT_VOCAB, preset.grown[1]))
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = save_reasoner(model, args.out)
    longest = args.eval_tokens or (1000 if not preset.tail else preset.context - 64)
    difficulties = ["tail"] if preset.tail else LEVELS
    levels = [evaluate(model, tokenizer, level, args.eval_prompts, longest) for level in difficulties]
    for level in levels:
        print(level, flush=True)
    return {"preset": args.preset, "parameters": size, "training": result, "levels": levels}


def grow_folder(name: str, trained: Path, out: Path, seed: int) -> dict:
    """Grow the model in a folder, and the drafter in it if there is one."""
    started, grown = time.time(), PRESETS[name].grown
    assert grown is not None
    layers, vocab_size = grown
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shallow = load_model(str(trained), "bfloat16", device)
    deep = grow(shallow, layers, vocab_size, seed)
    save_model(deep, out)
    make_tokenizer(out, deep.config.max_positions)
    result = {"grown": name, "parameters": sum(p.numel() for p in deep.parameters()), "drafter": False}
    if (trained / DRAFTER / "config.json").is_file():
        drafter = load_drafter(trained / DRAFTER, shallow)
        save_drafter(grow_drafter(drafter, deep, DRAFT_VOCAB), out / DRAFTER)
        result["drafter"] = True
    return result | {"out": str(out), "seconds": round(time.time() - started, 1)}


@torch.no_grad()
def grow_drafter(drafter: EagleModel, policy: Decoder, vocab_size: int) -> EagleModel:
    """The same drafter for a policy that was grown from its own; it can propose the first `vocab_size` tokens, among
    them all that are used. It must have been trained with as many, so that it proposes no unused one."""
    vocab = torch.arange(vocab_size, device=policy.device) if vocab_size < policy.config.vocab_size else None
    grown = EagleModel(policy, drafter.shape, vocab)
    for own, trained in zip(grown.parameters(), drafter.parameters(), strict=True):
        own.copy_(trained)
    return grown


def save_reasoner(model: Decoder, folder: Path) -> Tokenizer:
    """Save the model in bfloat16, whatever it was trained in, with its tokenizer."""
    model.requires_grad_(False).to(torch.bfloat16)
    save_model(model, folder)
    model.to(as_dtype("auto", model.device))
    return make_tokenizer(folder, model.config.max_positions)


if __name__ == "__main__":
    main()
