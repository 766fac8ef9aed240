"""Finds the tiles that make a whole step quickest, where tune_products.py looks at one product at a time.

    python benchmarks/tune_steps.py --geometry 1.5b --rows 1 --out tiles.json
    python benchmarks/tune_steps.py --geometry 7b --rows 8 --seconds 90 --out tiles.json
    python benchmarks/roofline.py --geometry 1.5b --tiles tiles.json

Kernels that start early overlap with those before them, so what is quickest alone need not be quickest in a step. Each
matrix of a layer in turn is given every tile that may be worth it, in a graph of the engine's own pass on random
weights; a tile that makes the pass quicker than the best so far, both measured in turns, stays. For one row the pass is
a decode step, and tiles may take the norm in front of them along; for eight it is both a check of eight tokens of one
request and a step of eight. The table that is written is the shipped one with what was found. The last line is JSON.
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

import roofline
import tune_products
from paceline.kernels import product, single, single_triton
from paceline.kernels.device import processors
from paceline.kernels.epilogue import Cache
from paceline.kernels.product import Table, Tile
from paceline.kernels.single import Sum, Turn
from paceline.model import DecoderConfig
from roofline import Bench, Clock, TimedGraphs, chain, config_of, make_model, pages_for

Key = tuple[int, int, int]
Timer = Callable[[Table, Table], tuple[float, float]]
"""Milliseconds of a pass with one table and with another, measured in turns."""
CLEARLY = 0.998  # of the time before: what a tile must stay below
# For a single row. block_n and warps of products that take their norm along, with all of a row at once.
NORMED = [(2, 4), (4, 4), (4, 8), (8, 8), (16, 16)]
# block_n, warps and blocks asked for at once of others. A block of 256 columns per warp lies as the row does, so that
# no program has to hand parts of the row around.
PLAIN = [(4, 1, 1), (8, 1, 1), (8, 1, 2), (16, 1, 1), (4, 2, 1), (4, 2, 2), (8, 2, 1), (8, 2, 2), (4, 4, 1), (8, 4, 1)]


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
        found = [Tile(n, 256 * w, 1, w, vector=True, gated=gated, unroll=u) for n, w, u in PLAIN]
        found += [] if gated else [replace(t, ahead=True) for t in found]
    found = [t for t in found if size % t.block_k == 0]
    found = [replace(t, splits=s) for t in found for s in tune_products.splits_for(t, out, size, most)[:3]]
    if rows == 1 and part in ("qkv", "gate_up"):
        found += [Tile(n, 512, 1, w, vector=True, gated=gated, norm=True) for n, w in NORMED]
    return found


def try_normed(config: DecoderConfig, part: str, tile: Tile) -> str | None:
    """Compile a kernel that takes its norm along by using it -> what is wrong with it."""
    (out, size), heads, d = matrices(config)[part], (config.heads, config.kv_heads), config.head_dim
    make = lambda *shape: torch.randn(shape, device=tune_products.DEVICE).to(tune_products.DTYPE)  # noqa: E731
    stream, norm, weight = Sum(make(1, size), make(3, 1, size).float()), make(size), make(out, size) * size**-0.5
    if part == "gate_up":
        expected = single.norm_gated(stream, norm, 1e-6, weight)[1]
        return tune_products.compare(lambda: single_triton.norm_gated(stream, norm, 1e-6, weight, tile)[1], expected)
    cache = Cache(make(8, d), make(8, d), torch.arange(heads[1], device=tune_products.DEVICE))
    turn = Turn(make(out), None, make(1, 1, d), make(1, 1, d), heads, cache)
    expected = single.norm_heads(stream, norm, 1e-6, weight, turn)[1]
    return tune_products.compare(lambda: single_triton.norm_heads(stream, norm, 1e-6, weight, turn, tile)[1], expected)


def descend(table: Table, tried: Iterator[tuple[str, Key, Tile]], timer: Timer) -> tuple[Table, list[dict[str, Any]]]:
    """Put tiles into the table one by one and keep those that pay -> the table, and what each of them took."""
    log = []
    for part, key, tile in tried:
        if table.get(key) == tile:
            continue
        other = table | {key: tile}
        before, after = timer(table, other)
        kept = after < CLEARLY * before
        log.append({"part": part, "tile": asdict(tile), "before_ms": round(before, 4), "after_ms": round(after, 4)})
        if kept:
            print(f"{part:<8} {before:.4f} -> {after:.4f} ms  {short(tile)}", flush=True)
            table = other
    return table, log


def short(tile: Tile) -> str:
    extra = [name for name in ("norm", "ahead") if getattr(tile, name)] + [f"x{tile.unroll}"] * (tile.unroll > 1)
    return " ".join([tune_products._short(tile), *extra])


class Steps:
    """Two engines on the same weights: one keeps the graphs of the best table so far, one captures the next."""

    def __init__(self, geometry: str, rows: int, context: int, device: torch.device, repeat: int):
        self.clock, self.rows = Clock(device, repeat), rows
        self.model = make_model(config_of(geometry, context + roofline.ROOM), device)
        pages = pages_for(rows, context)
        self.benches = [Bench(self.model, self.clock, rows, context + roofline.ROOM, pages) for _ in range(2)]
        self.tables: list[Table | None] = [None, None]
        for bench in self.benches:
            bench.seat(rows, context)

    def works(self, bench: Bench) -> list[Callable[[], Any]]:
        works = [bench.decode(self.rows)]
        return works if self.rows == 1 else [*works, bench.verify(1, chain(self.rows))]

    def __call__(self, table: Table, other: Table) -> tuple[float, float]:
        if table != self.tables[0]:
            self.benches.reverse()  # what was just tried is the best now
            self.tables.reverse()
        for i, wanted in enumerate((table, other)):
            if self.tables[i] != wanted:
                engine = self.benches[i].engine
                if engine.graphs is not None:
                    engine.graphs = engine.runner.graphs = TimedGraphs(self.clock)
                self.tables[i] = wanted
        times = []
        for i, bench in enumerate(self.benches):
            product.TILES = self.tables[i] or {}
            for work in self.works(bench):
                work()  # captured with the table that stands
            times.append(self.works(bench))
        mine, theirs = times
        taken = self.clock.measure(*mine, *theirs)
        half = len(mine)
        return sum(t[0] for t in taken[:half]), sum(t[0] for t in taken[half:])


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started, shipped = time.perf_counter(), product.TILES
    config = config_of(args.geometry, args.context + roofline.ROOM)
    shapes, most = matrices(config), processors(device)
    every = [
        (part, (args.rows, *shape), tile)
        for part, shape in shapes.items()
        for tile in candidates(part, args.rows, *shape, most)
    ]
    jobs = {("product", args.rows, replace(t, splits=1)) for _, _, t in every if not t.norm}
    faults = tune_products.compile_all(sorted(jobs, key=str), args.workers)
    with torch.inference_mode():
        faults |= {("normed", part, t): try_normed(config, part, t) for part, _, t in every if t.norm}

    def fault(part: str, tile: Tile) -> str | None:
        return faults[("normed", part, tile) if tile.norm else ("product", args.rows, replace(tile, splits=1))]

    fine = [(part, key, tile) for part, key, tile in every if not fault(part, tile)]
    for part, _, tile in every:
        if tile.norm and fault(part, tile):
            print(f"left out  {part} {short(tile)}: {fault(part, tile)}")
    print(f"{len(fine)} tiles to try, compiled in {time.perf_counter() - started:.0f} s", flush=True)

    def in_time() -> Iterator[tuple[str, Key, Tile]]:
        for n, one in enumerate(fine):
            if time.perf_counter() - started > args.seconds:
                print(f"out of time: {len(fine) - n} tiles were not tried")
                return
            yield one

    with torch.inference_mode():
        steps = Steps(args.geometry, args.rows, args.context, device, args.repeat)
        table, log = descend(shipped, in_time(), steps)
        before, after = steps(shipped, table)
    product.TILES = shipped
    print(f"{args.geometry}, {args.rows} row(s): {before:.4f} -> {after:.4f} ms, {len(log)} tiles tried")
    if args.out:
        write(table, Path(args.out), device)
    found = {part: asdict(table[key]) for part, shape in shapes.items() if (key := (args.rows, *shape)) in table}
    result = {"geometry": args.geometry, "rows": args.rows, "before_ms": round(before, 4), "after_ms": round(after, 4)}
    print(json.dumps(result | {"tiles": found, "tried": log}))


def write(table: Table, file: Path, device: torch.device) -> None:
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    entries = [{"rows": rows, "out": out, "in": size, "tile": asdict(t)} for (rows, out, size), t in table.items()]
    lines = ",\n".join("  " + json.dumps(e) for e in entries)
    file.write_text(f'{{"device": "{name}", "tiles": [\n{lines}\n]}}\n')


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=roofline.GEOMETRY, default="1.5b")
    parser.add_argument("--rows", type=int, choices=product.ROWS, default=1)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=90.0, help="no new tile is tried after this")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile; 0: none")
    parser.add_argument("--out", help="where to write the table")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
