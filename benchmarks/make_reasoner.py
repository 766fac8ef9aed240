"""Train a Countdown reasoner from scratch on search traces, and save it in Hugging Face form with its tokenizer.

    python benchmarks/make_reasoner.py --preset embedded --minutes 4 --out OUT      # the model that ships with Paceline

No data and no weights are needed: traces come from `paceline.tasks.search`, as many as there is time for. Minutes on a
GPU; on a CPU in principle. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from paceline.learn.optimizer import AdamW
from paceline.model import Decoder, DecoderConfig, save_model
from paceline.model.attention import PackedAttention
from paceline.model.decoder import as_dtype
from paceline.model.tokenizer import Tokenizer, load_tokenizer
from paceline.rollout import Engine, EngineSettings, Request, Sampling
from paceline.tasks.countdown import LEVELS, Countdown, Level, make_problem, prompt_of, solves
from paceline.tasks.search import Searcher, full_answer

WORDS = ["<pad>", "<eos>", "<unk>", "<think>", "</think>", "<answer>", "</answer>"]
CHARACTERS = ["\n", *map(chr, range(32, 127))]
VOCAB = 104  # seven words, 96 characters, and one to make it a multiple of eight
CONTEXT = 1280
# What it learns from is a little easier than what it is asked later: reinforcement learning takes it from there.
LESSONS = {
    Level((3,), 20, (1, 100)): 0.2,
    Level((3, 4), 50, (1, 200)): 0.6,
    Level((4,), 99, (1, 500)): 0.2,
}

PRESETS = {
    "embedded": {"hidden_size": 192, "num_hidden_layers": 10, "num_attention_heads": 6, "num_key_value_heads": 2,
                 "head_dim": 32, "intermediate_size": 384, "lr": 2e-3, "batch_tokens": 65536},
    "100m": {"hidden_size": 768, "num_hidden_layers": 16, "num_attention_heads": 12, "num_key_value_heads": 4,
             "head_dim": 64, "intermediate_size": 2048, "lr": 6e-4, "batch_tokens": 65536},
}  # fmt: skip


def make_tokenizer(folder: Path) -> Tokenizer:
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
        model_max_length=CONTEXT,
    )
    fast.chat_template = "{{ messages[-1]['content'] }}\n"
    fast.save_pretrained(folder)
    return load_tokenizer(str(folder))


def make_traces(job: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`count` traces from a seed as one row of tokens, their lengths, and the lengths of their prompts."""
    seed, count = job
    ids = {c: i + len(WORDS) for i, c in enumerate(CHARACTERS)}
    tags = {w: i for i, w in enumerate(WORDS)}
    r = random.Random(seed)
    tokens: list[int] = []
    lengths, prompts = [], []
    while len(lengths) < count:
        problem = make_problem(r.choices(list(LESSONS), list(LESSONS.values()))[0], r)
        prompt = str(prompt_of(problem, "search"))
        answer = full_answer(problem, Searcher.draw(r), r)
        row = [ids[c] for c in prompt]
        thoughts, _, final = answer.removeprefix("<think>").partition("</think>")
        final = final.removeprefix("\n<answer>").removesuffix("</answer>")
        row += [tags["<think>"], *(ids[c] for c in thoughts), tags["</think>"], ids["\n"]]
        row += [tags["<answer>"], *(ids[c] for c in final), tags["</answer>"], tags["<eos>"]]
        if len(row) <= CONTEXT:
            tokens += row
            lengths.append(len(row))
            prompts.append(len(prompt))
    return np.array(tokens, np.uint8), np.array(lengths, np.int32), np.array(prompts, np.int32)


class Traces:
    """Packed batches of whole traces, made by a pool of processes a little ahead of the training."""

    def __init__(self, batch_tokens: int, device: torch.device, seed: int, workers: int):
        self.batch_tokens, self.device = batch_tokens, device
        self.pool = multiprocessing.get_context("spawn").Pool(workers)
        self.count = 2 * batch_tokens // 100
        self.seed, self.pending = seed * 10**6, []
        for _ in range(3 * workers):
            self._order()

    def _order(self) -> None:
        self.seed += 1
        self.pending.append(self.pool.apply_async(make_traces, ((self.seed, self.count),)))

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
        # A token's target is the one behind it, if that is part of the same trace's answer.
        targets = torch.where(answer, row, -100).roll(-1)
        targets[torch.from_numpy(np.cumsum(lengths) - 1)] = -100
        return row.to(self.device), targets.to(self.device), lengths.tolist()


def train(model: Decoder, traces: Traces, minutes: float, lr: float, max_steps: int) -> dict:
    optimizer = AdamW(model.named_parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    started, seen, steps, loss = time.time(), 0, 0, torch.tensor(0.0)
    for row, targets, lengths in traces:
        done = max((time.time() - started) / (60 * minutes), steps / max_steps)
        if done >= 1:
            break
        rate = min(1.0, (steps + 1) / 200) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        attention = PackedAttention(lengths, row.device)
        hidden, _ = model(row, attention.positions(), attention)
        loss = F.cross_entropy(model.logits(hidden).float(), targets)
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


def evaluate(model: Decoder, tokenizer: Tokenizer, difficulty: str, prompts: int) -> dict:
    """What the model does at temperature 1 on problems it has not seen."""
    task = Countdown(difficulty, "search", seed=987_654)
    engine = Engine(model, EngineSettings(max_batch=min(prompts, 512)))
    samples = [task.sample(i) for i in range(prompts)]
    sampling = Sampling(max_tokens=1000, stop_token_ids=tokenizer.eos_ids)
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
        "tail": round(p99 / p50, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="embedded")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--eval-prompts", type=int, default=1024)
    parser.add_argument("--batch-tokens", type=int)
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = dict(PRESETS[args.preset])
    lr, batch_tokens = shape.pop("lr"), shape.pop("batch_tokens")
    hf = shape | {
        "model_type": "llama", "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
        "initializer_range": 0.02, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None, "use_cache": True,
        "paceline": {"style": "search"},  # the only format of questions that it will know
    }  # fmt: skip
    traces = Traces(args.batch_tokens or batch_tokens, device, args.seed, args.workers)
    model = Decoder(DecoderConfig.from_hf(hf)).init_weights(args.seed).to(device, as_dtype("auto", device))
    size = sum(p.numel() for p in model.parameters())
    print(f"{args.preset}: {size / 1e6:.2f}M parameters on {device}", flush=True)
    result = train(model, traces, args.minutes, lr, args.max_steps)
    traces.pool.terminate()

    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = save_reasoner(model, args.out)
    levels = [evaluate(model, tokenizer, level, args.eval_prompts) for level in LEVELS]
    for level in levels:
        print(level, flush=True)
    print(json.dumps({"preset": args.preset, "parameters": size, "training": result, "levels": levels}))


def save_reasoner(model: Decoder, folder: Path) -> Tokenizer:
    """Save the model in bfloat16, whatever it was trained in, and put its tokenizer beside it."""
    model.requires_grad_(False).to(torch.bfloat16)
    save_model(model, folder)
    model.to(as_dtype("auto", model.device))
    return make_tokenizer(folder)


if __name__ == "__main__":
    main()
