"""Finds the tiles that make a whole step fastest, where tune_products.py times one matmul at a time.

    python benchmarks/tune_steps.py --geometry 1.5b --rows 1 --out tiles.json
    python benchmarks/tune_steps.py --geometry 7b --rows 8 --seconds 90 --out tiles.json
    python benchmarks/roofline.py --geometry 1.5b --tiles tiles.json

With PDL, kernels overlap with their predecessors, so what is fastest alone need not be fastest in a step. For each
weight of a layer every promising tile is tried in a graph of the engine's own pass on random weights; a tile with which
the pass is faster than with the best so far, both measured interleaved, is kept. For one row the pass is a decode step,
and tiles may fuse the norm before the matmul; for more it is both a step of so many requests and a verify pass over
eight tokens each of fewer. Attention's tiles come first. The table that is written is the present one with the tiles
that were found. The last line is JSON.
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
from paceline.kernels.device import num_sms
from paceline.kernels.hopper import matmul, normed_matmul, normed_matmul_triton
from paceline.kernels.hopper.epilogue import KVRows
from paceline.kernels.hopper.matmul import Tile, TileTable
from paceline.kernels.hopper.normed_matmul import ResidualStream, RopeArgs
from paceline.kernels.paged_attention_triton import AttentionTile
from paceline.model import DecoderConfig
from paceline.rollout.pages import default_page_size
from passes import Bench, Clock, TimedGraphs, chain, config_of, make_model, pages_for

Tiles = dict[Any, Tile | AttentionTile]
"""Tiles of matmuls by (rows, out, in), and of attention by name."""
Timer = Callable[[Tiles, Tiles], tuple[float, float]]
"""Milliseconds of a pass with one set of tiles and with another, measured interleaved."""
VERIFIED = 8  # tokens of a request in a verify pass
CLEARLY = 0.998  # of the time before: what a tile must stay below to be kept
# For a single row. block_n and warps of matmuls that are fused with the norm before them, with a whole row at once.
NORMED = [(2, 4), (4, 4), (4, 8), (8, 8), (16, 16)]
# block_n, warps and blocks per program of the gate_up matmul with its norm.
BLOCKS = [(n, w, blocks) for n, w in [(2, 4), (2, 8), (4, 4), (4, 8)] for blocks in (2, 4, 8)]
# block_n, warps and unrolled iterations of others. A block of 256 columns per warp has the layout of the row, so that
# no program has to exchange parts of the row between threads.
SINGLE_ROW = [
    (4, 1, 1),
    (8, 1, 1),
    (8, 1, 2),
    (16, 1, 1),
    (4, 2, 1),
    (4, 2, 2),
    (8, 2, 1),
    (8, 2, 2),
    (4, 4, 1),
    (8, 4, 1),
]

# For a few rows. block_n, block_k, warps and stages of matmuls that are fused with the addition to the residual stream.
# There are fewer programs than SMs, so each needs many loads in flight: with four stages instead of six a pass of the
# 7B took a quarter longer.
RESIDUAL = [(32, 256, 4, 6), (32, 256, 4, 7), (32, 256, 4, 8), (32, 256, 4, 9), (32, 512, 4, 4), (32, 128, 4, 16),
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


def candidates(part: str, rows: int, out: int, size: int, sms: int) -> list[Tile]:
    """Tiles to try for a weight [out, size] on a device with `sms` SMs."""
    gated = part == "gate_up"
    if rows > 1:
        found = tune_products.tiles(rows, gated)
    else:
        found = [Tile(n, 256 * w, 1, w, vector=True, gated=gated, unroll=u) for n, w, u in SINGLE_ROW]
    found = [t for t in found if size % t.block_k == 0]
    found = [replace(t, splits=s) for t in found for s in tune_products.splits_for(t, out, size, sms)[:3]]
    if 1 < rows <= 16 and part in ("o", "down"):
        some = [Tile(n, k, 1, w, s, False, residual=True) for n, k, w, s in RESIDUAL]
        found = [t for t in some if size % t.block_k == 0] + found
    if rows == 1 and part in ("qkv", "gate_up"):
        found += [Tile(n, 512, 1, w, vector=True, gated=gated, norm=True) for n, w in NORMED]
    if rows == 1 and gated:
        found += [Tile(n, 512, 1, w, vector=True, gated=True, norm=True, blocks=b) for n, w, b in BLOCKS]
    return found


def attention_names(config: DecoderConfig, rows: int, context: int, sms: int) -> list[str]:
    """Names of attention's tiles in the passes that are measured, on a device with `sms` SMs."""
    group = config.heads // config.kv_heads
    measured = [(rows, 1)] if rows == 1 else [(rows, 1), (rows // VERIFIED, VERIFIED)]
    page = default_page_size(tune_products.DEVICE, rows)
    case = lambda batch, new: (new * group, batch * config.kv_heads, context, page, sms)  # noqa: E731
    return sorted({attention.attention_tile_name(*case(batch, new)) for batch, new in measured})


def attention_candidates(name: str) -> list[AttentionTile]:
    now = attention.ATTENTION_TILES[name]
    half = [replace(now, max_block_m=attention.MAX_QUERIES // 2)] * (
        name in (str(attention.MAX_QUERIES), "small_batch")
    )
    some = [replace(now, max_splits=m) for m in (64, 16)] + half
    some += [replace(now, block_n=n, waves=w) for n in (32, 64, 128) for w in (1, 2, 3)]
    return [replace(c, stages=stages) for stages in (now.stages, 5 - now.stages) for c in some]


def try_normed(config: DecoderConfig, part: str, tile: Tile) -> str | None:
    """Compile a kernel that is fused with its norm by running it -> what is wrong with it."""
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
    rope = RopeArgs(make(out), None, make(1, 1, d), make(1, 1, d), heads, cache)
    expected = normed_matmul.norm_qkv_matmul(stream, norm, 1e-6, weight, rope)[1]
    return tune_products.compare(
        lambda: normed_matmul_triton.norm_qkv_matmul(stream, norm, 1e-6, weight, rope, tile)[1], expected
    )


def descend(
    tiles: Tiles, tried: Iterator[tuple[str, Any, Tile | AttentionTile | None]], timer: Timer
) -> tuple[Tiles, list[dict[str, Any]]]:
    """Coordinate descent: change one tile after the other and keep what is faster -> the tiles, and the times of each
    change. None means the present tile with its first weights loaded before the wait for the predecessor."""
    log = []
    for part, key, tile in tried:
        now = tiles.get(key)
        if tile is None and isinstance(now, Tile) and now.weight_first and not (now.norm or now.cublaslt):
            tile = replace(now, preload=True)  # others preload anyway, or cannot
        if tile is None or now == tile:
            continue
        other = tiles | {key: tile}
        before, after = timer(tiles, other)
        log.append({"part": part, "tile": asdict(tile), "before_ms": round(before, 4), "after_ms": round(after, 4)})
        if after < CLEARLY * before:
            print(f"{part:<8} {before:.4f} -> {after:.4f} ms  {short(tile)}", flush=True)
            tiles = other
    return tiles, log


def short(tile: Tile | AttentionTile) -> str:
    if isinstance(tile, AttentionTile):
        return tune_products.attention_text(tile)
    extra = [name for name in ("norm", "preload") if getattr(tile, name)]
    extra += [f"x{tile.unroll}"] * (tile.unroll > 1) + [f"blocks{tile.blocks}"] * (tile.blocks > 1)
    return " ".join([tune_products.tile_text(tile), *extra])


class Steps:
    """Two engines on the same weights: one keeps the graphs of the best tiles so far, one captures the next."""

    def __init__(self, geometry: str, rows: int, context: int, device: torch.device, repeat: int):
        self.clock = Clock(device, repeat)
        self.rows = rows
        self.model = make_model(config_of(geometry, context + passes.LOOKAHEAD_SLOTS), device)
        pages = pages_for(rows, context)
        self.benches = [Bench(self.model, self.clock, rows, context + passes.LOOKAHEAD_SLOTS, pages) for _ in range(2)]
        self.tiles: list[Tiles] = [{}, {}]
        for bench in self.benches:
            bench.seat(rows, context)

    def works(self, bench: Bench) -> list[Callable[[], Any]]:
        works = [bench.decode(self.rows)]
        return works if self.rows == 1 else [*works, bench.verify(self.rows // VERIFIED, chain(VERIFIED))]

    def __call__(self, tiles: Tiles, other: Tiles) -> tuple[float, float]:
        if tiles != self.tiles[0]:
            self.benches.reverse()  # what was just tried is the best now
            self.tiles.reverse()
        works = []
        for i, wanted in enumerate((tiles, other)):
            bench = self.benches[i]
            if self.tiles[i] != wanted and bench.engine.runner.graphs is not None:
                bench.engine.runner.graphs = TimedGraphs(self.clock)
            self.tiles[i] = wanted
            apply(wanted)
            works += self.works(bench)
            for work in self.works(bench):
                work()  # captured with these tiles
        taken, half = self.clock.measure(*works), len(works) // 2
        return sum(t[0] for t in taken[:half]), sum(t[0] for t in taken[half:])


def apply(tiles: Tiles) -> None:
    matmul.MATMUL_TILES = matmul_tiles(tiles)
    attention.ATTENTION_TILES = attention_tiles(tiles)


def matmul_tiles(tiles: Tiles) -> TileTable:
    return {key: tile for key, tile in tiles.items() if isinstance(tile, Tile)}


def attention_tiles(tiles: Tiles) -> dict[str, AttentionTile]:
    return {key: tile for key, tile in tiles.items() if isinstance(tile, AttentionTile)}


def to_try(
    config: DecoderConfig, rows: int, context: int, workers: int, only: str | None = None
) -> list[tuple[str, Any, Tile | AttentionTile | None]]:
    """Attention's tiles, then matmul tiles that compile, weight by weight, then the best of those with `preload`."""
    wanted = only.split(",") if only else None
    shapes, sms = matrices(config), num_sms(tune_products.DEVICE)
    names = attention_names(config, rows, context, sms)
    found: list[tuple[str, Any, Tile | AttentionTile | None]] = [
        (f"attention {n}", n, tile) for n in names for tile in attention_candidates(n)
    ]
    found = [one for one in found if wanted is None or one[0] in wanted]
    shapes = {part: shape for part, shape in shapes.items() if wanted is None or part in wanted}
    tiles = {part: candidates(part, rows, *shape, sms) for part, shape in shapes.items()}
    jobs = {("matmul", rows, replace(t, splits=1)) for some in tiles.values() for t in some if not t.norm}
    faults = tune_products.compile_all(sorted(jobs, key=str), workers)
    for part, tile in [(part, t) for part, some in tiles.items() for t in some]:
        if tile.norm and (fault := try_normed(config, part, tile)):
            print(f"left out  {part} {short(tile)}: {fault}")
        elif tile.norm or not faults["matmul", rows, replace(tile, splits=1)]:
            found.append((part, (rows, *shapes[part]), tile))
    return found + [(part, (rows, *shape), None) for part, shape in shapes.items() if part != "gate_up"]


@torch.inference_mode()
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.tiles:
        passes.use_table(args.tiles)
    started, shipped = time.perf_counter(), matmul.MATMUL_TILES | attention.ATTENTION_TILES
    config = config_of(args.geometry, args.context + passes.LOOKAHEAD_SLOTS)
    tried = to_try(config, args.rows, args.context, args.workers, args.only)
    print(f"{len(tried)} tiles to try, compiled in {time.perf_counter() - started:.0f} s", flush=True)

    def in_time() -> Iterator[tuple[str, Any, Tile | AttentionTile | None]]:
        for n, one in enumerate(tried):
            if time.perf_counter() - started > args.seconds:
                print(f"out of time: {len(tried) - n} tiles were not tried")
                return
            yield one

    steps = Steps(args.geometry, args.rows, args.context, tune_products.DEVICE, args.repeat)
    tiles, log = descend(shipped, in_time(), steps)
    before, after = steps(shipped, tiles)
    apply(shipped)
    print(f"{args.geometry}, {args.rows} row(s): {before:.4f} -> {after:.4f} ms, {len(log)} tiles tried")
    if args.out:
        name = torch.cuda.get_device_name() if tune_products.DEVICE.type == "cuda" else "CPU"
        tune_products.write_tables(matmul_tiles(tiles), attention_tiles(tiles), name, Path(args.out))
    found = {part: asdict(tiles[key]) for part, key, _ in tried if key in tiles}
    result = {"geometry": args.geometry, "rows": args.rows, "before_ms": round(before, 4), "after_ms": round(after, 4)}
    print(json.dumps(result | {"found": found, "tried": log}))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=passes.GEOMETRY, default="1.5b")
    parser.add_argument("--rows", type=int, choices=matmul.ROW_BUCKETS, default=1)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=90.0, help="no new tile is tried after this")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile; 0: none")
    parser.add_argument("--only", help='parts to tune: "attention 16", "attention small_batch", gate_up, down, qkv, o')
    parser.add_argument("--tiles", help="a table to begin with instead of kernels/hopper/tiles.json")
    parser.add_argument("--out", help="where to write the table")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
