"""Decode, verify and draft passes against the memory bandwidth, on random weights of a known geometry.

    python benchmarks/roofline.py --geometry 7b
    python benchmarks/roofline.py --geometry 1.5b --batch 1 --verify "" --long 0

Runs the engine's own passes (the graphs that rollouts replay) for requests whose pages hold random keys and values.
Times are those of the device between the events around a replay, medians of --repeat, the passes interleaved; `round`
is what the host waits, upload and read included. The floor is the bytes that a pass must read, weights and KV, over the
bandwidth of a large copy in the same run. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from limits import copy_bandwidth, parameter_bytes, weights_per_token
from paceline.core import Request
from paceline.draft.eagle.drafter import EagleDrafter
from paceline.draft.eagle.model import DrafterShape, EagleModel
from paceline.draft.eagle.vocabulary import DRAFT_VOCAB, LARGE_VOCAB, MIN_DRAFT_VOCAB
from paceline.draft.registry import default_strategies
from paceline.draft.strategy import PLAIN, Strategy
from paceline.draft.suffix.drafter import SuffixDrafter
from paceline.kernels import device as kernels
from paceline.kernels.hopper import matmul
from paceline.model import Decoder
from paceline.rollout.runner import PassRows
from paceline.rollout.sequence import Sequence
from passes import (
    GEOMETRY,
    LOOKAHEAD_SLOTS,
    Bench,
    Clock,
    FixedDrafter,
    chain,
    config_of,
    make_model,
    pages_for,
    randomize,
    use_table,
)

DRAFT_DEPTH = 6  # draft tokens of a round


@dataclass
class Floor:
    """Bytes that a pass must read at least, and the time that they take."""

    model: Decoder
    bandwidth: float
    weights: int = field(init=False)
    per_token: int = field(init=False)

    def __post_init__(self) -> None:
        c, width = self.model.config, self.model.dtype.itemsize
        self.weights = weights_per_token(self.model) * width
        self.per_token = 2 * c.layers * c.kv_heads * c.head_dim * width

    def step(self, batch: int, context: int) -> float:
        """Milliseconds of a decode step, and of a pass that verifies few tokens: bytes of the weights and of the KV of
        batch * context tokens, over the bandwidth."""
        return 1e3 * (self.weights + batch * context * self.per_token) / self.bandwidth

    def draft(self, drafter: EagleModel, batch: int, context: int) -> float:
        """Milliseconds of a draft round: the features fused once, then layer and head for every draft token."""
        c, width = self.model.config, self.model.dtype.itemsize
        head = c.hidden_size * (c.vocab_size if drafter.vocab is None else len(drafter.vocab)) * width
        fuse = drafter.fc.numel() * width
        seen = min(context, drafter.shape.window) * self.per_token // c.layers
        layer = parameter_bytes(drafter) - fuse
        return 1e3 * (fuse + DRAFT_DEPTH * (layer + head + batch * seen)) / self.bandwidth


class Table:
    HEAD = "pass                       batch context       ms   floor x floor x 1 token bandwidth    round"

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        print("\n" + self.HEAD)

    def add(self, name: str, batch: int, context: int, times: tuple[float, float], floor: float, one: float) -> float:
        ms, host = times
        row = {"pass": name, "batch": batch, "context": context, "ms": round(ms, 4), "floor_ms": round(floor, 4)}
        row |= {"times_floor": round(ms / floor, 3), "times_one": round(ms / one, 3) if one else 1.0}
        self.rows.append(row | {"bandwidth_share": round(floor / ms, 3), "round_ms": round(host, 4)})
        print(
            f"{name:<26} {batch:>5} {context:>7} {ms:>8.3f} {floor:>7.3f} {ms / floor:>7.2f} "
            f"{ms / one if one else 1.0:>9.2f} {floor / ms:>9.0%} {host:>8.3f}",
            flush=True,
        )
        return ms


def measure_passes(args: argparse.Namespace, bench: Bench, floor: Floor, table: Table) -> dict[tuple[int, int], float]:
    """Decode steps, and passes that verify several tokens per request -> milliseconds of the decode steps."""
    plain = {}
    cases = [(batch, args.context, args.verify) for batch in args.batch]
    cases += [(args.long_batch, args.long, [8])] if args.long else []
    for batch, context, verify in cases:
        bench.seat(batch, context)
        passes = {"decode": bench.decode(batch)}
        passes |= {f"verify {n} tokens": bench.verify(batch, chain(n)) for n in verify}
        if verify and args.tree and context == args.context:
            passes[f"verify tree {args.tree.partition(':')[2]}"] = bench.verify(batch, Strategy.parse(args.tree))
        one = 0.0
        for name, times in zip(passes, bench.time(*passes.values()), strict=True):
            ms = table.add(name, batch, context, times, floor.step(batch, context), one)
            one = one or ms
        plain[batch, context] = one
    return plain


def measure_drafts(
    args: argparse.Namespace, model: Decoder, clock: Clock, floor: Floor, table: Table, plain: dict[Any, float]
) -> None:
    """Draft rounds, by window and by size of the head; passes that keep features for them."""
    batches = [b for b in args.draft_batch if (b, args.context) in plain]
    heads = [None] if model.config.vocab_size <= LARGE_VOCAB else [None, DRAFT_VOCAB, MIN_DRAFT_VOCAB]
    for size in heads if batches else []:
        for window in args.window if size is None else args.window[:1]:
            vocab = None if size is None else torch.arange(size, device=model.device)
            drafter = EagleModel(model, DrafterShape(model.config.intermediate_size, window), vocab)
            randomize(drafter)
            pages = pages_for(max(batches), args.context)
            drafting = Strategy.parse(f"neural:{DRAFT_DEPTH}")
            bench = Bench(model, clock, max(batches), args.longest, pages, [EagleDrafter(drafter)], [PLAIN, drafting])
            for batch in batches:
                bench.seat(batch, args.context)
                one = plain[batch, args.context]
                if size is None and window == args.window[0]:
                    least = floor.step(batch, args.context)
                    times = bench.time(bench.decode(batch), bench.verify(batch, Strategy("neural", 7, 1, 7)))
                    table.add("decode, keeps features", batch, args.context, times[0], least, one)
                    table.add("verify 8, keeps features", batch, args.context, times[1], least, one)
                name = f"draft {DRAFT_DEPTH}, {size or 'full'}, window {window}"
                times = bench.time(bench.draft(batch, drafting))
                bench.end_draft(batch, drafting)
                table.add(name, batch, args.context, times[0], floor.draft(drafter, batch, args.context), one)
            del bench, drafter


def compare_kernels(args: argparse.Namespace, model: Decoder, clock: Clock, floor: Floor, table: Table) -> None:
    """The same passes with cuBLAS's matmuls, with those of the table, and with PDL and so many MB of weights
    prefetched."""
    before = matmul.MATMUL_TILES, kernels.pdl, kernels.prefetch_bytes
    pages = pages_for(max(args.batch), args.context)
    cases: list[tuple[str, Any, bool, int]] = [("cublas", {}, False, 0), ("tiles", before[0], False, 0)]
    cases += [(f"pdl, {mb} MB", before[0], True, mb << 20) for mb in args.prefetch]
    for case, *settings in cases:
        matmul.MATMUL_TILES, kernels.pdl, kernels.prefetch_bytes = settings
        bench = Bench(model, clock, max(args.batch), args.longest, pages)
        for batch in args.batch:
            bench.seat(batch, args.context)
            least = floor.step(batch, args.context)
            times = bench.time(bench.decode(batch), bench.verify(batch, chain(8)))
            one = table.add(f"decode [{case}]", batch, args.context, times[0], least, 0.0)
            table.add(f"verify 8 [{case}]", batch, args.context, times[1], least, one)
        del bench
    matmul.MATMUL_TILES, kernels.pdl, kernels.prefetch_bytes = before


def measure_suffix(args: argparse.Namespace, plain: dict[Any, float]) -> list[dict[str, Any]]:
    """Host time of the suffix drafter's proposals, for which the device waits."""
    rows = []
    for batch in args.batch:
        dice = np.random.default_rng(batch)
        drafter = SuffixDrafter(batch, args.longest)
        sequences = []
        for i in range(batch):
            phrase = dice.integers(1000, size=48).tolist()  # comes again and again, so that there is much to find
            tokens = [t for _ in range(args.context // 48) for t in [*phrase, int(dice.integers(1000))]]
            sequences.append(Sequence.of(Request(i, tuple(tokens[:64]))))
            sequences[-1].tokens = tokens
        drafter.begin(sequences)
        drafter.follow(sequences)
        strategy = chain(DRAFT_DEPTH + 1)
        propose = lambda d=drafter, some=sequences, s=strategy: d.propose(some, s)  # noqa: E731
        ms = Clock(torch.device("cpu"), 50).measure(propose)[0][1]
        share = ms / plain[batch, args.context]
        rows.append({"batch": batch, "ms": round(ms, 4), "share_of_step": round(share, 4)})
        print(f"suffix drafter, batch {batch}: {1e3 * ms:.0f} µs of the host, {share:.1%} of a plain step")
    return rows


def profile(bench: Bench, batch: int, context: int, verify: int) -> dict[str, Any]:
    """The time of a pass by kernel."""
    from torch.profiler import ProfilerActivity

    bench.seat(batch, context)
    work = lambda: bench.engine.runner.decode(PassRows(batch)).read()  # noqa: E731
    if verify > 1:
        strategy = chain(verify)
        bench.engine.runner.propose(PassRows(batch), FixedDrafter(batch, strategy), strategy)
        work = lambda: bench.engine.runner.verify(PassRows(batch), strategy).read()  # noqa: E731
    work()
    runs = 5
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as traced:
        for _ in range(runs):
            work()
        torch.cuda.synchronize()
    seen = [(e.key, e.count / runs, e.self_device_time_total / runs) for e in traced.key_averages()]
    seen = sorted((k for k in seen if "Memcpy" not in k[0]), key=lambda k: -k[2])
    total = sum(k[2] for k in seen)
    count = sum(k[1] for k in seen)
    print(f"\nbatch {batch}, {verify} token(s): {count:.0f} kernels, {total:.0f} µs in them")
    if kernels.pdl:
        print("  with PDL a kernel waits within its own time, so these add up to more than the step")
    for name, times, us in seen[:18]:
        print(f"  {us:>8.1f} µs {us / total:>5.1%}  {times:>5.0f} x {us / max(times, 1):>7.2f}  {name[:90]}")
    top = [{"kernel": n[:120], "count": round(c, 1), "us": round(us, 1)} for n, c, us in seen[:18]]
    return {"batch": batch, "tokens": verify, "kernels": round(count), "us": round(total, 1), "top": top}


def capture_all(model: Decoder, most: int) -> dict[str, Any]:
    """Every graph that the default strategies can need up to a batch size: seconds and memory."""
    drafter = randomize(EagleModel(model))
    strategies = default_strategies(["suffix", EagleDrafter.name])
    context = drafter.shape.window + LOOKAHEAD_SLOTS
    clock = Clock(model.device, 1)
    bench = Bench(
        model, clock, most, context + LOOKAHEAD_SLOTS, pages_for(most, context), [EagleDrafter(drafter)], strategies
    )
    runner, started = bench.engine.runner, time.perf_counter()
    for batch in runner.ladder:
        bench.seat(batch, context)
        bench.time(bench.decode(batch))
        for strategy in [s for s in strategies[1:] if s.fits(batch)]:
            if strategy.drafter == EagleDrafter.name:
                bench.time(bench.draft(batch, strategy))
                bench.end_draft(batch, strategy)
            else:
                bench.time(bench.verify(batch, strategy))
    graphs = bench.engine.runner.graphs
    seconds = round(time.perf_counter() - started, 1)
    return {"graphs": graphs.captured, "seconds": seconds, "graph_gb": round(graphs.memory_bytes / 1e9, 3)}


def since_start() -> float:
    """Seconds since this process began, the time to import included: what a user waits."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    device = torch.device(args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    clock = Clock(device, args.repeat)
    with torch.inference_mode():
        model = make_model(config_of(args.geometry, args.longest), device)
        pages = max(pages_for(max(args.batch), args.context), pages_for(args.long_batch, args.long))
        bench = Bench(model, clock, max(*args.batch, args.long_batch if args.long else 1), args.longest, pages)
        bench.seat(args.batch[0], args.context)
        bench.engine.runner.decode(PassRows(args.batch[0])).read()
        first = since_start()
        floor = Floor(model, copy_bandwidth(device))
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        print(f"{args.geometry} on {name}, {model.dtype}: {sum(p.numel() for p in model.parameters()) / 1e9:.3f}B")
        print(f"copy       {floor.bandwidth / 1e9:.0f} GB/s, read and written")
        print(f"a step     reads {floor.weights / 1e9:.3f} GB of weights, {floor.per_token} bytes per token of context")
        print(f"start      {first:.1f} s to the first token, weights made and a graph captured")
        table = Table()
        plain = measure_passes(args, bench, floor, table)
        summary: dict[str, Any] = {"geometry": args.geometry, "device": name, "dtype": str(model.dtype)}
        summary |= {"copy_gb_s": round(floor.bandwidth / 1e9, 1), "weight_bytes": floor.weights}
        summary |= {"tiles": len(matmul.MATMUL_TILES), "pdl": kernels.pdl}
        summary["first_token_s"] = round(first, 2)
        if device.type == "cuda":
            summary["graph_gb"] = round(bench.engine.runner.graphs.memory_bytes / 1e9, 3)
            print(f"\ngraphs     {summary['graph_gb']} GB for {bench.engine.runner.graphs.captured}")
            if args.capture:
                summary["capture"] = capture_all(model, args.capture)
                print(f"default strategies up to batch {args.capture}: {summary['capture']}\n")
        measure_drafts(args, model, clock, floor, table, plain)
        if args.compare:
            compare_kernels(args, model, clock, floor, table)
        summary["suffix"] = measure_suffix(args, plain)
        if device.type == "cuda":  # last: where the profiler has been, steps take 3 % longer
            summary["profiles"] = [profile(bench, b, args.context, t) for b, t in args.profile if b in args.batch]
        summary["rows"] = table.rows
    print(json.dumps(summary))
    return summary


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=GEOMETRY, default="7b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", default="1,8,32,128")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--verify", default="4,8,16", help="tokens per request that are verified at once")
    parser.add_argument("--tree", default="suffix:6x3/15", help="a tree that is verified as well")
    parser.add_argument("--long", type=int, default=16384, help="a long context; 0 for none")
    parser.add_argument("--long-batch", type=int, default=8)
    parser.add_argument("--draft-batch", default="1,8,32")
    parser.add_argument("--window", default="512,128", help="entries in the neural drafter's window")
    parser.add_argument("--profile", default="1x1,8x1,32x8", help="batch x tokens whose kernels are listed")
    parser.add_argument("--capture", type=int, default=0, help="capture all default strategies up to this batch size")
    parser.add_argument("--compare", action="store_true", help="matmuls of cuBLAS, of the table, and with PDL")
    parser.add_argument("--prefetch", "--ahead", default="1,16", help="MB of weights that are prefetched, to compare")
    parser.add_argument("--tiles", help="a table of tiles instead of kernels/hopper/tiles.json, or `none`")
    parser.add_argument(
        "--pdl", action=argparse.BooleanOptionalAction, default=kernels.pdl,
        help="launch kernels before their predecessors have ended",
    )  # fmt: skip
    parser.add_argument("--repeat", type=int, default=20)
    args = parser.parse_args(argv)
    for name in ("batch", "verify", "draft_batch", "window", "prefetch"):
        setattr(args, name, [int(x) for x in getattr(args, name).split(",") if x])
    args.profile = [tuple(map(int, p.split("x"))) for p in args.profile.split(",") if p]
    args.longest = max(args.context, args.long) + LOOKAHEAD_SLOTS
    kernels.pdl = args.pdl
    if args.tiles:
        use_table(args.tiles)
    return args


if __name__ == "__main__":
    main()
