"""The EAGLE drafter at work on the running batch: its cache follows the policy's, and all draft tokens of a round are
made by passes that never wait for the host, so that on a GPU a draft is one graph.

Its cache holds an entry per token, made of the token and of the policy's features of the token before (`eagle.model`).
Features are kept in a ring per request, so entries that are missing because the drafter did not run for a while are
made later, in a few passes of the drafter alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from paceline.draft.base import (
    BaseDrafter,
    DeviceDraft,
    DeviceDrafter,
    DrafterMemory,
    DrafterSetup,
    MemoryRequest,
    PassShape,
    Work,
)
from paceline.draft.eagle.block import propose_block
from paceline.draft.eagle.cache import RoundAttention, TailAttention, WindowCache
from paceline.draft.eagle.features import FeatureRing
from paceline.draft.eagle.model import EagleModel
from paceline.draft.eagle.paged_cache import PagedRound, PagedWindowCache
from paceline.draft.eagle.propose import Sampler, propose_chain, propose_tree
from paceline.kernels.fused import has_kernels
from paceline.kernels.positions import up_to

if TYPE_CHECKING:
    from paceline.config import SpeculationConfig
    from paceline.draft.eagle.trainer import EagleTrainer, TrainSettings
    from paceline.draft.strategy import Strategy
    from paceline.rollout.rows import Rows, RowsView

CATCH_UP_TOKENS = 64  # entries of each request in one catch-up pass, at most
CATCH_UP_ROWS = 2048  # rows of such a pass, at most: more take as much longer, and their graph as much more memory
RECENT = 40  # entries that are made up where each row takes its time; drafts from these are accepted nearly as often


def entries_at_once(batch: int, step: int, window: int) -> int:
    """Missing entries of each request that a catch-up pass makes at most, where a round leaves `step` behind."""
    return max(step, min(CATCH_UP_TOKENS, window, CATCH_UP_ROWS // batch))


def entries_in_reach(batch: int, window: int, on_gpu: bool) -> int:
    """Missing entries of each request that are made at all; older ones are given up."""
    return min(window, max(RECENT, 2 * CATCH_UP_ROWS // batch if on_gpu else 0))


class PrefillState(NamedTuple):
    """What a prompt leaves for the drafter."""

    features: Tensor  # [width] of its last token
    tail: tuple[Tensor, Tensor]  # keys and values of its last entries
    length: int


class EagleDrafter(DeviceDrafter):
    name = "neural"
    default_strategies = ("neural:2", "neural:3", "neural:5", "neural:7", "neural:10",
                          "neural:4x3/8", "neural:6x4/16", "neural:8x4/24")  # fmt: skip
    uses_features = True
    has_confidence = True

    def __init__(self, model: EagleModel):
        """`model` may be that of several engines."""
        self.model = model
        self.in_kernel = has_kernels(model.fc)
        """Whether chains are sampled by a kernel that makes its own noise."""

    @classmethod
    def is_enabled(cls, settings: SpeculationConfig, has_network: bool) -> bool:
        return has_network

    @classmethod
    def make(cls, setup: DrafterSetup) -> BaseDrafter:
        return cls(cast(EagleModel, setup.network))

    @classmethod
    def plan_memory(cls, request: MemoryRequest) -> DrafterMemory | None:
        from paceline.draft.eagle.memory import plan_memory

        return plan_memory(request)

    def bind(self, rows: Rows, index: int, strategies: list[Strategy]) -> None:
        model = self.model
        config = model.policy.config
        window = model.shape.window
        self.rows = rows
        self.index = index
        self._cached, self._start = rows.drafter_columns(index)
        self.step = max((s.depth for s in strategies), default=0) + 1
        """Most entries that a round of any drafter leaves behind: one for each token that it gives a sequence."""
        assert window >= self.step, "a window holds at least what one round can write"
        self.ring = FeatureRing(
            len(rows.host), window, len(config.tap_layers) * config.hidden_size, model.fc.dtype, model.fc.device
        )
        drafted = max((s.depth * s.width for s in strategies), default=0)
        capacity = max(self.entries(1), self.step + drafted)
        make = PagedWindowCache if self.in_kernel else WindowCache
        self.cache = make(config, len(rows.host), window, capacity, model.fc.dtype, model.fc.device)

    @property
    def memory_bytes(self) -> int:
        return sum(t.nbytes for t in (self.ring.features, self.ring.tokens, self.cache.k, self.cache.v))

    def refresh(self) -> None:
        self.model.refresh()

    def make_trainer(self, settings: TrainSettings) -> EagleTrainer:
        from paceline.draft.eagle.trainer import EagleTrainer  # decoding needs none of it

        return EagleTrainer(self.model, settings)

    # What the policy's passes leave

    def prefill(
        self, tokens: Tensor, features: Tensor | None, positions: Tensor, lengths: list[int], starts: list[int]
    ) -> list[Any]:
        """Make the entries of sequences: each token with the features of the one before it. The first one of a sequence
        that goes on has none, and what was before it is forgotten."""
        assert features is not None, "it uses features"
        ends = torch.tensor(lengths, device=tokens.device).cumsum(0)
        before = features.roll(1, 0).index_fill(0, (ends - torch.tensor(lengths, device=tokens.device)), 0)
        attention = TailAttention(lengths, tokens.device, self.cache.window)
        self.model(tokens, self.model.fuse(before), positions, attention)
        reached = [start + length for start, length in zip(starts, lengths, strict=True)]
        return [PrefillState(*parts) for parts in zip(features[ends - 1], attention.tails, reached, strict=True)]

    def take_prefill(self, rows: RowsView, slots: list[int], kept: list[Any], tokens: Tensor) -> None:
        features = torch.stack([state.features for state in kept])
        self.ring.put(rows.slot, rows.context - 1, features[:, None], tokens[:, None])
        for state, shared in _by_prompt(kept, slots):
            self.cache.fill(torch.tensor(shared, device=tokens.device), state.tail, state.length)

    def on_pass(
        self,
        rows: RowsView,
        features: Tensor | None,
        tokens: Tensor,
        path: Tensor | None = None,
        num_accepted: Tensor | None = None,
    ) -> None:
        assert features is not None, "it uses features"
        self.ring.put(rows.slot, rows.context, features, tokens, path, num_accepted)

    # Catching up

    def missing(self, count: int) -> int:
        """Entries that the request lacking most lacks, the one of its last token included."""
        return int((self.rows.context[:count] - self._cached[:count]).max()) + 1

    def entries(self, batch: int) -> int:
        return entries_at_once(batch, self.step, self.model.shape.window)

    def reach(self, batch: int) -> int:
        return entries_in_reach(batch, self.ring.window, self.model.fc.is_cuda)

    def catch_up_rows(self, shape: PassShape) -> int:
        missing = min(self.missing(shape.sequences), self.reach(shape.sequences) - 1)
        most = self.entries(shape.batch)
        passes = -(-max(0, missing - self.step) // most)
        return shape.batch * (passes * most if shape.fixed else min(missing, passes * most))

    def catch_up(self, shape: PassShape) -> Iterator[Work]:
        count, batch, fixed = shape
        self._give_up_old(count)
        while (missing := self.missing(count)) > self.step:
            # A graph has one size; without one, no more entries are made than are missing.
            new = self.entries(batch) if fixed else min(self.entries(batch), missing)
            yield lambda new=new: self.extend_cache(batch, new)[:1]  # type: ignore[misc]
            # The last entry comes with the draft.
            self._cached[:count] = (self._cached[:count] + new).clip(max=self.rows.context[:count])

    def _give_up_old(self, count: int) -> None:
        """Give up missing entries that lie further back than its reach, and all before them."""
        oldest = self.rows.context[:count] - self.reach(count) + 2  # an entry needs the features of the token before it
        behind = self._cached[:count] < oldest
        self._cached[:count][behind] = oldest[behind]
        self._start[:count][behind] = oldest[behind]

    def extend_cache(self, count: int, new: int, lookahead: int = 0) -> tuple[Tensor, RoundAttention | PagedRound]:
        """Make up to `new` missing entries per request -> output [count, hidden] of the last one that exists, and the
        attention of the round, with slots for `lookahead` draft tokens."""
        rows = self.rows.view(0, count)
        cached, start = rows.drafters[self.index]
        positions = cached[:, None] + up_to(new, cached.device)
        present = positions <= rows.context[:, None]
        tokens, features = self.ring.take(rows.slot, positions)
        attention = self.cache.round(rows.slot, cached, start, new + lookahead)
        attention.entries(new, present)
        out = self.model(tokens.flatten(), self.model.fuse(features.flatten(0, 1)), positions.flatten(), attention)
        assert attention.new is not None
        k, v = (x.view(count, new, *x.shape[1:]) for x in attention.new)
        self.cache.put(rows.slot.long()[:, None].where(present, 0), positions, k, v)
        last = (rows.context - cached).long().clamp(0, new - 1)
        out = out.view(count, new, -1)
        return out.gather(1, last[:, None, None].expand(-1, 1, out.shape[-1]))[:, 0], attention

    # Drafting

    def propose_on_device(self, batch: int, strategy: Strategy, noise: Callable[[], Tensor]) -> DeviceDraft:
        """Make the entries that the last round left, then the draft."""
        known = None if strategy.chain and self.in_kernel else noise()
        # Where the host's rows are the device's, shapes may depend on values.
        new = self.step if self.rows.apart else self.missing(batch)
        hidden, attention = self.extend_cache(batch, new, strategy.depth * strategy.width)
        rows = self.rows.view(0, batch)
        sampler = Sampler(self.model, rows, strategy.noise, known)
        propose = propose_block if self.model.shape.block else propose_chain if strategy.chain else propose_tree
        draft = propose(self.model, rows, hidden, strategy, sampler, attention)
        if self.rows.apart:  # the device's rows: all entries are in the cache now
            rows.drafters[self.index].cached.copy_((rows.context + 1).where(rows.slot > 0, 0))
        return draft

    def round_read(self, count: int) -> None:
        # Only now: while the device might read the rows, they must not change.
        self._cached[:count] = self.rows.context[:count] + 1


def _by_prompt(kept: list[PrefillState], slots: list[int]) -> list[tuple[PrefillState, list[int]]]:
    """Completions of the same prompt share what it left: a copy for each on its own would take longer than the
    prompt."""
    shared: dict[int, tuple[PrefillState, list[int]]] = {}
    for state, slot in zip(kept, slots, strict=True):
        shared.setdefault(id(state), (state, []))[1].append(slot)
    return list(shared.values())
