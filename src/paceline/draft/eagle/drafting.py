"""The neural drafter at work on the running batch: its cache follows the policy's, and a round of guesses is one pass
after the other with no look at the host in between, so that on a GPU the whole round is one graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.draft.eagle.cache import RoundAttention, TailAttention, WindowCache
from paceline.draft.eagle.features import FeatureRing
from paceline.draft.eagle.model import EagleModel
from paceline.draft.eagle.paged_cache import PagedRound, PagedWindowCache
from paceline.draft.strategy import Strategy
from paceline.kernels.fused import has_kernels
from paceline.kernels.gumbel_argmax import gumbel_argmax
from paceline.kernels.noise import noise_dtype
from paceline.kernels.positions import up_to

if TYPE_CHECKING:
    from paceline.rollout.rows import Rows, RowsView

Round = RoundAttention | PagedRound
LONG = 64  # entries per request and pass when the drafter was off for long
MOST_ROWS = 2048  # of such a pass: more take as much longer, and their graph as much more memory
RECENT = 40  # that are made up where each takes its time; guesses from these hold nearly as often


def entries_at_once(batch: int, step: int, window: int) -> int:
    """Entries that a pass makes up at most for each of so many requests, where a round leaves `step` behind."""
    return max(step, min(LONG, window, MOST_ROWS // batch))


def entries_in_reach(batch: int, window: int, on_gpu: bool) -> int:
    """Entries that are made up at most for each of so many requests, whatever it has missed."""
    return min(window, max(RECENT, 2 * MOST_ROWS // batch if on_gpu else 0))


class EagleDrafting:
    def __init__(self, drafter: EagleModel, rows: Rows, ring: FeatureRing, strategies: list[Strategy]):
        self.drafter, self.rows, self.ring = drafter, rows, ring
        self.step = max((s.depth for s in strategies), default=0) + 1  # most entries that a round leaves behind
        window, weight = drafter.shape.window, drafter.fc
        assert window >= self.step, "a window holds at least what one round can write"
        self.races = has_kernels(weight)
        """Whether the guesses of a chain need no noise that is written out."""
        guesses = max((s.depth * s.width for s in strategies), default=0)
        room = max(self.entries(1), self.step + guesses)
        make = PagedWindowCache if self.races else WindowCache
        self.cache = make(drafter.policy.config, len(rows.host), window, room, weight.dtype, weight.device)

    def prefill(self, tokens: Tensor, features: Tensor, positions: Tensor, lengths: list[int]) -> list[Any]:
        """Make the entries of whole texts: each token with the features before it -> what to keep of each text."""
        before = features.roll(1, 0).masked_fill(positions[:, None] == 0, 0)
        attention = TailAttention(lengths, tokens.device, self.cache.window)
        self.drafter(tokens, self.drafter.fuse(before), positions, attention)
        return attention.tails

    def missing(self, count: int) -> int:
        """Entries that the request lacking most lacks, the one of its last token included."""
        return int((self.rows.context[:count] - self.rows.drafted[:count]).max()) + 1

    def entries(self, batch: int) -> int:
        return entries_at_once(batch, self.step, self.drafter.shape.window)

    def reach(self, batch: int) -> int:
        return entries_in_reach(batch, self.ring.window, self.drafter.fc.is_cuda)

    def skip(self, count: int) -> None:
        """Give up on missing entries that lie further back than it reaches, and on all before them."""
        rows = self.rows
        oldest = rows.context[:count] - self.reach(count) + 2  # an entry needs the features of the place before it
        behind = rows.drafted[:count] < oldest
        rows.drafted[:count][behind] = oldest[behind]
        rows.start[:count][behind] = oldest[behind]

    def catch_up(self, count: int, new: int, room: int = 0) -> tuple[Tensor, Round]:
        """Make up to `new` missing entries per request -> output [count, hidden] of the last one that exists, and the
        attention of the round, with room for as many guesses."""
        rows = self.rows.view(0, count)
        places = rows.drafted[:, None] + up_to(new, rows.drafted.device)
        present = places <= rows.context[:, None]
        tokens, features = self.ring.take(rows.slot, places)
        attention = self.cache.round(rows.slot, rows.drafted, rows.start, new + room)
        attention.entries(new, present)
        out = self.drafter(tokens.flatten(), self.drafter.fuse(features.flatten(0, 1)), places.flatten(), attention)
        assert attention.new is not None
        k, v = (x.view(count, new, *x.shape[1:]) for x in attention.new)
        self.cache.put(rows.slot.long()[:, None].where(present, 0), places, k, v)
        last = (rows.context - rows.drafted).long().clamp(0, new - 1)
        out = out.view(count, new, -1)
        return out.gather(1, last[:, None, None].expand(-1, 1, out.shape[-1]))[:, 0], attention

    def propose(self, count: int, strategy: Strategy, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Catch up by a round, then guess -> tokens and parents, int [count, nodes].
        `noise` [count, at least depth, V] is that of the places to be guessed; a chain may do without (`races`)."""
        # Where the host's rows are the device's, shapes may depend on values.
        new = self.step if self.rows.apart else self.missing(count)
        hidden, attention = self.catch_up(count, new, strategy.depth * strategy.width)
        rows = self.rows.view(0, count)
        racing = _Race(self.drafter, rows, strategy.noise, noise)
        guess = self._chain if strategy.chain else self._beams
        return guess(rows, hidden, strategy, racing, attention)

    def _chain(
        self, rows: RowsView, hidden: Tensor, strategy: Strategy, racing: _Race, attention: Round
    ) -> tuple[Tensor, Tensor]:
        batch, device, depth = len(rows.context), rows.context.device, strategy.depth
        places = rows.context[:, None] + up_to(depth + 1, device)[1:]
        cos, sin = (x.view(batch, depth, 1, -1) for x in self.drafter.rotations(places.flatten(), hidden.dtype))
        tokens: list[Tensor] = []
        normed: Tensor | None = None
        for level in range(depth):
            if level:
                attention.guess()
                turned = cos[:, level - 1], sin[:, level - 1]
                hidden, normed = self.drafter.step(tokens[-1], hidden, turned, attention)
            if self.races:
                tokens.append(racing.winners(hidden, normed, level))
            else:
                tokens.append(self._tokens(racing.scores(hidden, level).argmax(-1)))
        return torch.stack(tokens, 1), up_to(depth, device).expand(batch, -1)

    def _beams(
        self, rows: RowsView, hidden: Tensor, strategy: Strategy, racing: _Race, attention: Round
    ) -> tuple[Tensor, Tensor]:
        """At every level the `width` likeliest continuations of the level above; of all, the likeliest `nodes`."""
        batch, device, width = len(rows.context), rows.context.device, strategy.width
        best = racing.scores(hidden, 0).log_softmax(-1).topk(width)
        score, token = best.values, self._tokens(best.indices)  # [B, width] of the newest level
        parent = torch.zeros_like(token)
        ancestry = torch.eye(width, dtype=torch.bool, device=device).expand(batch, -1, -1)  # itself included
        hidden = hidden[:, None].expand(-1, width, -1)
        levels = [(token, parent, score)]
        base = rows.context + 1
        for level in range(1, strategy.depth):
            first = (level - 1) * width
            attention.guesses(ancestry)
            place = (base + (level - 1))[:, None].expand(-1, width)
            hidden = self.drafter(token.flatten(), hidden.flatten(0, 1), place.flatten(), attention)
            hidden = hidden.view(batch, width, -1)
            scores = racing.scores(hidden.flatten(0, 1), level).log_softmax(-1).view(batch, width, -1)
            after = (score[..., None] + scores).topk(width)  # of each
            best = after.values.flatten(1).topk(width)
            beam = best.indices // width
            score, token = best.values, self._tokens(after.indices.flatten(1).gather(1, best.indices))
            parent = 1 + first + beam
            above = ancestry.gather(1, beam[..., None].expand_as(ancestry))
            ancestry = torch.cat((above, torch.eye(width, dtype=torch.bool, device=device).expand(batch, -1, -1)), 2)
            hidden = hidden.gather(1, beam[..., None].expand_as(hidden))
            levels.append((token, parent, score))
        tokens, parents, scores = (torch.cat(part, 1) for part in zip(*levels, strict=True))
        if strategy.nodes < tokens.shape[1]:
            tokens, parents = _likeliest(tokens, parents, scores, strategy.nodes)
        return tokens, parents

    def _tokens(self, index: Tensor) -> Tensor:
        return index if self.drafter.vocab is None else self.drafter.vocab[index]


