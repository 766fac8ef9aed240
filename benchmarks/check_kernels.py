"""Every kernel on small random cases against its reference: quick enough for a memory checker.

    python benchmarks/check_kernels.py
    make sanitize         # the same under compute-sanitizer, on a machine with a CUDA device

Without a GPU it runs in Triton's interpreter (TRITON_INTERPRET=1). The last line is JSON; the exit code is 1 if any
kernel is off by more than 1e-2 in bfloat16 or 1e-5 in float32.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels import (
    accept,
    accept_triton,
    adam,
    adam_triton,
    device,
    feature_ring,
    feature_ring_triton,
    fused_triton,
    gumbel_argmax_triton,
    move_kv,
    move_kv_triton,
    positions,
    positions_triton,
)
from paceline.kernels import gumbel_argmax as sampling
from paceline.kernels.hopper import epilogue, epilogue_triton, matmul_triton, normed_matmul, normed_matmul_triton
from paceline.kernels.hopper.epilogue import HeadNorms, KVRows
from paceline.kernels.hopper.matmul import Tile
from paceline.kernels.noise import gumbel, position_keys
from paceline.kernels.paged_attention_triton import AttentionTile, paged_attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAMES = (
    "attention",
    "matmul",
    "normed_matmul",
    "epilogue",
    "gumbel_argmax",
    "positions",
    "move_kv",
    "accept",
    "adam",
    "fused",
)
BOUND = {torch.bfloat16: 1e-2, torch.float32: 1e-5}  # largest relative error


class Check:
    """Random cases in one dtype: a method per kernel module -> pairs of a kernel's result and the reference's."""

    def __init__(self, seed: int, dtype: torch.dtype):
        self.dice = random.Random(seed)
        self.dtype = dtype
        self.generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return (torch.randn(shape, generator=self.generator, device=DEVICE) * scale).to(dtype or self.dtype)

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=DEVICE, dtype=dtype)

    def attention(self) -> list[tuple[Tensor, Tensor]]:
        new, group, kv_heads = self.dice.choice([1, 3, 8, 20]), self.dice.choice([1, 3, 7]), self.dice.choice([1, 2])
        d, page, batch = self.dice.choice([32, 48, 64]), self.dice.choice([16, 64]), self.dice.choice([1, 3])
        most = 5
        context = self.ints(1, most * page - new, batch, dtype=torch.int32)
        pools = self.normal(2, batch * most + 1, kv_heads, page, d)
        table = (torch.randperm(batch * most, generator=self.generator, device=DEVICE) + 1).view(batch, most).int()
        q = self.normal(batch, new, kv_heads * group, d)
        parents = [self.dice.randrange(-1, t) if t else -1 for t in range(new)]
        sees: list[int] = []
        for t, parent in enumerate(parents):
            sees.append(1 << t | (sees[parent] if parent >= 0 else 0))
        tree = torch.tensor(sees, device=DEVICE).expand(batch, new)
        k, v = (pool[table.long()].transpose(1, 2).flatten(2, 3).float() for pool in pools)
        relative = torch.arange(most * page, device=DEVICE) - context[:, None]  # [B, positions]
        bit = tree[..., None] >> relative.clamp(0, 63)[:, None] & 1
        seen = (relative < 0)[:, None] | ((relative < new)[:, None] & (bit == 1))  # [B, T, positions]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        expected = F.scaled_dot_product_attention(q.transpose(1, 2).float(), k, v, attn_mask=seen[:, None])
        some = [AttentionTile(waves=4), AttentionTile(32, 64, 4, 3), AttentionTile(128, 64, 4, 2)]
        tile = self.dice.choice([None, *some, AttentionTile(16, max_splits=64)])
        got = paged_attention(q, *pools, table, context, tree, tile=tile)
        return [(got, expected.transpose(1, 2))]

    def matmul(self) -> list[tuple[Tensor, Tensor]]:
        rows, out, size = (
            self.dice.choice([1, 5, 16, 40]),
            self.dice.choice([48, 160]),
            self.dice.choice([96, 256, 320]),
        )
        tile = self.dice.choice([Tile(64, 64, 3), Tile(32, 128, 2, weight_first=False), Tile(128, 64, 1, 8, 3)])
        if rows == 1 and self.dice.random() < 0.5:
            tile = Tile(8, 128, 2, vector=True, preload=self.dice.random() < 0.5)
        x, weight = self.normal(rows, size), self.normal(2 * out, size, scale=size**-0.5)
        gate, up = (x.float() @ weight.float().t()).chunk(2, -1)
        parts = matmul_triton.split_k_matmul(x, weight[:out], tile)
        pairs = [(parts.sum(0), gate), (matmul_triton.gated_matmul(x, weight, tile), F.silu(gate) * up)]
        return pairs if rows == 1 else [*pairs, *self.deferred_norm(x, weight, tile)]

    def deferred_norm(self, x: Tensor, weight: Tensor, tile: Tile) -> list[tuple[Tensor, Tensor]]:
        """A norm whose first half is fused with the matmul before it, and its 1/rms with the one after it."""
        out = len(weight) // 2
        residual, norm, second = self.normal(len(x), out), self.normal(out), self.normal(64, out, scale=out**-0.5)
        total, scaled, squares = matmul_triton.residual_matmul(x, weight[:out], residual, None, norm, tile)
        stream = normed_matmul.ResidualStream(residual, (x.float() @ weight[:out].float().t())[None])
        expected, hidden = normed_matmul.norm_gated_matmul(stream, norm, 1e-6, second)
        deferred = epilogue.DeferredNorm(squares, out, 1e-6)
        return [(total, expected), (matmul_triton.gated_matmul(scaled, second, tile, deferred), hidden)]

    def normed_matmul(self) -> list[tuple[Tensor, Tensor]]:
        size, splits, d = self.dice.choice([96, 130]), self.dice.randint(0, 3), self.dice.choice([16, 64])
        parts = self.normal(splits, 1, size, dtype=torch.float32) if splits else None
        stream, norm = normed_matmul.ResidualStream(self.normal(1, size), parts), self.normal(size)
        tile = Tile(self.dice.choice([4, 8]), vector=True, norm=True, blocks=self.dice.choice([1, 3]))
        weight = self.normal(160, size, scale=size**-0.5)
        pairs = zip(
            normed_matmul_triton.norm_gated_matmul(stream, norm, 1e-6, weight, tile),
            normed_matmul.norm_gated_matmul(stream, norm, 1e-6, weight),
            strict=True,
        )
        weight, pools = self.normal(10 * d, size, scale=size**-0.5), self.normal(2, 2, 40, d)
        slots = torch.randperm(40, generator=self.generator, device=DEVICE)[:2]
        rope = self.normal(10 * d), None, self.normal(1, 1, d), self.normal(1, 1, d), (6, 2)
        own, plain = (normed_matmul.RopeArgs(*rope, KVRows(*pool, slots)) for pool in pools)
        got = normed_matmul_triton.norm_qkv_matmul(stream, norm, 1e-6, weight, own, tile)
        expected = normed_matmul.norm_qkv_matmul(stream, norm, 1e-6, weight, plain)
        return [*pairs, *zip(got, expected, strict=True), (pools[0, :, slots], pools[1, :, slots])]

    def epilogue(self) -> list[tuple[Tensor, Tensor]]:
        splits, rows, size = self.dice.randint(0, 6), self.dice.randint(1, 5), self.dice.choice([96, 130])
        wide: dict[str, Any] = {"dtype": torch.float32}
        parts = self.normal(splits, rows, size, **wide), self.normal(rows, size), None, self.normal(size), 1e-6
        pairs = list(zip(epilogue_triton.add_norm(*parts), epilogue.add_norm.plain(*parts), strict=True))
        heads, d = self.dice.choice([(6, 2), (7, 1)]), self.dice.choice([16, 24, 64])
        all_heads = heads[0] + 2 * heads[1]
        norms = HeadNorms(self.normal(d), self.normal(d), 1e-6) if self.dice.random() < 0.5 else None
        pools = self.normal(2, 2, 40 * heads[1], d)
        slots = torch.randperm(40 * heads[1], generator=self.generator, device=DEVICE)[: rows * heads[1]]
        qkv = self.normal(splits, rows, all_heads * d, **wide), self.normal(all_heads * d), norms
        rope = self.normal(rows, 1, d), self.normal(rows, 1, d), heads
        got = epilogue_triton.rope_and_cache(*qkv, *rope, KVRows(*pools[0], slots))
        expected = epilogue.rope_and_cache.plain(*qkv, *rope, KVRows(*pools[1], slots))
        pairs += [(got, expected), (pools[0, :, slots], pools[1, :, slots])]
        embedding = self.ints(0, 9, rows), self.normal(9, size), self.normal(size)
        concat_args = (*embedding, self.normal(rows, size), self.normal(size), 1e-6)
        return [*pairs, (epilogue_triton.concat_norm(*concat_args), epilogue.concat_norm.plain(*concat_args))]

    def gumbel_argmax(self) -> list[tuple[Tensor, Tensor]]:
        batch, each, vocab = self.dice.randint(1, 4), self.dice.choice([1, 3]), self.dice.choice([50, 1024, 5000])
        keys, at = self.ints(-(2**62), 2**62, batch), self.ints(0, 999, batch, dtype=torch.int32)
        lowest = 0.0 if self.dtype == torch.float32 else 1.3  # in bfloat16 two tokens may well be equally likely
        temperature = torch.tensor([lowest, 1.0, 0.7], device=DEVICE)[self.ints(0, 3, batch)]
        depths = self.ints(0, 5, batch, each) if each > 1 else None
        args = self.normal(batch * each, vocab, scale=3.0), keys, at, temperature, depths
        tokens, logprobs = gumbel_argmax_triton.gumbel_argmax(*args)
        expected, expected_logprobs = sampling.gumbel_argmax.plain(*args)
        bans = sampling.Bans(
            self.ints(0, vocab, batch, 2, dtype=torch.int32), self.ints(0, 5, batch, dtype=torch.int32)
        )
        banned, allowed = (
            gumbel_argmax_triton.gumbel_argmax(*args, bans=bans)[0],
            sampling.gumbel_argmax.plain(*args, bans=bans)[0],
        )
        noise = fused_triton.noise_ahead(keys, at, 2, vocab)[:, 1]
        stored = gumbel(position_keys(keys, at + 1), vocab)
        return [(tokens, expected), (logprobs, expected_logprobs), (banned, allowed), (noise, stored)]

    def positions(self) -> list[tuple[Tensor, Tensor]]:
        batch, new = self.dice.randint(1, 4), self.dice.choice([1, 5])
        table, context = self.ints(1, 40, batch, 6, dtype=torch.int32), self.ints(0, 90, batch, dtype=torch.int32)
        args = table, context, new, 16, 3
        pairs = list(zip(positions_triton.kv_slots(*args), positions.kv_slots.plain(*args), strict=True))
        trees = table[:, 0], context, self.ints(-1, 9, batch, new, dtype=torch.int32), self.ints(0, 4, batch, new + 1)
        pairs += zip(positions_triton.tree_nodes(*trees), positions.tree_nodes.plain(*trees), strict=True)
        window = (*self.ints(0, 60, 3, batch, dtype=torch.int32), 16, 24, 40, 8)
        pairs += zip(positions_triton.window_table(*window), positions.window_table.plain(*window), strict=True)
        angles = self.ints(0, 9000, 5), 10000.0 ** -(torch.arange(32, device=DEVICE) / 32), self.normal(2, 32).float()
        pairs += zip(
            positions_triton.rotations(*angles, torch.float32),
            positions.rotations.plain(*angles, torch.float32),
            strict=True,
        )
        return pairs

    def move_kv(self) -> list[tuple[Tensor, Tensor]]:
        batch, depth, nodes, heads = self.dice.randint(1, 3), 3, 8, 2
        slots = torch.randperm(batch * nodes * heads, generator=self.generator, device=DEVICE)
        slots = slots.view(batch, nodes, heads)
        path = torch.tensor([[0, *sorted(self.dice.sample(range(1, nodes), depth))] for _ in range(batch)])
        args = slots, path.to(DEVICE), self.ints(0, depth + 1, batch)
        pools = self.normal(2, 2, batch * nodes * heads, 24)
        expected = pools.clone()
        move_kv_triton.move_accepted_kv(*pools, *args)
        move_kv.move_accepted_kv.plain(*expected, *args)
        return [(pools, expected)]

    def accept(self) -> list[tuple[Tensor, Tensor]]:
        batch, count = self.dice.choice([1, 5]), self.dice.choice([1, 2, 40])
        target_tokens = self.ints(0, 3, batch, count + 1)
        draft_tokens, usable = self.ints(-1, 3, batch, count, dtype=torch.int32), self.ints(0, 5, batch, count + 1) > 0
        num_accepted = accept.count_accepted.plain(draft_tokens, target_tokens, usable)
        got = self.ints(0, 9, batch, 6, dtype=torch.int32)
        expected = got.clone()
        logprobs = self.normal(batch, count + 1, dtype=torch.float32)
        packed = accept_triton.advance_rows(*got.t()[:4], target_tokens, logprobs, num_accepted)
        return [
            (accept_triton.count_accepted(draft_tokens, target_tokens, usable), num_accepted),
            (packed, accept.advance_rows.plain(*expected.t()[:4], target_tokens, logprobs, num_accepted)),
            (got, expected),
        ]

    def adam(self) -> list[tuple[Tensor, Tensor]]:
        count, rule = (
            self.dice.choice([1, 900, 5000]),
            adam.Rule(1e-3, (0.9, 0.999), 1e-8, 0.99, self.dice.choice([1, 9])),
        )
        weight = self.normal(count, dtype=torch.float32)
        master = weight if self.dtype == torch.bfloat16 else None
        state = (weight.to(self.dtype), master, self.normal(count), self.normal(count).square(), self.normal(count))
        got, expected = ([None if t is None else t.clone() for t in state] for _ in range(2))
        adam_triton.adam(*got, rule, 12345)
        adam.adam.plain(*expected, rule, 12345)
        return [(a, b) for a, b in zip(got, expected, strict=True) if a is not None and b is not None]

    def fused(self) -> list[tuple[Tensor, Tensor]]:
        gate_up = self.normal(3, 2 * 1100)
        gate, up = gate_up.float().chunk(2, -1)
        k, v = self.normal(5, 2, 24), self.normal(5, 2, 24)
        pools = torch.zeros(2, 60, 24, dtype=self.dtype, device=DEVICE)
        slots = torch.randperm(60, generator=self.generator, device=DEVICE)[:10]
        fused_triton.write(k, v, *pools, slots)
        rings = torch.zeros(2, 4, 7, 24, dtype=self.dtype, device=DEVICE), self.ints(0, 9, 2, 4, 7, dtype=torch.int32)
        rings[1][1] = rings[1][0]
        args = torch.tensor([3, 1], device=DEVICE), self.ints(0, 30, 2), self.normal(2, 3, 24), self.ints(0, 9, 2, 2)
        accepted = self.ints(0, 3, 2, 2), self.ints(0, 2, 2)
        feature_ring_triton.write_features(rings[0][0], rings[1][0], *args, *accepted)
        feature_ring.write_features.plain(rings[0][1], rings[1][1], *args, *accepted)
        pairs = [(part[0, 1:], part[1, 1:]) for part in rings]
        return [
            *pairs,
            (fused_triton.gated(gate_up), F.silu(gate) * up),
            (pools[:, slots], torch.stack((k, v)).flatten(1, 2)),
        ]


def relative(got: Tensor, expected: Tensor) -> float:
    got, expected = got.double(), expected.double()
    return float((got - expected).norm() / expected.norm().clamp(min=1e-9))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", default=",".join(NAMES), help="which kernels")
    parser.add_argument(
        "--pdl", action=argparse.BooleanOptionalAction, default=device.pdl,
        help="launch kernels before their predecessors have ended",
    )  # fmt: skip
    args = parser.parse_args(argv)
    device.pdl = args.pdl
    # The interpreter computes in NumPy, which has no bfloat16.
    dtypes = [torch.bfloat16, torch.float32] if DEVICE.type == "cuda" else [torch.float32]
    worst: dict[str, dict[str, float]] = {}
    failed = False
    with torch.inference_mode():
        for name in args.only.split(","):
            for dtype in dtypes:
                errors = []
                for seed in range(args.rounds):
                    work: Callable[[], list[tuple[Tensor, Tensor]]] = getattr(Check(seed, dtype), name)
                    errors += [relative(got, expected) for got, expected in work()]
                high = max(errors)
                failed |= not high < BOUND[dtype]
                worst.setdefault(name, {})[str(dtype).removeprefix("torch.")] = high
                print(f"{name:<13} {dtype!s:<15} {high:.2g}{'' if high < BOUND[dtype] else '   TOO MUCH'}", flush=True)
    where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print(json.dumps({"device": where, "pdl": args.pdl, "worst": worst}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
