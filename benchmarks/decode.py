"""Plain decoding against its floor and against transformers, on the same weights and the same requests.

    python benchmarks/decode.py --model MODEL --batch 1,8,64 --peer transformers
    python benchmarks/decode.py --random 0.5b --tokens 256 --peer transformers        # a model with random weights

MODEL is a folder, a hub id or `embedded`, which answers Countdown problems and stops when it is done; lengths then have
the tail that they have in training. Models without a task answer random prompts with --tokens tokens each. The peers
are `generate`, which runs a padded batch until its last answer is done, and transformers' continuous batching. All
take turns, --repeat times; figures are medians of tokens/s. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from limits import copy_bandwidth, synchronize, weights_per_token
from paceline.core import Request, SamplingParams
from paceline.model import Decoder, DecoderConfig, load_model, save_model
from paceline.model.checkpoint import find_model
from paceline.model.decoder import as_dtype
from paceline.model.tokenizer import load_tokenizer
from paceline.rollout import EngineSettings, RolloutEngine
from paceline.tasks.countdown import Countdown

RANDOM = {  # Qwen2.5-0.5B's geometry
    "0.5b": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
             "intermediate_size": 4864, "vocab_size": 151936},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 128, "vocab_size": 512},
}  # fmt: skip


@dataclass
class Work:
    """Requests for everybody, all at the same time."""

    requests: list[Request]
    eos: list[int]

    @property
    def tokens(self) -> int:
        return self.requests[0].sampling.max_tokens

    @property
    def prompts(self) -> list[list[int]]:
        return [list(r.prompt) for r in self.requests]


def make_work(args: argparse.Namespace, batch: int, vocab: int) -> list[Work]:
    """Batches to be run one after the other; small ones with answers of all lengths need more than one to mean much."""
    if args.model == "embedded":
        tokenizer, task = load_tokenizer("embedded"), Countdown("medium", "search", seed=1)
        sampling = SamplingParams(max_tokens=args.tokens, stop_token_ids=tokenizer.eos_ids)
        count = batch if batch >= 64 else max(2 * batch, 8)
        prompts = [tokenizer.encode_prompt(task.sample(i).prompt) for i in range(count)]
        eos = list(tokenizer.eos_ids)
    else:
        r = random.Random(batch)
        prompts = [[r.randrange(3, vocab) for _ in range(args.prompt_tokens)] for _ in range(batch)]
        sampling, eos = SamplingParams(max_tokens=args.tokens), []
    requests = [Request(i, tuple(p), sampling) for i, p in enumerate(prompts)]
    return [Work(requests[i : i + batch], eos) for i in range(0, len(requests), batch)]


def run_ours(engine: RolloutEngine, work: Work) -> int:
    return sum(len(c.tokens) for c in engine.run(work.requests))


def run_generate(model: Any, work: Work) -> int:
    """A padded batch, as `generate` wants it; only tokens up to the end of each answer count."""
    longest = max(map(len, work.prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in work.prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in work.prompts], device=model.device)
    stop = {"eos_token_id": work.eos} if work.eos else {"min_new_tokens": work.tokens}
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=work.tokens,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
            **stop,
        )
    return sum(_useful(row, work.eos) for row in out[:, longest:].tolist())


def run_continuous(model: Any, work: Work) -> int:
    """Sized to the work: left to itself it fills the memory, and masks all of it in every step."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    prompt_tokens = sum(map(len, work.prompts))
    blocks = 2 * sum((len(p) + work.tokens) // 256 + 1 for p in work.prompts) + 16
    settings = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=max(256, min(4096, prompt_tokens)))
    generation = GenerationConfig(
        max_new_tokens=work.tokens, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=work.eos or -1
    )
    out = model.generate_batch(
        work.prompts,
        generation_config=generation,
        continuous_batching_config=settings,
        persistent_manager=True,
    )
    answers = [o.generated_tokens for o in out.values()]
    assert len(answers) == len(work.prompts), "continuous batching lost a request"
    return sum(_useful(a, work.eos) for a in answers)


def _useful(tokens: list[int], eos: list[int]) -> int:
    ends = [i for i, t in enumerate(tokens) if t in eos]
    return ends[0] + 1 if ends else len(tokens)


