"""Training a neural drafter on texts that the policy has written.

A drafter's second guess follows its first, so it is trained on its own outputs too ("training-time test"): the layer
runs several times over all texts at once, each time one token further from the policy's features. In run k the entry at
place p sees the entries of run 0 up to p - k, which stand for checked tokens, and one entry each of runs 1 to k, which
stand for its own guesses on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.draft.neural import NeuralDrafter
from paceline.model.attention import PackedAttention
from paceline.model.decoder import Decoder

T = TypeVar("T")
BLOCK = 256
Loss = Literal["soft", "overlap"]


@dataclass
class Texts:
    """Texts end to end in one row, with what the policy thought of them."""

    tokens: Tensor  # int64 [N]
    place: Tensor  # int64 [N] within the text
    features: Tensor  # [N, 3 * hidden] of each token
    hidden: Tensor  # [N, hidden] of each token, from which the policy draws the next
    learn: Tensor  # bool [N] whether the token behind is part of an answer


@torch.no_grad()
def read_texts(drafter: NeuralDrafter, answers: list[tuple[list[int], int]]) -> Texts:
    """Run the policy over (tokens, length of the prompt) and keep what a drafter learns from."""
    policy = drafter.policy
    attention = PackedAttention([len(t) for t, _ in answers], policy.device)
    tokens = torch.tensor([t for text, _ in answers for t in text], device=policy.device)
    place = attention.positions()
    hidden, features = policy(tokens, place, attention, taps=True)
    assert features is not None
    learn = before_answers([len(t) for t, _ in answers], [prompt for _, prompt in answers]).to(policy.device)
    return Texts(tokens, place, features, hidden, learn)


def before_answers(lengths: list[int], prompts: list[int]) -> Tensor:
    """bool [N] for texts end to end: whether the token behind is part of the text's answer."""
    pairs = zip(lengths, prompts, strict=True)
    return torch.tensor([prompt <= i + 1 < length for length, prompt in pairs for i in range(length)])


class UnrolledAttention:
    """Attention of run k over runs 0 to k, within a window and within each text.

    The row is cut into blocks, and a block looks at itself and at a window before it, so the cost grows with the number
    of tokens and not with its square, and no text is padded."""

    def __init__(self, place: Tensor, window: int):
        self.tokens, self.window = len(place), window
        self.blocks = -(-self.tokens // BLOCK)
        device = place.device
        index = torch.arange(self.blocks * BLOCK, device=device).view(self.blocks, BLOCK)
        text = F.pad((place == 0).cumsum(0), (window, self.blocks * BLOCK - self.tokens))  # padding is text 0
        seen = index[:, :1] - window + torch.arange(window + BLOCK, device=device)  # [blocks, window + BLOCK]
        self._ago = index[:, :, None] - seen[:, None]  # how far back each key lies
        self._same = text[window:].view(self.blocks, BLOCK)[:, :, None] == text[seen + window][:, None]
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
        # Own guesses on the way: the entry of run j lies run - j places back.
        guesses = [(_back(gk, run - j), _back(gv, run - j)) for j, (gk, gv) in enumerate(self._past) if j > 0]
        own = [(q * gk).sum(-1) * q.shape[-1] ** -0.5 for gk, _ in guesses]  # [N, heads] each
        flat = scores.transpose(1, 2).reshape(-1, q.shape[1], scores.shape[-1])[: self.tokens]
        weights = torch.cat((flat, *(s[..., None] for s in own)), -1).softmax(-1)
        mixed = self._unblock(weights[..., : flat.shape[-1]], pad) @ checked_v
        out = mixed.transpose(1, 2).reshape(-1, *q.shape[1:])[: self.tokens]
        for i, (_, gv) in enumerate(guesses):
            out = out + weights[..., flat.shape[-1] + i, None] * gv
        return out.flatten(1)

    def _blocks(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, 0, self.window, self.blocks * BLOCK - self.tokens))
        return padded.unfold(0, self.window + BLOCK, BLOCK).transpose(2, 3)

    def _unblock(self, weights: Tensor, pad: int) -> Tensor:
        padded = F.pad(weights, (0, 0, 0, 0, 0, pad))
        return padded.view(self.blocks, BLOCK, *weights.shape[1:]).transpose(1, 2)


def _back(x: Tensor, places: int) -> Tensor:
    """What lies this many places back in the row."""
    return x if places == 0 else F.pad(x, (0, 0) * (x.dim() - 1) + (places, 0))[: len(x)]


