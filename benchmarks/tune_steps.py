"""Finds the tiles that make a whole step quickest, where tune_products.py looks at one product at a time.

    python benchmarks/tune_steps.py --geometry 1.5b --rows 1 --out tiles.json
    python benchmarks/tune_steps.py --geometry 7b --rows 8 --seconds 90 --out tiles.json
    python benchmarks/roofline.py --geometry 1.5b --tiles tiles.json

Kernels that start early overlap with those before them, so what is quickest alone need not be quickest in a step. Each
matrix of a layer in turn is given every tile that may be worth it, in a graph of the engine's own pass on random
weights; a tile that makes the pass quicker than the best so far, both measured in turns, stays. For one row the pass is
a decode step, and tiles may take the norm in front of them along; for more it is both a step of so many requests and a
check of eight tokens each of fewer. How attention is cut up is looked at first. The table that is written is the
shipped one with what was found. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import passes
import tune_products
from paceline.kernels import paged_attention_triton as attention
from paceline.kernels.device import processors
from paceline.kernels.hopper import matmul, normed_matmul, normed_matmul_triton
from paceline.kernels.hopper.epilogue import KVRows
from paceline.kernels.hopper.matmul import Table, Tile
from paceline.kernels.hopper.normed_matmul import ResidualStream, RopeArgs
from paceline.kernels.paged_attention_triton import Cut
from paceline.model import DecoderConfig
from paceline.rollout.pages import default_page_size
from passes import Bench, Clock, TimedGraphs, chain, config_of, make_model, pages_for

Ways = dict[Any, Tile | Cut]
"""Tiles by rows, out and in, and cuts by name."""
Timer = Callable[[Ways, Ways], tuple[float, float]]
"""Milliseconds of a pass done in one way and in another, measured in turns."""
CHECKED = 8  # tokens of a request, where the pass is a check
CLEARLY = 0.998  # of the time before: what a tile must stay below
# For a single row. block_n and warps of products that take their norm along, with all of a row at once.
NORMED = [(2, 4), (4, 4), (4, 8), (8, 8), (16, 16)]
# The same where they make several blocks, with gates.
TURNS = [(n, w, turns) for n, w in [(2, 4), (2, 8), (4, 4), (4, 8)] for turns in (2, 4, 8)]
# block_n, warps and blocks asked for at once of others. A block of 256 columns per warp lies as the row does, so that
# no program has to hand parts of the row around.
LONE = [(4, 1, 1), (8, 1, 1), (8, 1, 2), (16, 1, 1), (4, 2, 1), (4, 2, 2), (8, 2, 1), (8, 2, 2), (4, 4, 1), (8, 4, 1)]

# For a few rows. block_n, block_k, warps and stages of products that are added to the residual stream by themselves.
# There are fewer programs than processors, so each has to have much on its way: with four stages instead of six a pass
# of the 7B took a quarter longer.
ADDED = [(32, 256, 4, 6), (32, 256, 4, 7), (32, 256, 4, 8), (32, 256, 4, 9), (32, 512, 4, 4), (32, 128, 4, 16),
         (16, 512, 2, 4), (16, 512, 2, 5), (16, 512, 2, 6), (16, 512, 1, 5), (16, 256, 2, 10),
         (16, 1024, 4, 3)]  # fmt: skip


def matrices(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Rows and columns of a layer's weights, the largest first."""
    hidden, mixed = config.hidden_size, config.heads * config.head_dim
    return {
        "gate_up": (2 * config.intermediate_size, hidden),
        "down": (hidden, config.intermediate_size),
        "qkv": (mixed + 2 * config.kv_heads * config.head_dim, hidden),
        "o": (hidden, mixed),
    }


def candidates(part: str, rows: int, out: int, size: int, most: int) -> list[Tile]:
    """For a card with `most` processors."""
    gated = part == "gate_up"
    if rows > 1:
        found = tune_products.tiles(rows, gated)
    else:
        found = [Tile(n, 256 * w, 1, w, vector=True, gated=gated, unroll=u) for n, w, u in LONE]
    found = [t for t in found if size % t.block_k == 0]
    found = [replace(t, splits=s) for t in found for s in tune_products.splits_for(t, out, size, most)[:3]]
    if 1 < rows <= 16 and part in ("o", "down"):
        some = [Tile(n, k, 1, w, s, False, added=True) for n, k, w, s in ADDED]
        found = [t for t in some if size % t.block_k == 0] + found
    if rows == 1 and part in ("qkv", "gate_up"):
        found += [Tile(n, 512, 1, w, vector=True, gated=gated, norm=True) for n, w in NORMED]
    if rows == 1 and gated:
        found += [Tile(n, 512, 1, w, vector=True, gated=True, norm=True, turns=turns) for n, w, turns in TURNS]
    return found


