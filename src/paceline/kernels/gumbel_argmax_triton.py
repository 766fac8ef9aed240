"""The GPU form of `kernels.gumbel_argmax`: the vocabulary is split, so that a single row keeps the whole device busy,
and a second kernel joins the splits.

The noise is that of `fused_triton`, made in registers. Multiplications and additions are not contracted to FMAs: the
score of a token equals, bit for bit, that of adding stored noise to stored logits, so both have the same winner.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.device import num_sms, use_pdl
from paceline.kernels.fused_triton import _GOLDEN, _gumbel, _mix
from paceline.kernels.gumbel_argmax import Bans
from paceline.kernels.hopper.pdl_triton import wait_for_predecessor

VOCAB_BLOCK = 1024  # columns that a program looks at together
MAX_VOCAB_SPLITS = 256
PROGRAMS_PER_SM = 8  # aimed at when a row is split


def gumbel_argmax(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    temperature: Tensor,
    depth: Tensor | None = None,
    ids: Tensor | None = None,
    noise: bool = True,
    logprobs: bool = True,
    ahead: int = 0,
    bans: Bans | None = None,
) -> tuple[Tensor, Tensor]:
    """As `kernels.gumbel_argmax.gumbel_argmax`."""
    assert ids is None or bans is None, "bans name columns"
    rows, vocab = logits.shape
    device = logits.device
    nodes = rows // len(keys)
    blocks = triton.cdiv(vocab, VOCAB_BLOCK)
    splits = max(1, min(MAX_VOCAB_SPLITS, blocks, PROGRAMS_PER_SM * num_sms(device) // rows))
    split_size = triton.cdiv(blocks, splits) * VOCAB_BLOCK
    splits = triton.cdiv(vocab, split_size)
    # Of each split: best score, its logit / temperature, the highest logit / temperature, and the sum of exponentials.
    part = torch.empty(4, rows, splits, dtype=torch.float32, device=device)
    column = torch.empty(rows, splits, dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logprob = torch.empty(rows, dtype=torch.float32, device=device)
    pdl = use_pdl(device)
    banned, remaining = (None, None) if bans is None else bans
    _gumbel_argmax[(rows, splits)](
        logits, keys, positions, temperature, depth, ids, banned, remaining, part, column,
        logits.stride(0), keys.stride(0), positions.stride(0), temperature.stride(0),
        0 if depth is None else depth.stride(0), 0 if depth is None else depth.stride(1),
        0 if banned is None else banned.stride(0), 0 if remaining is None else remaining.stride(0),
        rows, nodes, vocab, split_size, ahead,
        DEPTH=depth is not None, IDS=ids is not None, BANNED=0 if banned is None else banned.shape[1],
        NOISE=noise, LOGPROB=logprobs, BLOCK=VOCAB_BLOCK, PDL=pdl,
        num_warps=4, enable_fp_fusion=False, launch_pdl=pdl,
    )  # fmt: skip
    _join[(rows,)](
        part, column, ids, tokens, logprob, rows, splits,
        IDS=ids is not None, LOGPROB=logprobs, BLOCK_S=MAX_VOCAB_SPLITS, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return tokens, logprob


@triton.jit(
    do_not_specialize=["keys_stride", "positions_stride", "temperature_stride", "depth_stride_b", "depth_stride_t",
                       "banned_stride", "remaining_stride", "rows", "nodes", "ahead"],
    do_not_specialize_on_alignment=["keys", "positions", "temperature", "depth", "banned", "remaining"],
)  # fmt: skip
def _gumbel_argmax(
    logits, keys, positions, temperature, depth, ids, banned, remaining, part, column,
    logits_stride, keys_stride, positions_stride, temperature_stride, depth_stride_b, depth_stride_t,
    banned_stride, remaining_stride, rows, nodes, vocab, split_size, ahead,
    DEPTH: tl.constexpr, IDS: tl.constexpr, BANNED: tl.constexpr, NOISE: tl.constexpr, LOGPROB: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    split = tl.program_id(1)
    b = row // nodes
    wait_for_predecessor(PDL)
    row_temperature = tl.load(temperature + b * temperature_stride)
    greedy = row_temperature == 0
    divisor = tl.where(greedy, 1.0, row_temperature)
    position = tl.load(positions + b * positions_stride).to(tl.int64) + ahead
    if BANNED:
        num_banned = tl.load(remaining + b * remaining_stride)
    if DEPTH:
        offset = tl.load(depth + b * depth_stride_b + (row % nodes) * depth_stride_t)
        position += offset.to(tl.int64)
        if BANNED:
            num_banned -= offset.to(tl.int32)
    key = _mix(tl.load(keys + b * keys_stride) + (position + 1) * _GOLDEN)
    logits += row.to(tl.int64) * logits_stride

    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32)
    own = tl.zeros([BLOCK], tl.float32)  # logit / temperature of the best
    max_logit = tl.full([BLOCK], -1e30, tl.float32)
    exp_sum = tl.zeros([BLOCK], tl.float32)  # of exp(logit / temperature - max_logit)
    first = split * split_size
    last = tl.minimum(vocab, first + split_size)
    for start in range(first, last, BLOCK):
        i = start + lane
        mask = i < last
        x = tl.load(logits + i, mask=mask, other=-float("inf")).to(tl.float32)
        x = tl.div_rn(x, tl.zeros_like(x) + divisor)
        score = x
        if NOISE:
            token = i
            if IDS:
                token = tl.load(ids + i, mask=mask, other=0)
            score = tl.where(greedy, x, x + _gumbel(key, token))
        for n in tl.static_range(BANNED):
            ban = tl.load(banned + b * banned_stride + n)
            score = tl.where((num_banned > 0) & (i == ban), -float("inf"), score)
        better = score > best
        best = tl.where(better, score, best)
        at = tl.where(better, i, at)
        own = tl.where(better, x, own)
        if LOGPROB:
            higher = tl.maximum(max_logit, x)
            exp_sum = exp_sum * tl.exp(max_logit - higher) + tl.exp(x - higher)
            max_logit = higher

    top = tl.max(best, 0)
    winner = tl.min(tl.where(best == top, at, 2147483647), 0)
    winner = tl.minimum(winner, vocab - 1)
    to = row * (tl.num_programs(1)) + split
    size = rows * tl.num_programs(1)
    tl.store(column + to, winner)
    tl.store(part + to, top)
    if LOGPROB:
        tl.store(part + size + to, tl.sum(tl.where((best == top) & (at == winner), own, 0.0), 0))
        split_max = tl.max(max_logit, 0)
        tl.store(part + 2 * size + to, split_max)
        tl.store(part + 3 * size + to, tl.sum(exp_sum * tl.exp(max_logit - split_max), 0))


@triton.jit(do_not_specialize=["rows", "splits"])
def _join(
    part, column, ids, tokens, logprob, rows, splits,
    IDS: tl.constexpr, LOGPROB: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    wait_for_predecessor(PDL)
    s = tl.arange(0, BLOCK_S)
    mask = s < splits
    to = row * splits + s
    size = rows * splits
    top = tl.load(part + to, mask=mask, other=-float("inf"))
    at = tl.load(column + to, mask=mask, other=2147483647)
    first = top == tl.max(top, 0)
    winner = tl.min(tl.where(first, at, 2147483647), 0)
    token = winner.to(tl.int64)
    if IDS:
        token = tl.load(ids + winner)
    tl.store(tokens + row, token)
    if LOGPROB:
        own = tl.load(part + size + to, mask=mask, other=0.0)
        max_logit = tl.load(part + 2 * size + to, mask=mask, other=-1e30)
        exp_sum = tl.load(part + 3 * size + to, mask=mask, other=0.0)
        row_max = tl.max(max_logit, 0)
        row_sum = tl.sum(exp_sum * tl.exp(max_logit - row_max), 0)
        value = tl.sum(tl.where(first & (at == winner), own, 0.0), 0)
        tl.store(logprob + row, value - row_max - tl.log(row_sum))
    else:
        tl.store(logprob + row, 0.0)
