"""The training loss of the EAGLE drafter, on sequences that the policy has sampled.

A drafter's second draft token follows its first, so it is trained on its own outputs too ("training-time test"): the
layer runs several times over all sequences at once, each time one token further from the policy's features. In run k
the entry at position p sees the entries of run 0 up to p - k, which stand for verified tokens, and one entry each of
runs 1 to k, which stand for its own draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.draft.eagle.model import EagleModel
from paceline.model.attention import PackedAttention
from paceline.model.decoder import Decoder

if TYPE_CHECKING:
    from paceline.core import Spans

T = TypeVar("T")
BLOCK = 256
DraftLoss = Literal["soft", "overlap"]


@dataclass
class PackedSequences:
    """Sequences end to end in one row, with the policy's features of them."""

    tokens: Tensor  # int64 [N]
    positions: Tensor  # int64 [N] within the sequence
    features: Tensor  # [N, 3 * hidden] of each token
    hidden: Tensor  # [N, hidden] of each token, from which the policy draws the next
    learn: Tensor  # bool [N] whether the token behind is part of a completion

    def to(self, device: torch.device) -> PackedSequences:
        return PackedSequences(**{name: t.to(device, non_blocking=True) for name, t in vars(self).items()})


@torch.no_grad()
def read_sequences(drafter: EagleModel, answers: list[tuple[list[int], int]]) -> PackedSequences:
    """Run the policy over (tokens, length of the prompt) and keep what a drafter learns from."""
    policy = drafter.policy
    attention = PackedAttention([len(t) for t, _ in answers], policy.device)
    tokens = torch.tensor([t for sequence, _ in answers for t in sequence], device=policy.device)
    positions = attention.positions()
    hidden, features = policy(tokens, positions, attention, taps=True)
    assert features is not None
    learn = before_completions([len(t) for t, _ in answers], [prompt for _, prompt in answers]).to(policy.device)
    return PackedSequences(tokens, positions, features, hidden, learn)


def before_completions(lengths: list[int], prompts: list[int], observed: Sequence[Spans] | None = None) -> Tensor:
    """bool [N] for sequences end to end: whether the token behind is part of the completion, and none of those that the
    policy has `observed`, which it did not draw."""
    parts = [torch.zeros(length, dtype=torch.bool) for length in lengths]
    for part, prompt, spans in zip(parts, prompts, observed or [()] * len(parts), strict=True):
        part[max(0, prompt - 1) : -1] = True
        for first, last in spans:
            part[max(0, first - 1) : last - 1] = False
    return torch.cat(parts)


class UnrolledAttention:
    """Attention of run k over runs 0 to k, within a window and within each sequence.

    The row is cut into blocks, and a block looks at itself and at a window before it, so the cost grows with the number
    of tokens and not with its square, and no sequence is padded."""

    def __init__(self, positions: Tensor, window: int):
        self.tokens = len(positions)
        self.window = window
        self.blocks = -(-self.tokens // BLOCK)
        device = positions.device
        index = torch.arange(self.blocks * BLOCK, device=device).view(self.blocks, BLOCK)
        sequence = F.pad(
            (positions == 0).cumsum(0), (window, self.blocks * BLOCK - self.tokens)
        )  # padding is sequence 0
        seen = index[:, :1] - window + torch.arange(window + BLOCK, device=device)  # [blocks, window + BLOCK]
        self._ago = index[:, :, None] - seen[:, None]  # how far back each key lies
        self._same = sequence[window:].view(self.blocks, BLOCK)[:, :, None] == sequence[seen + window][:, None]
        self._past: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        self._past.append((k, v))
        run = len(self._past) - 1
        checked_k, checked_v = (self._blocks(x) for x in self._past[0])  # [blocks, heads, window + BLOCK, d]
        pad = self.blocks * BLOCK - self.tokens
        queries = F.pad(q, (0, 0, 0, 0, 0, pad)).view(self.blocks, BLOCK, *q.shape[1:]).transpose(1, 2)
        scores = queries @ checked_k.transpose(2, 3) * q.shape[-1] ** -0.5
        visible = self._same & (self._ago >= run) & (self._ago < self.window)
        scores = scores.masked_fill(~visible[:, None], -1e30)
        # Own draft tokens: the entry of run j lies run - j positions back.
        drafted = [(_back(gk, run - j), _back(gv, run - j)) for j, (gk, gv) in enumerate(self._past) if j > 0]
        own = [(q * gk).sum(-1) * q.shape[-1] ** -0.5 for gk, _ in drafted]  # [N, heads] each
        flat = scores.transpose(1, 2).reshape(-1, q.shape[1], scores.shape[-1])[: self.tokens]
        weights = torch.cat((flat, *(s[..., None] for s in own)), -1).softmax(-1)
        mixed = self._unblock(weights[..., : flat.shape[-1]], pad) @ checked_v
        out = mixed.transpose(1, 2).reshape(-1, *q.shape[1:])[: self.tokens]
        for i, (_, gv) in enumerate(drafted):
            out = out + weights[..., flat.shape[-1] + i, None] * gv
        return out.flatten(1)

    def _blocks(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, 0, self.window, self.blocks * BLOCK - self.tokens))
        return padded.unfold(0, self.window + BLOCK, BLOCK).transpose(2, 3)

    def _unblock(self, weights: Tensor, pad: int) -> Tensor:
        padded = F.pad(weights, (0, 0, 0, 0, 0, pad))
        return padded.view(self.blocks, BLOCK, *weights.shape[1:]).transpose(1, 2)


