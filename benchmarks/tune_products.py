"""Finds the tiles of matmuls of a few rows, where they are faster than cuBLAS, and those of attention.

    python benchmarks/tune_products.py --geometry 7b,1.5b --out tiles.json
    python benchmarks/roofline.py --geometry 7b --tiles tiles.json

A table that proves itself becomes src/paceline/kernels/hopper/tiles.json.

Each matmul is timed together with its epilogue, in a graph over so many copies of its weights that they do not fit in
the cache. All kernels are compiled first, in parallel, and compared with PyTorch. The last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from limits import copy_bandwidth
from paceline.kernels import fused_triton
from paceline.kernels import paged_attention_triton as attention
from paceline.kernels.device import num_sms
from paceline.kernels.hopper import epilogue_triton as epilogue
from paceline.kernels.hopper import matmul_triton
from paceline.kernels.hopper.epilogue import KVRows
from paceline.kernels.hopper.matmul import ROW_BUCKETS, Tile, TileTable, matmul_with, tile_for
from paceline.kernels.paged_attention import chain_tree
from paceline.kernels.paged_attention_triton import AttentionTile

#           hidden heads kv d    ff
GEOMETRY = {"7b": (3584, 28, 4, 128, 18944), "1.5b": (1536, 12, 2, 128, 8960), "tiny": (64, 4, 2, 16, 128)}
PAGE = 64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # without a GPU: slowly, in Triton's interpreter
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
BEYOND_CACHE = 400e6 if DEVICE.type == "cuda" else 0.0  # bytes of weights that a graph reads
GAIN = 1.1  # times cuBLAS's time, which does not overlap with its neighbours: what a kernel must stay below to be used

# block_n, block_k, warps, stages: with the weights as the first operand, as the second, and without tensor cores.
FIRST = [(64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 6), (64, 64, 4, 4), (64, 64, 4, 8), (64, 256, 4, 3),
         (128, 64, 4, 4), (128, 64, 4, 6), (128, 64, 8, 6), (128, 128, 8, 4)]  # fmt: skip
SECOND = [(16, 256, 4, 3), (16, 256, 4, 5), (32, 128, 4, 3), (32, 128, 4, 6), (32, 256, 4, 4), (64, 128, 4, 5),
          (64, 64, 4, 8)]  # fmt: skip
VECTOR = [(4, 512, 4, 2), (8, 512, 4, 2), (16, 256, 4, 2), (16, 512, 8, 2), (8, 256, 2, 2), (32, 256, 8, 2)]
SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)  # epilogues are compiled for each of these
# block_n, max_block_m, warps, stages.
ATTENTION = [(64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 4, 2), (128, 64, 4, 3), (32, 64, 4, 4),
             (64, 64, 8, 3), (64, 128, 8, 3)]  # fmt: skip
ATTENTION_CANDIDATES = [AttentionTile(*one) for one in ATTENTION]
WAVES = (1, 2, 3, 4)


def tiles(rows: int, gated: bool) -> list[Tile]:
    """Candidates for this number of rows, without splits."""
    found = [Tile(n, k, 1, w, s, True, gated=gated) for n, k, w, s in FIRST if rows > 1]
    found += [Tile(n, k, 1, w, s, False, gated=gated) for n, k, w, s in SECOND if rows <= 32]
    found += [Tile(n, k, 1, w, s, True, True, gated) for n, k, w, s in VECTOR if rows == 1]
    if rows == 1:  # tiles of the tensor cores for a single row too
        found += [Tile(n, k, 1, w, s, True, gated=gated) for n, k, w, s in FIRST[:6]]
    if rows > 1 and not gated:
        found.append(Tile(cublaslt=True))
    return found


def splits_for(tile: Tile, out: int, size: int, sms: int) -> list[int]:
    """Numbers of splits with which the programs come nearest to 1, 2, 3, 4 and 6 per SM."""
    if tile.gated or tile.cublaslt:
        return [1]
    columns = -(-out // tile.block_n)
    blocks = -(-size // tile.block_k)
    wanted = [min(blocks, per_sm * sms / columns) for per_sm in (1, 2, 3, 4, 6)]
    return sorted({min(SPLITS, key=lambda s, w=w: abs(s - w)) for w in wanted})


# ---- compiling, in other processes ----


def try_matmul(rows: int, tile: Tile) -> str | None:
    """Compile a kernel by running it -> what is wrong with it. Shapes are small: they are arguments, not constants."""
    g = torch.Generator(DEVICE).manual_seed(0)
    out, size = (512, 2048) if DEVICE.type == "cuda" else (128, 512)
    x = torch.randn(rows, size, generator=g, device=DEVICE).to(DTYPE)
    weight = (torch.randn(out, size, generator=g, device=DEVICE) * size**-0.5).to(DTYPE)
    expected = x.float() @ weight.float().t()
    if tile.residual:
        residual, norm = torch.randn(rows, out, device=DEVICE).to(DTYPE), torch.ones(out, device=DEVICE).to(DTYPE)
        work = lambda: matmul_triton.residual_matmul(x, weight, residual, None, norm, tile)[0]  # noqa: E731
        return compare(work, expected + residual.float())
    if tile.gated:
        gate, up = expected.chunk(2, -1)
        return compare(lambda: matmul_triton.gated_matmul(x, weight, tile), F.silu(gate) * up)
    return compare(lambda: matmul_with(replace(tile, splits=3), x, weight).sum(0), expected)


def try_attention(heads: int, kv_heads: int, d: int, new: int, tile: AttentionTile) -> str | None:
    case = AttentionCase(heads, kv_heads, d, 2, new, 300, 1)
    k, v = (pool[case.table.long()].transpose(1, 2).flatten(2, 3).float() for pool in case.pools[0])
    seen = torch.arange(k.shape[2], device=DEVICE) <= 300 + torch.arange(new, device=DEVICE)[:, None]
    q = case.q.transpose(1, 2).float()
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    return compare(lambda: case.run(0, tile), expected)


def try_epilogue(geometry: str, splits: int) -> str | None:
    """Only to compile it: tests compare what it computes."""
    shapes = [Shape(geometry, part, copies=0) for part in ("qkv", "o")]
    works = [lambda s=s: s.epilogue(torch.zeros(splits, 8, s.out, device=DEVICE), s.epilogue_inputs(8)) for s in shapes]
    return next((fault for fault in (compare(w, None) for w in works) if fault), None)


def compare(work: Callable[[], Any], expected: Tensor | None) -> str | None:
    try:
        got = work()
        if expected is None:
            return None
        error = float((got.float() - expected.float()).norm() / expected.float().norm())
    except Exception as err:  # noqa: BLE001 (whatever a compiler says: this tile is left out, and the output says why)
        return f"{type(err).__name__}: {str(err).splitlines()[0][:90] if str(err) else ''}"
    return None if error < 1e-2 else f"relative error {error:.2g}"


def compile_all(jobs: list[tuple[Any, ...]], workers: int) -> dict[Any, str | None]:
    if workers:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            wrong = list(pool.map(_try, jobs, chunksize=1))
    else:
        wrong = [_try(job) for job in jobs]
    for job, fault in zip(jobs, wrong, strict=True):
        if fault:
            print(f"left out  {job[1:]}: {fault}")
    return dict(zip(jobs, wrong, strict=True))


def _try(job: tuple[Any, ...]) -> str | None:
    with torch.inference_mode():
        return {"matmul": try_matmul, "attention": try_attention, "epilogue": try_epilogue}[job[0]](*job[1:])


# ---- timing ----


@functools.cache
def side_stream() -> torch.cuda.Stream:
    """One stream for all: cuBLAS keeps a workspace for each."""
    return torch.cuda.Stream()


def graph_us(work: Callable[[int], Any], copies: int, repeat: int) -> float:
    """Microseconds of one of `copies` calls in a graph, median of the replays."""
    if DEVICE.type == "cpu":
        started = time.perf_counter()
        work(0)
        return 1e6 * (time.perf_counter() - started)
    stream = side_stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        work(0)
        graph.capture_begin()  # not the context manager, which cleans up memory each time
        for i in range(copies):
            work(i)
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    graph.replay()
    times = []
    for _ in range(repeat):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(1e3 * a.elapsed_time(b) / copies)
    return statistics.median(times)


class Shape:
    """One weight of a layer, and the epilogue of its matmul."""

    def __init__(self, geometry: str, part: str, copies: int | None = None):
        hidden, self.heads, self.kv_heads, self.d, ff = GEOMETRY[geometry]
        qkv, mixed = (self.heads + 2 * self.kv_heads) * self.d, self.heads * self.d
        self.geometry = geometry
        self.part = part
        self.out, self.size = {
            "qkv": (qkv, hidden), "o": (hidden, mixed), "gate_up": (2 * ff, hidden), "down": (hidden, ff),
            "draft qkv": (qkv, 2 * hidden),
        }[part]  # fmt: skip
        self.gated = part == "gate_up"
        self.bytes = 2 * self.out * self.size
        self.copies = max(2, int(BEYOND_CACHE // self.bytes) + 1) if copies is None else copies
        shape = (self.copies, self.out, self.size)
        self.weights = torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_(0, 0.02)

    def epilogue_inputs(self, rows: int) -> tuple[Any, ...]:
        """Other inputs of the epilogue: residual (or bias), norm, rotation, cache."""
        kind: dict[str, Any] = {"dtype": DTYPE, "device": DEVICE}
        pool = torch.zeros(2, rows * self.kv_heads, self.d, **kind)
        cache = KVRows(pool[0], pool[1], torch.arange(rows * self.kv_heads, device=DEVICE))
        rotation = torch.randn(rows, 1, self.d, **kind)
        return torch.randn(rows, self.out, **kind), torch.ones(self.out, **kind), rotation, cache

    def epilogue(self, parts: Tensor, inputs: tuple[Any, ...]) -> Any:
        residual, norm, rotation, cache = inputs
        if self.part.endswith("qkv"):
            return epilogue.rope_and_cache(parts, norm, None, rotation, rotation, (self.heads, self.kv_heads), cache)
        return epilogue.add_norm(parts, residual, None, norm, 1e-6)

    def run(self, x: Tensor, i: int, tile: Tile | None, inputs: tuple[Any, ...]) -> Any:
        """Matmul i with a tile, or with cuBLAS, and its epilogue."""
        weight = self.weights[i]
        if self.gated and tile is None:
            return fused_triton.gated(torch.mm(x, weight.t()))
        if self.gated:
            return matmul_triton.gated_matmul(x, weight, tile)
        return self.epilogue(matmul_with(tile, x, weight), inputs)

    def us(self, rows: int, tile: Tile | None, repeat: int) -> float:
        x, inputs = torch.randn(rows, self.size, dtype=DTYPE, device=DEVICE), self.epilogue_inputs(rows)
        return graph_us(lambda i: self.run(x, i, tile, inputs), self.copies, repeat)


def tune_shape(
    shape: Shape, rows_list: list[int], faults: dict[Any, Any], bandwidth: float, repeat: int
) -> Iterator[dict[str, Any]]:
    sms = num_sms(DEVICE)
    for rows in rows_list:
        floor = 1e6 * shape.bytes / bandwidth
        cublas = shape.us(rows, None, repeat)
        timed: list[tuple[float, Tile]] = []
        for tile in tiles(rows, shape.gated) if rows in ROW_BUCKETS else []:
            if faults.get(("matmul", rows, tile)) or shape.size % tile.block_k:
                continue
            for splits in splits_for(tile, shape.out, shape.size, sms):
                candidate = replace(tile, splits=splits)
                timed.append((shape.us(rows, candidate, repeat), candidate))
        if rows not in ROW_BUCKETS and (shipped := tile_for(rows, shape.weights[0])) is not None:
            timed.append((shape.us(rows, shipped, repeat), shipped))  # what is fast with 128 rows need not be with 72
        timed.sort(key=lambda pair: rated(*pair))
        row: dict[str, Any] = {"geometry": shape.geometry, "part": shape.part, "rows": rows}
        row |= {"out": shape.out, "in": shape.size, "floor_us": round(floor, 2), "cublas_us": round(cublas, 2)}
        line = f"{shape.geometry:>5} {shape.part:<9} {rows:>4} rows  floor {floor:7.2f}"
        line += f"  cuBLAS {cublas:7.2f} ({cublas / floor:.2f})"
        if timed:
            own = timed[0][0]
            row |= {"own_us": round(own, 2), "tile": asdict(timed[0][1]), "used": rated(*timed[0]) < GAIN * cublas}
            row["next"] = [[round(us, 2), tile_text(t)] for us, t in timed[1:6]]
            line += f"  own {own:7.2f} ({own / floor:.2f})  {tile_text(timed[0][1])}"
            line += "" if row["used"] else "  not used"
        print(line, flush=True)
        yield row


def rated(us: float, tile: Tile) -> float:
    """Microseconds made comparable between kernels and libraries, which do not overlap with their neighbours."""
    return GAIN * us if tile.cublaslt else us


def tile_text(tile: Tile) -> str:
    if tile.cublaslt:
        return "cuBLASLt"
    operand = "vector" if tile.vector else "first" if tile.weight_first else "second"
    residual = " residual" if tile.residual else ""
    return f"{tile.block_n}x{tile.block_k} /{tile.splits} w{tile.warps} s{tile.stages} {operand}{residual}"


class AttentionCase:
    def __init__(self, heads: int, kv_heads: int, d: int, batch: int, new: int, context: int, copies: int):
        self.batch = batch
        self.new = new
        self.context = context
        self.copies = copies
        kind: dict[str, Any] = {"dtype": DTYPE, "device": DEVICE}
        max_pages = (context + new) // PAGE + 1
        self.bytes = 2 * batch * context * kv_heads * d * 2
        self.q = torch.randn(batch, new, heads, d, **kind)
        self.pools = torch.empty(copies, 2, batch * max_pages + 1, kv_heads, PAGE, d, **kind).normal_()
        pages = torch.randperm(batch * max_pages, device=DEVICE) + 1
        self.table = pages.view(batch, max_pages).int()
        self.contexts = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
        self.tree = chain_tree(batch, new, DEVICE)

    def run(self, i: int, tile: AttentionTile) -> Tensor:
        k, v = self.pools[i]
        return attention.paged_attention(self.q, k, v, self.table, self.contexts, self.tree, tile=tile)


def tune_attention(args: argparse.Namespace, faults: dict[Any, Any], bandwidth: float) -> list[dict[str, Any]]:
    _, heads, kv_heads, d, _ = GEOMETRY[args.geometry[0]]
    found = []
    for batch, new, context in args.attention:
        size = 2 * batch * context * kv_heads * d * 2
        case = AttentionCase(heads, kv_heads, d, batch, new, context, max(2, min(40, int(BEYOND_CACHE // size) + 1)))
        floor = 1e6 * case.bytes / bandwidth
        timed = []
        for candidate in ATTENTION_CANDIDATES:
            if faults.get(("attention", heads, kv_heads, d, new, candidate)):
                continue
            for waves in WAVES:
                tile = replace(candidate, waves=waves)
                timed.append((graph_us(lambda i, t=tile, a=case: a.run(i, t), case.copies, args.repeat), tile))
        before = next((us for us, tile in timed if tile == AttentionTile()), float("nan"))
        timed.sort(key=lambda pair: pair[0])
        us, best = timed[0]
        print(
            f"attention batch {batch:>3} x {new:>2} tokens, context {context:>5}: floor {floor:6.2f}  "
            f"default {before:6.2f}  best {us:6.2f} ({us / floor:.2f})  {attention_text(best)};  then "
            + ", ".join(f"{t:.2f} {attention_text(c)}" for t, c in timed[1:4]),
            flush=True,
        )
        row = {"batch": batch, "new": new, "context": context, "floor_us": round(floor, 2), "best_us": round(us, 2)}
        found.append(row | {"tile": asdict(best), "all": [[round(t, 2), attention_text(c)] for t, c in timed]})
        del case
    return found


def attention_text(tile: AttentionTile) -> str:
    shape = f"n{tile.block_n} m{tile.max_block_m} w{tile.warps} s{tile.stages}"
    return f"{shape} waves{tile.waves} splits{tile.max_splits}"


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.manual_seed(0)
    started = time.perf_counter()
    rows = [r for r in args.rows if r in ROW_BUCKETS]
    jobs: list[tuple[Any, ...]] = [("matmul", r, t) for r in rows for gated in (False, True) for t in tiles(r, gated)]
    jobs += [
        ("attention", *GEOMETRY[args.geometry[0]][1:4], new, tile)
        for new in sorted({new for _, new, _ in args.attention})
        for tile in ATTENTION_CANDIDATES
    ]
    jobs += [("epilogue", geometry, splits) for geometry in args.geometry for splits in SPLITS]
    faults = compile_all(list(dict.fromkeys(jobs)), args.workers)
    print(f"{len(jobs)} kernels compiled and checked in {time.perf_counter() - started:.0f} s", flush=True)
    with torch.inference_mode():
        bandwidth = copy_bandwidth(DEVICE)
        print(f"copy {bandwidth / 1e9:.0f} GB/s, read and written; microseconds, (times the floor)")
        found: list[dict[str, Any]] = []
        attention_rows = tune_attention(args, faults, bandwidth)
        for geometry in args.geometry:
            for part in ("qkv", "o", "gate_up", "down", "draft qkv"):
                if time.perf_counter() - started > 60 * args.minutes:
                    print(f"out of time before {geometry} {part}")
                    continue
                found += tune_shape(Shape(geometry, part), args.rows, faults, bandwidth, args.repeat)
                if DEVICE.type == "cuda":
                    torch.cuda.empty_cache()
    better = [r for r in found if r["rows"] in ROW_BUCKETS and r.get("used")]
    table = {(r["rows"], r["out"], r["in"]): Tile(**r["tile"]) for r in better}
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    if args.out:
        write_tables(table, attention.ATTENTION_TILES, device, Path(args.out))
    print(f"{time.perf_counter() - started:.0f} s")
    summary = {"device": device, "copy_gb_s": round(bandwidth / 1e9, 1), "matmuls": found, "attention": attention_rows}
    print(json.dumps(summary))


def write_tables(tiles: TileTable, attention_tiles: dict[str, AttentionTile], device: str, file: Path) -> None:
    """In the form of kernels/hopper/tiles.json: a matmul's tile a line, without fields that have their default."""
    entries = [{"rows": r, "out": out, "in": size, "tile": _changed(tile)} for (r, out, size), tile in tiles.items()]
    lines = ",\n".join("  " + json.dumps(e) for e in entries)
    named = json.dumps({name: _changed(tile) for name, tile in attention_tiles.items()})
    file.write_text(f'{{"device": "{device}", "tiles": [\n{lines}\n], "attention": {named}}}\n')


def _changed(tile: Tile | AttentionTile) -> dict[str, Any]:
    """The fields that do not have their default."""
    return {f.name: getattr(tile, f.name) for f in fields(tile) if getattr(tile, f.name) != f.default}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="7b,1.5b")
    parser.add_argument(
        "--rows", default=",".join(map(str, ROW_BUCKETS)), help="others are timed with the present table"
    )
    cases = "1x1x2048,8x1x2048,32x1x2048,128x1x2048,8x1x16384,1x8x2048,8x8x2048,32x4x2048,32x8x2048,8x16x2048"
    parser.add_argument("--attention", default=cases, help="batch x new tokens x context")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=3.0, help="no new matrix is begun after this")
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that compile; 0: none"
    )
    parser.add_argument("--out", help="where to write the table")
    args = parser.parse_args(argv)
    args.geometry = args.geometry.split(",")
    args.rows = [int(r) for r in args.rows.split(",")]
    args.attention = [tuple(map(int, c.split("x"))) for c in args.attention.split(",") if c]
    return args


if __name__ == "__main__":
    main()
