"""Turns that have ended on workers, and what answers them.

Tools and environments run beside the driver, not beside a worker: what they returned outlives a worker that is lost. A
request that is given to another one is written again from its prompt, to the same tokens, and each of its turns gets
the answer that it had.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from paceline.cluster.coordinator import RolloutState
    from paceline.cluster.messages import RolloutProgress
    from paceline.core import Observation, Turn

TURN_POLL_S = 0.005  # seconds for which the driver waits for reports while turns are open


class TurnAnswers(Protocol):
    """Answers turns, in its own time. One that comes again gets the same answer again."""

    def take(self, turn: Turn) -> None: ...

    def answers(self) -> list[Observation]:
        """Those that are there and were not taken; never waits."""
        ...


class _Place(NamedTuple):
    worker: int
    generation: int
    turn: int


class OpenTurns:
    """Of one rollout."""

    def __init__(self, answers: TurnAnswers | None):
        self._answers = answers
        self._open: dict[int, _Place] = {}  # by request: where its turn has ended

    def __bool__(self) -> bool:
        return bool(self._open)

    def ended(self, report: RolloutProgress, believed: bool) -> None:
        """A worker says so; `believed` if it is one of this generation."""
        for turn in report.turns if believed else ():
            assert self._answers is not None, "only requests that act have turns"
            self._open[turn.request_id] = _Place(report.worker, report.generation, turn.number)
            self._answers.take(turn)

    def answered(self, state: RolloutState) -> dict[int, list[Observation]]:
        """Answers by the worker that waits for them. What a worker was told that is lost, the next one asks for."""
        out: dict[int, list[Observation]] = {}
        for observation in self._answers.answers() if self._answers else ():
            place = self._open.get(observation.request_id)
            if place is None or place.turn != observation.turn:
                continue
            worker = state.workers[place.worker]
            del self._open[observation.request_id]
            if worker.generation == place.generation and observation.request_id in worker.in_flight:
                out.setdefault(place.worker, []).append(observation)
        return out

    def not_only_waiting(self, state: RolloutState) -> list[int]:
        """Workers that have something to do, and so should say something: not those for whose answers all waits."""
        working = [any(not self._waits(i, w.generation, r) for r in w.in_flight) for i, w in enumerate(state.workers)]
        return [i for i, w in enumerate(state.workers) if w.training or w.writing or working[i]]

    def _waits(self, worker: int, generation: int, request: int) -> bool:
        """Here, and not on a worker that was lost."""
        place = self._open.get(request)
        return place is not None and place[:2] == (worker, generation)