def theory_card(model: Decoder, bandwidth: float, batches: list[int], context: int) -> dict[int, float]:
    """What a step must move at least, and the tokens/s that this allows."""
    c = model.config
    weights = weights_per_token(model) * model.dtype.itemsize
    per_token = 2 * c.layers * c.kv_heads * c.head_dim * model.dtype.itemsize
    print(
        f"model      {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, {model.dtype}, {model.device}"
    )
    print(f"bandwidth  {bandwidth / 1e9:.1f} GB/s (measured copy, read + written)")
    print(f"weights    {weights / 1e6:.1f} MB read per step;  KV {per_token} bytes per token of context")
    floors = {}
    for batch in batches:
        step = (weights + batch * context * per_token) / bandwidth
        floors[batch] = batch / step
        print(f"floor      batch {batch:>3}, context {context}: {1e3 * step:.3f} ms = {floors[batch]:,.0f} tokens/s")
    return floors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--random", choices=RANDOM, help="random weights of this geometry instead of a model")
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--tokens", type=int, default=700, help="longest answer (exact length where nothing stops it)")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--peer", choices=["transformers", "none"], default="none")
    parser.add_argument("--continuous-repeat", type=int, default=None, help="turns of the slowest peer")
    args = parser.parse_args()
    batches = [int(b) for b in args.batch.split(",")]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.continuous_repeat = args.continuous_repeat or (args.repeat if device.type == "cuda" else 1)
    warnings.filterwarnings("ignore")

    with tempfile.TemporaryDirectory() as folder:
        if args.random:
            args.model = folder
            _make_random(args.random, Path(folder), device)
        model = load_model(args.model, device=device)
        peers = load_peers(args, device) if args.peer == "transformers" else None
    floors = theory_card(model, copy_bandwidth(device), batches, args.prompt_tokens + args.tokens // 2)

    rows = []
    print("\ntokens/s, medians, and the ratio of ours to each peer's")
    print(
        f"{'batch':>5}  {'ours':>9}  {'of floor':>8}  {'generate':>9}  {'ratio':>6}  {'continuous':>10}  {'ratio':>6}"
    )
    for batch in batches:
        row = measure(args, model, peers, batch, floors[batch])
        rows.append(row)
        print(_line(row), flush=True)
    summary = {
        "model": args.random or args.model,
        "device": _name(device),
        "dtype": str(model.dtype),
        "repeat": args.repeat,
    }
    print(json.dumps(summary | {"tokens": args.tokens, "rows": rows}))


def load_peers(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    folder, dtype = find_model(args.model), as_dtype("auto", device)
    # Two copies, because continuous batching switches the attention of the one that it is used with.
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval() for _ in range(2)]
    return {"generate": models[0], "continuous": models[1]}


def measure(
    args: argparse.Namespace, model: Decoder, peers: dict[str, Any] | None, batch: int, floor: float
) -> dict[str, Any]:
    work = make_work(args, batch, model.config.vocab_size)
    engine = RolloutEngine(model, EngineSettings(max_batch=batch))
    runs = {"ours": lambda: sum(run_ours(engine, w) for w in work)}
    if peers:
        runs["generate"] = lambda: sum(run_generate(peers["generate"], w) for w in work)
        runs["continuous"] = lambda: sum(run_continuous(peers["continuous"], w) for w in work)
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    _warm_up(work[0], engine, peers)
    for turn in range(args.repeat):
        for name, run in runs.items():
            if name == "continuous" and turn >= args.continuous_repeat:
                continue
            synchronize(model.device)
            started = time.perf_counter()
            tokens = run()
            synchronize(model.device)
            speeds[name].append(tokens / (time.perf_counter() - started))
    if peers:  # its cache was made for this batch size
        peers["continuous"].destroy_cached_continuous_batching_manager()
    medians = {f"{name}_tok_s": round(statistics.median(s), 1) for name, s in speeds.items()}
    row = {"batch": batch, **medians, "floor_tok_s": round(floor, 1)}
    for peer in ("generate", "continuous"):
        if peers:
            pairs = list(zip(speeds["ours"], speeds[peer], strict=False))
            ratios = sorted(a / b for a, b in pairs)
            row[f"{peer}_ratio"] = round(statistics.median(ratios), 2)
            row[f"{peer}_ratio_range"] = [round(ratios[0], 2), round(ratios[-1], 2)]
    return row


def _warm_up(work: Work, engine: RolloutEngine, peers: dict[str, Any] | None) -> None:
    """Graphs, kernels and caches; on a GPU at full length, because peers capture graphs as contexts grow."""
    tokens = work.tokens if engine.model.device.type == "cuda" else 16
    short = [replace(r, sampling=replace(r.sampling, max_tokens=tokens)) for r in work.requests]
    work = Work(short, work.eos)
    run_ours(engine, work)
    if peers:
        run_generate(peers["generate"], work)
        run_continuous(peers["continuous"], work)


def _line(row: dict[str, Any]) -> str:
    cell = lambda name, form: format(row[name], form) if name in row else "-"  # noqa: E731
    return (
        f"{row['batch']:>5}  {row['ours_tok_s']:>9,.0f}  {row['ours_tok_s'] / row['floor_tok_s']:>8.1%}  "
        f"{cell('generate_tok_s', ',.0f'):>9}  {cell('generate_ratio', '.2f'):>6}  "
        f"{cell('continuous_tok_s', ',.0f'):>10}  {cell('continuous_ratio', '.2f'):>6}"
    )


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def _make_random(preset: str, folder: Path, device: torch.device) -> None:
    shape = RANDOM[preset]
    hf = shape | {
        "model_type": "qwen2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "tie_word_embeddings": True, "hidden_act": "silu", "eos_token_id": None, "bos_token_id": None,
    }  # fmt: skip
    model = Decoder(DecoderConfig.from_hf(hf)).init_weights().to(device, as_dtype("auto", device))
    save_model(model.requires_grad_(False), folder)


if __name__ == "__main__":
    main()