class _Race:
    """The drafter's own race: its logits over the temperature, and the noise of the place if it is used."""

    def __init__(self, drafter: EagleModel, rows: RowsView, noisy: bool, noise: Tensor | None):
        self.drafter, self.rows, self.noisy = drafter, rows, noisy
        self.noise: Tensor | None = None
        if noise is None:
            return
        greedy = rows.sampling.temperature == 0
        self.cool = torch.where(greedy, 1.0, rows.sampling.temperature).to(noise_dtype(drafter.fc.dtype))[:, None]
        if noisy:
            known = noise if drafter.vocab is None else noise[..., drafter.vocab]
            self.noise = known * (~greedy).to(known.dtype)[:, None, None]

    def winners(self, hidden: Tensor, normed: Tensor | None, level: int) -> Tensor:
        """The tokens [B] that follow [B, hidden], with no noise written out."""
        logits, rows, vocab = self.drafter.logits(hidden, normed), self.rows, self.drafter.vocab
        keys, temperature = rows.sampling.keys, rows.sampling.temperature
        return gumbel_argmax(logits, keys, rows.context, temperature, None, vocab, self.noisy, False, ahead=1 + level)[
            0
        ]

    def scores(self, hidden: Tensor, level: int) -> Tensor:
        """What follows [B * n, hidden], where n belong to each request -> [B * n, guessable tokens]"""
        logits = self.drafter.logits(hidden)  # divided by a wider type, they become that type
        batch = len(self.cool)
        if len(logits) == batch:
            logits = logits / self.cool
            return logits if self.noise is None else logits + self.noise[:, level]
        logits = logits.view(batch, -1, logits.shape[-1]) / self.cool[:, None]
        return (logits if self.noise is None else logits + self.noise[:, level, None]).flatten(0, 1)


def _likeliest(tokens: Tensor, parents: Tensor, scores: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """The `nodes` likeliest of a tree, in their order. A child is never likelier than its parent, and of equals the
    first is taken, so what is left is a tree."""
    kept = scores.sort(dim=1, descending=True, stable=True).indices[:, :nodes].sort(1).values
    there = torch.zeros_like(tokens).scatter(1, kept, 1)
    number = there.cumsum(1)  # new number of each node that stays, counted from 1; 0 is the root
    number = torch.cat((torch.zeros_like(number[:, :1]), number), 1)
    return tokens.gather(1, kept), number.gather(1, parents.gather(1, kept))
