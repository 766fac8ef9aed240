"""What a worker asks of an engine, whichever it is. `setup/engines.py` has them by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from paceline.core import Completion, Observation, Request, Turn
    from paceline.rollout.stats import EngineStats, RoundRecord


class EngineTuner(Protocol):
    """Of a worker's engine, whatever picks the strategies of its rounds."""

    @property
    def explored_s(self) -> float:
        """Seconds in strategies other than the best known one, out of `total_s`."""

    @property
    def total_s(self) -> float:
        """Seconds in rounds whose strategy it chose."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; empty where it is kept elsewhere."""

    def restore(self, state: dict[str, Any]) -> None: ...

    def renew(self) -> None:
        """The drafter has changed."""


class WorkerEngine(Protocol):
    max_length: int
    """Longest prompt and completion together, in tokens."""

    @property
    def tuner(self) -> EngineTuner: ...

    @property
    def stats(self) -> EngineStats: ...

    record: Callable[[RoundRecord], None] | None
    """Called with every round, if set."""

    def submit(self, requests: Iterable[Request], ahead: Mapping[int, Sequence[int]] | None = None) -> None:
        """`ahead` has what was written ahead of some, by id."""

    @property
    def unfinished(self) -> int:
        """Requests."""

    @property
    def runnable(self) -> int:
        """Those of them that do not wait for an observation."""

    def take_turns(self) -> list[Turn]:
        """Of requests that act: turns that have ended since this was asked last."""

    def observe(self, observation: Observation) -> Completion | None:
        """What a turn has led to -> the completion, if it ends with the turn."""

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""

    def step(self) -> list[Completion]:
        """Decode for a little while -> what has been finished."""

    def release(self, count: int) -> list[int]:
        """Give up to `count` requests that have not begun, the last ones first -> their ids."""

    def clear(self) -> None:
        """Drop every request."""

    def refresh(self) -> None:
        """The policy has been updated."""

    def rest(self) -> None:
        """The rollout is over: what only decoding needs may be given away until the next request."""

    def drafter_accepted(self) -> None:
        """The drafter has other weights now."""

    def close(self) -> None:
        """End what runs elsewhere. No method is called after that."""
