"""The same requests through Paceline, plain and adaptive, and through transformers: `generate` and continuous batching.

    python benchmarks/peers.py --model DEEP --cap 150

16 prompts with 8 answers each, all at once, with the lengths that the model gives them: mostly short, a few very long.
The lengths of a first plain run of ours are then given to everybody, so that all write equally much: `generate` pads
the batch and runs until the longest is done, continuous batching lets requests leave one by one. A peer that is not
done after --cap seconds is stopped. Then the ratio is at least the cap over our own time, which is what is reported;
for `generate` also the seconds that it would have taken, with its last 50 steps as the measure of a step. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from paceline.core import Request, SamplingParams
from paceline.draft.eagle.drafter import EagleDrafter
from paceline.draft.eagle.files import find_drafter, load_drafter
from paceline.draft.suffix.drafter import SuffixDrafter
from paceline.model import load_model
from paceline.model.checkpoint import find_model
from paceline.model.decoder import as_dtype
from paceline.model.tokenizer import load_tokenizer
from paceline.rollout import EngineSettings, RolloutEngine
from paceline.setup.device import choose_device
from paceline.tasks.countdown import Countdown

Prompts = list[tuple[int, ...]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--difficulty", default="tail")
    parser.add_argument("--repeat", type=int, default=2, help="turns of ours")
    parser.add_argument("--warm-up", type=int, default=2, help="adaptive turns before those, which capture graphs")
    parser.add_argument("--cap", type=float, default=150.0, help="seconds that a peer gets")
    parser.add_argument("--kv-gb", type=float, default=24.0, help="for the KV pages of each of our two engines")
    parser.add_argument("--peers", default="generate,continuous")
    return parser.parse_args()


def main() -> None:
    args = parse()
    warnings.filterwarnings("ignore")
    device = choose_device("auto")
    prompts = make_prompts(args)
    ours, lengths = run_ours(args, prompts, device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    shown = sorted(lengths)
    p50, p99 = (shown[int(q * (len(shown) - 1))] for q in (0.5, 0.99))
    print(f"{len(lengths)} answers, {sum(lengths):,} tokens: p50 {p50}, p99 {p99}, longest {shown[-1]}", flush=True)
    for mode, r in ours.items():
        print(f"{mode:<12} {r['seconds']:8.2f} s  {r['tok_s']:9,.0f} tokens/s", flush=True)
    peers = run_peers(args, prompts, lengths, device)
    for name, peer in peers.items():
        for mode in ours:
            peer[f"ratio_{mode}"] = round(peer["seconds"] / ours[mode]["seconds"], 2)
        end = "when it ran out of memory" if peer.get("out_of_memory") else "when it was stopped"
        done = "" if peer["finished"] else f", not finished: {peer['tokens']:,} tokens {end}"
        least = "" if peer["finished"] else "at least "
        print(
            f"{name:<12} {peer['seconds']:8.2f} s  ours is {least}{peer['ratio_plain']:.2f} times as fast plain, "
            f"{least}{peer['ratio_adaptive']:.2f} times adaptive{done}",
            flush=True,
        )
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    result = {"model": args.model, "device": where, "requests": len(prompts), "tokens": sum(lengths), "p50": p50}
    print(json.dumps(result | {"p99": p99, "longest": shown[-1], "ours": ours, "peers": peers, "settings": vars(args)}))


def make_prompts(args: argparse.Namespace) -> Prompts:
    tokenizer, task = load_tokenizer(args.model), Countdown(args.difficulty, "search", seed=1)
    each = [tuple(tokenizer.encode_prompt(task.sample(i).prompt)) for i in range(args.prompts)]
    return [prompt for prompt in each for _ in range(args.samples)]


def run_ours(args: argparse.Namespace, prompts: Prompts, device: torch.device) -> tuple[dict[str, Any], list[int]]:
    """Seconds of both modes, interleaved, and the lengths of the completions."""
    model, eos = load_model(args.model, device=device), load_tokenizer(args.model).eos_ids
    longest = min(model.config.max_positions, max(map(len, prompts)) + args.max_tokens)
    kv = int(args.kv_gb * 1e9) if device.type == "cuda" else None
    settings = EngineSettings(max_batch=len(prompts), max_length=longest, kv_bytes=kv)
    drafters: list[Any] = [SuffixDrafter(len(prompts), longest)]
    folder = find_drafter("auto", args.model)
    if folder is not None:
        drafters.append(EagleDrafter(load_drafter(folder, model)))
    engines = {"plain": RolloutEngine(model, settings), "adaptive": RolloutEngine(model, settings, None, drafters)}
    free = SamplingParams(max_tokens=args.max_tokens, stop_token_ids=eos)
    done = engines["plain"].run([Request(i, prompt, free) for i, prompt in enumerate(prompts)])
    lengths = [n for _, n in sorted((c.request.id, len(c.tokens)) for c in done)]
    fixed = [SamplingParams(max_tokens=n, min_tokens=n, stop_token_ids=eos) for n in lengths]
    requests = [Request(i, prompt, s) for i, (prompt, s) in enumerate(zip(prompts, fixed, strict=True))]
    seconds: dict[str, list[float]] = {mode: [] for mode in engines}
    for _ in range(args.warm_up):  # plain decoding has had its turn above
        for _ in engines["adaptive"].run(requests):
            pass
    for _ in range(args.repeat):
        for mode, engine in engines.items():
            started = time.perf_counter()
            written = sum(len(c.tokens) for c in engine.run(requests))
            seconds[mode].append(time.perf_counter() - started)
            assert written == sum(lengths)
    out = {}
    for mode, taken in seconds.items():
        tokens, typical = sum(lengths), statistics.median(taken)
        out[mode] = {"seconds": round(typical, 3), "range": [round(min(taken), 3), round(max(taken), 3)],
                    "tokens": tokens, "tok_s": round(tokens / typical, 1)}  # fmt: skip
    out["adaptive"]["accept_length"] = round(engines["adaptive"].stats.accept_length, 3)
    return out, lengths


def run_peers(
    args: argparse.Namespace, prompts: Prompts, lengths: list[int], device: torch.device
) -> dict[str, dict[str, Any]]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    folder: Path = find_model(args.model)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=as_dtype("auto", device)).to(device).eval()
    model.generation_config.eos_token_id = model.config.eos_token_id = None  # lengths are given
    runs = {"generate": run_generate, "continuous": run_continuous}
    out = {}
    for name in filter(None, args.peers.split(",")):
        runs[name](model, prompts[:4], [8] * 4, args.cap)  # kernels and caches
        started = time.perf_counter()
        try:
            out[name] = runs[name](model, prompts, lengths, args.cap)
        except torch.OutOfMemoryError:
            taken = round(time.perf_counter() - started, 2)
            out[name] = {"seconds": taken, "finished": False, "tokens": 0, "out_of_memory": True}
    return out


def run_generate(model: Any, prompts: Prompts, lengths: list[int], cap: float) -> dict[str, Any]:
    """A padded batch that runs until its longest answer is done."""
    from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

    class Done(StoppingCriteria):
        def __init__(self) -> None:
            self.times: list[float] = []
            self.wanted = torch.tensor(lengths, device=model.device)

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            self.times.append(time.perf_counter())
            done = self.wanted <= len(self.times)
            return done | (self.times[-1] - started > cap)

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    done = Done()
    settings = GenerationConfig(max_new_tokens=max(lengths), do_sample=True, top_k=0, pad_token_id=0, eos_token_id=None)
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=mask, generation_config=settings, stopping_criteria=StoppingCriteriaList([done])
        )
    seconds, steps = time.perf_counter() - started, len(done.times)
    last = done.times[-min(50, steps) :]
    seconds_per_step = (last[-1] - last[0]) / max(1, len(last) - 1)
    return {
        "seconds": round(seconds, 2),
        "finished": steps >= max(lengths),
        "tokens": sum(min(n, steps) for n in lengths),
        "steps": steps,
        "of_steps": max(lengths),
        "would_take_s": round(seconds + seconds_per_step * (max(lengths) - steps), 1),
    }


def run_continuous(model: Any, prompts: Prompts, lengths: list[int], cap: float) -> dict[str, Any]:
    """Requests leave one by one. Sized to the work: left to itself it fills the memory, and masks all of it."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    blocks = sum((len(p) + n) // 256 + 2 for p, n in zip(prompts, lengths, strict=True)) + 16
    tokens = max(256, min(4096, sum(map(len, prompts))))
    settings = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=tokens, allow_block_sharing=False)
    generation = GenerationConfig(max_new_tokens=max(lengths), do_sample=True, top_k=0, pad_token_id=0, eos_token_id=-1)
    written, waiting = 0, {f"r{i}": n for i, n in enumerate(lengths)}
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=settings, timeout=5
    ) as manager:
        started = time.perf_counter()
        for prompt, (name, n) in zip(prompts, waiting.items(), strict=True):
            manager.add_request(list(prompt), request_id=name, max_new_tokens=n, eos_token_id=-1)
        while waiting and time.perf_counter() - started < cap and manager.is_running():
            result = manager.get_result(timeout=0.2)
            if result is not None and result.is_finished():
                written += len(result.generated_tokens)
                del waiting[result.request_id]
        seconds = time.perf_counter() - started
        for name in waiting:  # or it would go on until they are done
            manager.cancel_request(name)
    return {
        "seconds": round(seconds, 2),
        "finished": not waiting,
        "tokens": written,
        "requests_done": len(lengths) - len(waiting),
    }


if __name__ == "__main__":
    main()
