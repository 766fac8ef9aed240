"""The GPU form of the race: the vocabulary in stretches, so that one row keeps the whole card busy, then a join.

The noise is that of `fused_triton`, made in registers. Products and sums are not contracted here: the score of a token
is the one that adding stored noise to stored logits would give, so both ways have the same winner.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.device import processors, starts_early
from paceline.kernels.fused_triton import _GOLDEN, _gumbel, _mix
from paceline.kernels.gumbel_argmax import Bans
from paceline.kernels.hopper.pdl_triton import wait_for_predecessor

BLOCK = 1024
MAX_SPLITS = 256
WAVES = 8  # programs per processor that rows are split for


def gumbel_argmax(
    logits: Tensor,
    keys: Tensor,
    places: Tensor,
    temperature: Tensor,
    level: Tensor | None = None,
    ids: Tensor | None = None,
    noise: bool = True,
    logprobs: bool = True,
    ahead: int = 0,
    bans: Bans | None = None,
) -> tuple[Tensor, Tensor]:
    """As `kernels.race.race`."""
    assert ids is None or bans is None, "bans name columns"
    rows, vocab = logits.shape
    device = logits.device
    each = rows // len(keys)
    blocks = triton.cdiv(vocab, BLOCK)
    splits = max(1, min(MAX_SPLITS, blocks, WAVES * processors(device) // rows))
    stretch = triton.cdiv(blocks, splits) * BLOCK
    splits = triton.cdiv(vocab, stretch)
    part = torch.empty(4, rows, splits, dtype=torch.float32, device=device)
    column = torch.empty(rows, splits, dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logprob = torch.empty(rows, dtype=torch.float32, device=device)
    early = starts_early(device)
    banned, left = (None, None) if bans is None else bans
    _gumbel_argmax[(rows, splits)](
        logits, keys, places, temperature, level, ids, banned, left, part, column,
        logits.stride(0), keys.stride(0), places.stride(0), temperature.stride(0),
        0 if level is None else level.stride(0), 0 if level is None else level.stride(1),
        0 if banned is None else banned.stride(0), 0 if left is None else left.stride(0),
        rows, each, vocab, stretch, ahead,
        LEVEL=level is not None, IDS=ids is not None, BANNED=0 if banned is None else banned.shape[1],
        NOISE=noise, LOGPROB=logprobs, BLOCK=BLOCK, PDL=early,
        num_warps=4, enable_fp_fusion=False, launch_pdl=early,
    )  # fmt: skip
    _join[(rows,)](
        part, column, ids, tokens, logprob, rows, splits,
        IDS=ids is not None, LOGPROB=logprobs, BLOCK_S=MAX_SPLITS, PDL=early, num_warps=1, launch_pdl=early,
    )  # fmt: skip
    return tokens, logprob


@triton.jit(
    do_not_specialize=["keys_stride", "places_stride", "temperature_stride", "level_stride_b", "level_stride_t",
                       "banned_stride", "left_stride", "rows", "each", "ahead"],
    do_not_specialize_on_alignment=["keys", "places", "temperature", "level", "banned", "left"],
)  # fmt: skip
def _gumbel_argmax(
    logits, keys, places, temperature, level, ids, banned, left, part, column,
    logits_stride, keys_stride, places_stride, temperature_stride, level_stride_b, level_stride_t,
    banned_stride, left_stride, rows, each, vocab, stretch, ahead,
    LEVEL: tl.constexpr, IDS: tl.constexpr, BANNED: tl.constexpr, NOISE: tl.constexpr, LOGPROB: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    split = tl.program_id(1)
    b = row // each
    wait_for_predecessor(PDL)
    warmth = tl.load(temperature + b * temperature_stride)
    greedy = warmth == 0
    cool = tl.where(greedy, 1.0, warmth)
    place = tl.load(places + b * places_stride).to(tl.int64) + ahead
    if BANNED:
        still = tl.load(left + b * left_stride)
    if LEVEL:
        further = tl.load(level + b * level_stride_b + (row % each) * level_stride_t)
        place += further.to(tl.int64)
        if BANNED:
            still -= further.to(tl.int32)
    key = _mix(tl.load(keys + b * keys_stride) + (place + 1) * _GOLDEN)
    logits += row.to(tl.int64) * logits_stride

    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32)
    own = tl.zeros([BLOCK], tl.float32)  # the winner's logit over the temperature
    peak = tl.full([BLOCK], -1e30, tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    first = split * stretch
    last = tl.minimum(vocab, first + stretch)
    for start in range(first, last, BLOCK):
        i = start + lane
        there = i < last
        x = tl.load(logits + i, mask=there, other=-float("inf")).to(tl.float32)
        x = tl.div_rn(x, tl.zeros_like(x) + cool)
        score = x
        if NOISE:
            token = i
            if IDS:
                token = tl.load(ids + i, mask=there, other=0)
            score = tl.where(greedy, x, x + _gumbel(key, token))
        for n in tl.static_range(BANNED):
            out = tl.load(banned + b * banned_stride + n)
            score = tl.where((still > 0) & (i == out), -float("inf"), score)
        better = score > best
        best = tl.where(better, score, best)
        at = tl.where(better, i, at)
        own = tl.where(better, x, own)
        if LOGPROB:
            higher = tl.maximum(peak, x)
            mass = mass * tl.exp(peak - higher) + tl.exp(x - higher)
            peak = higher

    top = tl.max(best, 0)
    winner = tl.min(tl.where(best == top, at, 2147483647), 0)
    winner = tl.minimum(winner, vocab - 1)
    to = row * (tl.num_programs(1)) + split
    size = rows * tl.num_programs(1)
    tl.store(column + to, winner)
    tl.store(part + to, top)
    if LOGPROB:
        tl.store(part + size + to, tl.sum(tl.where((best == top) & (at == winner), own, 0.0), 0))
        highest = tl.max(peak, 0)
        tl.store(part + 2 * size + to, highest)
        tl.store(part + 3 * size + to, tl.sum(mass * tl.exp(peak - highest), 0))


@triton.jit(do_not_specialize=["rows", "splits"])
def _join(
    part, column, ids, tokens, logprob, rows, splits,
    IDS: tl.constexpr, LOGPROB: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    wait_for_predecessor(PDL)
    s = tl.arange(0, BLOCK_S)
    there = s < splits
    to = row * splits + s
    size = rows * splits
    top = tl.load(part + to, mask=there, other=-float("inf"))
    at = tl.load(column + to, mask=there, other=2147483647)
    first = top == tl.max(top, 0)
    winner = tl.min(tl.where(first, at, 2147483647), 0)
    token = winner.to(tl.int64)
    if IDS:
        token = tl.load(ids + winner)
    tl.store(tokens + row, token)
    if LOGPROB:
        own = tl.load(part + size + to, mask=there, other=0.0)
        peak = tl.load(part + 2 * size + to, mask=there, other=-1e30)
        mass = tl.load(part + 3 * size + to, mask=there, other=0.0)
        highest = tl.max(peak, 0)
        whole = tl.sum(mass * tl.exp(peak - highest), 0)
        value = tl.sum(tl.where(first & (at == winner), own, 0.0), 0)
        tl.store(logprob + row, value - highest - tl.log(whole))
    else:
        tl.store(logprob + row, 0.0)
