"""What a drafter is: something that proposes the next tokens of every running sequence. Draft tokens are verified by
the policy, so a drafter changes how long a rollout takes and never which tokens it has.

A drafter of one's own is one class with a `name` and `propose`, and one line in `draft.registry`; the rest of the
interface is for those that keep state. See docs/speculation.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor, nn

from paceline.draft.strategy import Strategy

if TYPE_CHECKING:
    from paceline.config import SpeculationConfig
    from paceline.model.decoder import Decoder
    from paceline.rollout.rows import Rows, RowsView

Ints = np.ndarray[Any, np.dtype[np.int32]]
Work = Callable[[], tuple[Tensor, ...]]


class DraftRequest(Protocol):
    @property
    def id(self) -> int: ...
    @property
    def prompt(self) -> tuple[int, ...]: ...


class DraftSequence(Protocol):
    """A sequence that is being decoded: the tokens of its prompt and of its completion so far."""

    @property
    def request(self) -> DraftRequest: ...
    @property
    def tokens(self) -> list[int]: ...


@dataclass
class Draft:
    """A tree of draft tokens for each sequence, at most `strategy.nodes` of them, parents before children."""

    tokens: Ints  # [sequences, nodes]; -1 where there is no draft token
    parents: Ints  # [sequences, nodes]; 0 is the last token of the sequence, i + 1 is node i

    @classmethod
    def empty(cls, sequences: int, nodes: int) -> Draft:
        """No draft tokens yet; parents as in a chain."""
        parents = np.empty((sequences, nodes), np.int32)
        parents[:] = np.arange(nodes)
        return cls(np.full((sequences, nodes), -1, np.int32), parents)


class DeviceDraft(NamedTuple):
    """Draft tokens and parents as in `Draft`, on the device."""

    tokens: Tensor  # int [batch, nodes]
    parents: Tensor  # int [batch, nodes]
    log_probs: Tensor | None = None
    """[batch, nodes] that the drafter gave them at the request's temperature, where a strategy shares what is
    verified."""


class PassShape(NamedTuple):
    """The rows of a pass: so many sequences, padded to `batch` rows where a graph has that size."""

    sequences: int
    batch: int
    fixed: bool
    """Whether its tensors must have the same shapes each time, because it is captured as a graph."""


@dataclass(frozen=True)
class DrafterSetup:
    """What a drafter is made from, one for each engine."""

    policy: Decoder
    settings: SpeculationConfig
    max_batch: int
    max_length: int
    """Longest prompt and completion together, in tokens."""
    network: nn.Module | None = None
    """Trained weights, shared by all engines of a worker (`registry.make_network`); None if there are none."""


@dataclass(frozen=True)
class MemoryRequest:
    """What a drafter's memory is planned from, before anything is made."""

    policy: Decoder  # on the meta device
    settings: SpeculationConfig
    model_path: str
    max_batch: int


@dataclass(frozen=True)
class DrafterMemory:
    """Device memory of a drafter."""

    shared_bytes: int  # weights, once for each worker
    engine_bytes: int  # caches, for each engine
    parameters: int = 0  # that training changes
    vocab_size: int = 0  # tokens that a training step scores


class BaseDrafter(ABC):
    name: str
    """As strategies name it: `name:depth`."""
    default_strategies: tuple[str, ...] = ()
    """A few that pay at different batch sizes; used where `speculation.strategies` is null."""
    on_device = False
    """Whether it proposes from what the device knows (`DeviceDrafter`): then a round can be launched before the last
    one was read."""
    has_confidence = False
    """Whether its chains come with log-probabilities, by which requests can share what is verified."""

    @classmethod
    def is_enabled(cls, settings: SpeculationConfig, has_network: bool) -> bool:
        """Whether the settings ask for it; by default, if a strategy names it."""
        return any(Strategy.parse(text).drafter == cls.name for text in settings.strategies or ())

    @classmethod
    def make(cls, setup: DrafterSetup) -> BaseDrafter:
        """One for an engine, where it is enabled."""
        return cls()

    @classmethod
    def plan_memory(cls, request: MemoryRequest) -> DrafterMemory | None:
        """The device memory that it will take; None if it will not be there."""
        return None

    @abstractmethod
    def propose(self, sequences: Many[DraftSequence], strategy: Strategy) -> Draft:
        """Draft tokens for each sequence. The device waits for this."""

    def begin(self, sequences: Many[DraftSequence]) -> None:  # noqa: B027 (most drafters keep no state)
        """These have entered the batch, for the first time or after a pause."""

    def follow(self, sequences: Many[DraftSequence]) -> None:  # noqa: B027
        """Called every few rounds, while the device is busy: read what the sequences have gained."""

    def finish(self, sequences: Many[DraftSequence]) -> None:  # noqa: B027
        """These are complete, or have been dropped."""

    def catch_up_rows(self, shape: PassShape) -> int:
        """Rows of the passes that it needs before its next draft, because it did not run in the last rounds: sequences
        times tokens of each."""
        return 0

    @property
    def memory_bytes(self) -> int:
        """What it keeps, on the host and on the device, weights not counted."""
        return 0

    def refresh(self) -> None:  # noqa: B027
        """The policy has been updated: renew what was copied from it."""

    def make_trainer(self, settings: Any) -> Any:
        """What trains it; None if it does not learn."""
        return None


class DeviceDrafter(BaseDrafter):
    """A drafter that runs on the policy's device, within the engine's CUDA graphs: what runs in a pass looks at no
    values on the host. Passes of the policy hand it what they compute on the way."""

    on_device = True
    uses_features = False
    """Whether passes of the policy have to return the hidden states entering `tap_layers`."""

    def propose(self, sequences: Many[DraftSequence], strategy: Strategy) -> Draft:
        raise NotImplementedError("a drafter on the device proposes with propose_on_device")

    @abstractmethod
    def bind(self, rows: Rows, index: int, strategies: list[Strategy]) -> None:
        """Called once by the engine, before anything else: the running batch, which of the drafters' columns in it are
        this one's, and the strategies that may come."""

    def prefill(
        self, tokens: Tensor, features: Tensor | None, positions: Tensor, lengths: list[int], starts: list[int]
    ) -> list[Any]:
        """The policy has run over sequences, end to end -> what to keep of each until `take_prefill`. Those that go on
        behind an observation come without the tokens before their position in `starts`, which is 0 for others."""
        return [None] * len(lengths)

    def take_prefill(self, rows: RowsView, slots: list[int], kept: list[Any], tokens: Tensor) -> None:
        """These rows begin, with what `prefill` kept of their prompts and the first token [B] of each."""

    def on_pass(
        self,
        rows: RowsView,
        features: Tensor | None,
        tokens: Tensor,
        path: Tensor | None = None,
        num_accepted: Tensor | None = None,
    ) -> None:
        """The policy has run over T new tokens of each row: features [B, T, width] and the tokens [B, n] sampled behind
        those on the accepted `path` [B, n] (None: in order), of which the first 1 + num_accepted [B] count (None:
        1)."""

    def catch_up(self, shape: PassShape) -> Iterator[Work]:
        """Passes to be run one after the other before it can propose; each is over when the next is asked for."""
        return iter(())

    @abstractmethod
    def propose_on_device(self, batch: int, strategy: Strategy, noise: Callable[[], Tensor]) -> DeviceDraft:
        """`noise` computes the Gumbel noise [batch, depth + 1, V] of the next positions."""

    def round_read(self, count: int) -> None:
        """A round of this drafter over the first `count` rows has been read by the host; their context is still what it
        was before."""