def cut_names(config: DecoderConfig, rows: int, context: int, most: int) -> list[str]:
    """Of the passes that are measured, for a card with `most` processors."""
    group = config.heads // config.kv_heads
    measured = [(rows, 1)] if rows == 1 else [(rows, 1), (rows // CHECKED, CHECKED)]
    page = default_page_size(tune_products.DEVICE, rows)
    case = lambda batch, new: (new * group, batch * config.kv_heads, context, page, most)  # noqa: E731
    return sorted({attention.cut_name(*case(batch, new)) for batch, new in measured})


def cuts(name: str) -> list[Cut]:
    now = attention.CUTS[name]
    half = [replace(now, most_m=attention.WIDEST // 2)] * (name in (str(attention.WIDEST), "lone"))
    some = [replace(now, most_splits=m) for m in (64, 16)] + half
    some += [replace(now, block_n=n, waves=w) for n in (32, 64, 128) for w in (1, 2, 3)]
    return [replace(c, stages=stages) for stages in (now.stages, 5 - now.stages) for c in some]


def try_normed(config: DecoderConfig, part: str, tile: Tile) -> str | None:
    """Compile a kernel that takes its norm along by using it -> what is wrong with it."""
    (out, size), heads, d = matrices(config)[part], (config.heads, config.kv_heads), config.head_dim
    make = lambda *shape: torch.randn(shape, device=tune_products.DEVICE).to(tune_products.DTYPE)  # noqa: E731
    stream, norm, weight = (
        ResidualStream(make(1, size), make(3, 1, size).float()),
        make(size),
        make(out, size) * size**-0.5,
    )
    if part == "gate_up":
        expected = normed_matmul.norm_gated_matmul(stream, norm, 1e-6, weight)[1]
        return tune_products.compare(
            lambda: normed_matmul_triton.norm_gated_matmul(stream, norm, 1e-6, weight, tile)[1], expected
        )
    cache = KVRows(make(8, d), make(8, d), torch.arange(heads[1], device=tune_products.DEVICE))
    turn = RopeArgs(make(out), None, make(1, 1, d), make(1, 1, d), heads, cache)
    expected = normed_matmul.norm_qkv_matmul(stream, norm, 1e-6, weight, turn)[1]
    return tune_products.compare(
        lambda: normed_matmul_triton.norm_qkv_matmul(stream, norm, 1e-6, weight, turn, tile)[1], expected
    )


def descend(
    ways: Ways, tried: Iterator[tuple[str, Any, Tile | Cut | None]], timer: Timer
) -> tuple[Ways, list[dict[str, Any]]]:
    """Change one way after the other and keep what pays -> the ways, and what each change took. Nothing for a way is
    the one that stands, which begins before its turn."""
    log = []
    for part, key, way in tried:
        now = ways.get(key)
        if way is None and isinstance(now, Tile) and now.weight_first and not (now.norm or now.library):
            way = replace(now, ahead=True)  # others begin before their turn anyway, or cannot
        if way is None or now == way:
            continue
        other = ways | {key: way}
        before, after = timer(ways, other)
        log.append({"part": part, "way": asdict(way), "before_ms": round(before, 4), "after_ms": round(after, 4)})
        if after < CLEARLY * before:
            print(f"{part:<8} {before:.4f} -> {after:.4f} ms  {short(way)}", flush=True)
            ways = other
    return ways, log


def short(tile: Tile | Cut) -> str:
    if isinstance(tile, Cut):
        return tune_products.cut_text(tile)
    extra = [name for name in ("norm", "ahead") if getattr(tile, name)]
    extra += [f"x{tile.unroll}"] * (tile.unroll > 1) + [f"turns{tile.turns}"] * (tile.turns > 1)
    return " ".join([tune_products.tile_text(tile), *extra])


class Steps:
    """Two engines on the same weights: one keeps the graphs of the best way so far, one captures the next."""

    def __init__(self, geometry: str, rows: int, context: int, device: torch.device, repeat: int):
        self.clock, self.rows = Clock(device, repeat), rows
        self.model = make_model(config_of(geometry, context + passes.ROOM), device)
        pages = pages_for(rows, context)
        self.benches = [Bench(self.model, self.clock, rows, context + passes.ROOM, pages) for _ in range(2)]
        self.ways: list[Ways] = [{}, {}]
        for bench in self.benches:
            bench.seat(rows, context)

    def works(self, bench: Bench) -> list[Callable[[], Any]]:
        works = [bench.decode(self.rows)]
        return works if self.rows == 1 else [*works, bench.verify(self.rows // CHECKED, chain(CHECKED))]

    def __call__(self, ways: Ways, other: Ways) -> tuple[float, float]:
        if ways != self.ways[0]:
            self.benches.reverse()  # what was just tried is the best now
            self.ways.reverse()
        works = []
        for i, wanted in enumerate((ways, other)):
            bench = self.benches[i]
            if self.ways[i] != wanted and bench.engine.runner.graphs is not None:
                bench.engine.runner.graphs = TimedGraphs(self.clock)
            self.ways[i] = wanted
            apply(wanted)
            works += self.works(bench)
            for work in self.works(bench):
                work()  # captured as it is to be done
        taken, half = self.clock.measure(*works), len(works) // 2
        return sum(t[0] for t in taken[:half]), sum(t[0] for t in taken[half:])


def apply(ways: Ways) -> None:
    matmul.TILES = tiles_of(ways)
    attention.CUTS = cuts_of(ways)


def tiles_of(ways: Ways) -> Table:
    return {key: way for key, way in ways.items() if isinstance(way, Tile)}


def cuts_of(ways: Ways) -> dict[str, Cut]:
    return {key: way for key, way in ways.items() if isinstance(way, Cut)}


def to_try(
    config: DecoderConfig, rows: int, context: int, workers: int, only: str | None = None
) -> list[tuple[str, Any, Tile | Cut | None]]:
    """Cuts, then tiles that compile, matrix by matrix, then those that were found with their first weights early."""
    wanted = only.split(",") if only else None
    shapes, most = matrices(config), processors(tune_products.DEVICE)
    names = cut_names(config, rows, context, most)
    found: list[tuple[str, Any, Tile | Cut | None]] = [(f"cut {n}", n, cut) for n in names for cut in cuts(n)]
    found = [way for way in found if wanted is None or way[0] in wanted]
    shapes = {part: shape for part, shape in shapes.items() if wanted is None or part in wanted}
    tiles = {part: candidates(part, rows, *shape, most) for part, shape in shapes.items()}
    jobs = {("product", rows, replace(t, splits=1)) for some in tiles.values() for t in some if not t.norm}
    faults = tune_products.compile_all(sorted(jobs, key=str), workers)
    for part, tile in [(part, t) for part, some in tiles.items() for t in some]:
        if tile.norm and (fault := try_normed(config, part, tile)):
            print(f"left out  {part} {short(tile)}: {fault}")
        elif tile.norm or not faults["product", rows, replace(tile, splits=1)]:
            found.append((part, (rows, *shapes[part]), tile))
    return found + [(part, (rows, *shape), None) for part, shape in shapes.items() if part != "gate_up"]


@torch.inference_mode()
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.tiles:
        passes.use_table(args.tiles)
    started, shipped = time.perf_counter(), matmul.TILES | attention.CUTS
    config = config_of(args.geometry, args.context + passes.ROOM)
    tried = to_try(config, args.rows, args.context, args.workers, args.only)
    print(f"{len(tried)} ways to try, compiled in {time.perf_counter() - started:.0f} s", flush=True)

    def in_time() -> Iterator[tuple[str, Any, Tile | Cut | None]]:
        for n, one in enumerate(tried):
            if time.perf_counter() - started > args.seconds:
                print(f"out of time: {len(tried) - n} ways were not tried")
                return
            yield one

    steps = Steps(args.geometry, args.rows, args.context, tune_products.DEVICE, args.repeat)
    ways, log = descend(shipped, in_time(), steps)
    before, after = steps(shipped, ways)
    apply(shipped)
    print(f"{args.geometry}, {args.rows} row(s): {before:.4f} -> {after:.4f} ms, {len(log)} ways tried")
    if args.out:
        name = torch.cuda.get_device_name() if tune_products.DEVICE.type == "cuda" else "CPU"
        tune_products.write_table(tiles_of(ways), cuts_of(ways), name, Path(args.out))
    found = {part: asdict(ways[key]) for part, key, _ in tried if key in ways}
    result = {"geometry": args.geometry, "rows": args.rows, "before_ms": round(before, 4), "after_ms": round(after, 4)}
    print(json.dumps(result | {"found": found, "tried": log}))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=passes.GEOMETRY, default="1.5b")
    parser.add_argument("--rows", type=int, choices=matmul.ROWS, default=1)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=90.0, help="no new tile is tried after this")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile; 0: none")
    parser.add_argument("--only", help='parts to look at: "cut 16", "cut lone", gate_up, down, qkv, o')
    parser.add_argument("--tiles", help="a table to begin with instead of the shipped one")
    parser.add_argument("--out", help="where to write the table")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