def _unroll(drafter: NeuralDrafter, texts: Texts, runs: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each guess in a row: the places [N] at which it counts, and there the drafter's logits and the policy's
    probabilities."""
    policy, dtype = drafter.policy, drafter.fc.dtype
    attention = UnrolledAttention(texts.place, drafter.shape.window)
    hidden = drafter.fuse(_back(texts.features, 1).masked_fill(texts.place[:, None] == 0, 0).to(dtype))
    with torch.no_grad():
        wanted = policy.logits(texts.hidden).float()
        if drafter.vocab is not None:
            wanted = wanted[:, drafter.vocab]
        target = wanted.softmax(-1)
    for run in range(runs):
        out = drafter(texts.tokens, hidden, texts.place, attention)
        counts = texts.learn & (texts.place >= run)
        yield counts, drafter.logits(out[counts]).float(), target[counts]
        hidden = _back(out, 1)


def unrolled_loss(
    drafter: NeuralDrafter, texts: Texts, runs: int, loss: Loss, discount: float = 0.9
) -> tuple[Tensor, list[float]]:
    """The loss over `runs` guesses in a row, and for each how often the likeliest token is the policy's likeliest."""
    total, weight = torch.zeros((), device=texts.tokens.device), 0.0
    agree = []
    for run, (_, logits, target) in enumerate(_unroll(drafter, texts, runs)):
        if not len(logits):  # all texts are shorter than that
            break
        total, weight = total + discount**run * _distance(logits, target, loss), weight + discount**run
        agree.append(float((logits.argmax(-1) == target.argmax(-1)).float().mean()))
    return total / weight, agree


@torch.no_grad()
def expected_accept_length(drafter: NeuralDrafter, texts: Texts, runs: int) -> float:
    """Tokens per check with chains of `runs` guesses, if guesses are accepted as often as the best possible test does:
    what decides between two drafters without decoding anything."""
    starts, written = 0.0, 0.0
    alive = torch.zeros(len(texts.tokens), device=texts.tokens.device)
    for run, (counts, logits, target) in enumerate(_unroll(drafter, texts, runs)):
        holds = torch.zeros_like(alive)
        holds[counts] = torch.minimum(logits.softmax(-1), target).sum(-1)
        # A guess is reached if the one before it, one place back, held; none follows the end of a text.
        alive = holds if run == 0 else _back(alive, 1) * holds
        starts = starts or float(counts.sum())
        written += float(alive.sum())
    return 1.0 + written / max(1.0, starts)


def _distance(logits: Tensor, target: Tensor, loss: Loss) -> Tensor:
    """soft: cross-entropy with the policy's distribution. overlap: -log of the probability that a guess is accepted by
    the best possible test, the sum of the smaller of the two probabilities."""
    if loss == "soft":
        return -(target * logits.log_softmax(-1)).sum(-1).mean()
    return -torch.minimum(logits.softmax(-1), target).sum(-1).clamp(min=1e-6).log().mean()


def suitable_rate(policy: Decoder) -> float:
    """A learning rate for a drafter of this policy: wide layers take smaller steps."""
    return 2e-3 * min(1.0, 384 / policy.config.hidden_size)


@dataclass
class TrainSettings:
    lr: float = 2e-3
    batch_tokens: int = 8192
    runs: int = 5
    loss: Loss = "soft"
    warmup: int = 20


class DrafterTrainer:
    """AdamW on a copy of the drafter, in the policy's precision with float32 masters; `publish` writes it back."""

    def __init__(self, drafter: NeuralDrafter, settings: TrainSettings):
        self.drafter, self.settings = drafter, settings
        self.copy = copy_of(drafter).requires_grad_(True)
        self.masters = [p.detach().float() for p in self.copy.parameters()]  # the weights themselves, if float32
        self.optimizer = torch.optim.AdamW(self.masters, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.steps = 0

    def step(self, texts: Texts, progress: float = 0.0) -> tuple[float, list[float]]:
        """One update on these texts; `progress` from 0 to 1 lowers the rate. What is not finite changes nothing."""
        s = self.settings
        rate = s.lr * min(1.0, (self.steps + 1) / s.warmup) * (1.0 - 0.9 * progress)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with torch.enable_grad():
            loss, agree = unrolled_loss(self.copy, texts, s.runs, s.loss)
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.copy.parameters(), 1.0)
        value = float(loss.detach())
        if math.isfinite(value) and math.isfinite(float(norm)):
            self._update()
            self.steps += 1
        self.copy.zero_grad()
        return value, agree

    @torch.no_grad()
    def _update(self) -> None:
        for weight, master in zip(self.copy.parameters(), self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        self.optimizer.step()
        self._follow()

    def _follow(self) -> None:
        """The masters have changed: so does the copy."""
        for weight, master in zip(self.copy.parameters(), self.masters, strict=True):
            weight.copy_(master)

    @torch.no_grad()
    def replace(self, weights: Sequence[Tensor]) -> None:
        """Go on from these weights; the optimizer keeps what it knows."""
        for master, weight in zip(self.masters, weights, strict=True):
            master.copy_(weight)
        self._follow()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that training goes on with: tensors by name, and plain values."""
        tensors: dict[str, Tensor] = {}
        for (name, _), master in zip(self.copy.named_parameters(), self.masters, strict=True):
            moments = self.optimizer.state.get(master, {})
            tensors |= {f"{part}.{name}": tensor for part, tensor in {"master": master, **moments}.items()}
        return tensors, {"steps": self.steps}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        masters = [tensors[f"master.{name}"] for name, _ in self.copy.named_parameters()]
        for (name, _), own, kept in zip(self.copy.named_parameters(), self.masters, masters, strict=True):
            if own.shape != kept.shape:
                raise ValueError(f"tensor {name} has shape {list(kept.shape)}, but the drafter has {list(own.shape)}")
        self.replace(masters)
        self.optimizer.state.clear()
        for (name, _), master in zip(self.copy.named_parameters(), self.masters, strict=True):
            if f"step.{name}" in tensors:
                moments = {p: tensors[f"{p}.{name}"].to(master.device, copy=True) for p in ("exp_avg", "exp_avg_sq")}
                # AdamW counts on the host.
                self.optimizer.state[master] = {"step": tensors[f"step.{name}"].to("cpu", copy=True), **moments}
        self.steps = values["steps"]

    @torch.no_grad()
    def publish(self) -> None:
        for mine, trained in zip(self.drafter.parameters(), self.copy.parameters(), strict=True):
            mine.copy_(trained)


@torch.no_grad()
def copy_of(drafter: NeuralDrafter, weights: Sequence[Tensor] | None = None) -> NeuralDrafter:
    """Another drafter of the same policy, with the same weights or with these."""
    copy = NeuralDrafter(drafter.policy, drafter.shape, drafter.vocab)
    for own, weight in zip(copy.parameters(), weights or list(drafter.parameters()), strict=True):
        own.copy_(weight)
    return copy


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
            batch, size = [], 0
        batch.append(item)
        size += length(item)
    if batch:
        yield batch