def _back(x: Tensor, positions: int) -> Tensor:
    """What lies this many positions back in the row."""
    return x if positions == 0 else F.pad(x, (0, 0) * (x.dim() - 1) + (positions, 0))[: len(x)]


@torch.no_grad()
def _wanted(drafter: EagleModel, sequences: PackedSequences, rows: Tensor) -> Tensor:
    """The policy's distribution at the positions `rows` [M], among the tokens that can be proposed: probabilities
    [M, draft vocabulary]"""
    hidden = sequences.hidden[rows]
    logits = drafter.policy.logits(hidden) if drafter.vocab is None else torch.mm(hidden, drafter.head().t())
    return logits.float().softmax(-1)


def unroll(drafter: EagleModel, sequences: PackedSequences, runs: int, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each draft token in a row, at the positions `rows` [M]: whether it counts [M], and the drafter's logits."""
    dtype = drafter.fc.dtype
    attention = UnrolledAttention(sequences.positions, drafter.shape.window)
    hidden = drafter.fuse(_back(sequences.features, 1).masked_fill(sequences.positions[:, None] == 0, 0).to(dtype))
    tokens = sequences.tokens
    masks = drafter.masks(len(tokens)) if drafter.shape.block else None
    learn = sequences.learn[rows]
    positions = sequences.positions[rows]
    for run in range(runs):
        out = drafter(tokens, hidden, sequences.positions, attention)
        scored = drafter.condition(out[rows], sequences.tokens[rows])
        yield (learn & (positions >= run)).float(), drafter.logits(scored).float()
        tokens, hidden = masks or (tokens, _back(out, 1))


def unrolled_loss(
    drafter: EagleModel,
    sequences: PackedSequences,
    runs: int,
    loss: DraftLoss,
    rows: Tensor | None = None,
    discount: float = 0.9,
) -> tuple[Tensor, Tensor]:
    """The loss over `runs` draft tokens in a row, and for each how often the likeliest token is the policy's likeliest.
    Only positions where something is learned count; `rows` names more of them, where their number must be known
    before they are."""
    if rows is None:
        rows = sequences.learn.nonzero()[:, 0]
    total, weight = (torch.zeros((), device=sequences.tokens.device) for _ in range(2))
    target = _wanted(drafter, sequences, rows)
    agree = []
    likeliest = target.argmax(-1)
    for run, (counts, logits) in enumerate(unroll(drafter, sequences, runs, rows)):
        count = counts.sum()
        share = counts / count.clamp(min=1.0)
        total = total + discount**run * (share * _distance(logits, target, loss)).sum()
        weight = weight + discount**run * (count > 0)  # sequences may all be shorter than that
        agree.append((share * (logits.argmax(-1) == likeliest)).sum().detach())
    return total / weight, torch.stack(agree)


@torch.no_grad()
def expected_accept_length(drafter: EagleModel, sequences: PackedSequences, runs: int) -> float:
    """Accept length with chains of `runs` draft tokens, if they are accepted as often as the best possible test does:
    what decides between two drafters without decoding anything."""
    rows = sequences.learn.nonzero()[:, 0]
    expected, alive = (torch.zeros(len(sequences.tokens), device=sequences.tokens.device) for _ in range(2))
    target = _wanted(drafter, sequences, rows)
    for run, (counts, logits) in enumerate(unroll(drafter, sequences, runs, rows)):
        accepted = torch.zeros_like(alive)
        accepted[rows] = counts * torch.minimum(logits.softmax(-1), target).sum(-1)
        # A draft token is reached if the one before it, one position back, was accepted; none follows the end of a
        # sequence.
        alive = accepted if run == 0 else _back(alive, 1) * accepted
        expected += alive
    return 1.0 + float(expected.sum()) / max(1, len(rows))


def _distance(logits: Tensor, target: Tensor, loss: DraftLoss) -> Tensor:
    """[N] soft: cross-entropy with the policy's distribution. overlap: -log of the probability that a draft token is
    accepted by the best possible test, the sum of the smaller of the two probabilities."""
    if loss == "soft":
        return -(target * logits.log_softmax(-1)).sum(-1)
    return -torch.minimum(logits.softmax(-1), target).sum(-1).clamp(min=1e-6).log()


def suitable_rate(policy: Decoder) -> float:
    """A learning rate for a drafter of this policy: wide layers take smaller steps."""
    return rate_for_width(policy.config.hidden_size)


def rate_for_width(hidden_size: int) -> float:
    return 2e-3 * min(1.0, 384 / hidden_size)


def batches(
    items: Sequence[T], tokens: int, shuffle: Callable[[list[int]], None], length: Callable[[T], int]
) -> Iterator[list[T]]:
    """All of them once, in an order that `shuffle` makes, in batches of at most so many tokens; what is longer goes
    alone."""
    order = list(range(len(items)))
    shuffle(order)
    batch: list[T] = []
    size = 0
    for item in (items[i] for i in order):
        if batch and size + length(item) > tokens:
            yield batch
            batch = []
            size = 0
        batch.append(item)
        size += length(item)
    if batch:
        yield batch
