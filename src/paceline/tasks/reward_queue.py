"""From finished completions to calls of reward functions, and from what the calls gave back to results.

A completion takes part in one call for each `per` that functions have, and is done when all of these are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.tasks.reward_call import FinishedAnswer, MeanOf, Per, RewardCall
from paceline.tasks.reward_process import RewardDone, RewardResult

MAX_ARRIVED = 256  # completions of one call with what has arrived
MAX_ARRIVED_CHARS = 2**22


@dataclass
class _Unfinished:
    result: RewardResult
    calls: int
    """That it still waits for."""


@dataclass
class RewardQueue:
    waiting: deque[RewardCall] = field(default_factory=deque)
    """Calls that can be made."""
    results: list[RewardResult] = field(default_factory=list)
    """Of completions that are done."""
    metrics: dict[str, MeanOf] = field(default_factory=dict)
    """What functions have logged since they were last taken."""

    def __post_init__(self) -> None:
        self._per: tuple[Per, ...] = ()
        self._early: list[tuple[FinishedAnswer, int, int]] = []  # before it was known what functions are called per
        self._arrived: deque[FinishedAnswer] = deque()
        self._groups: dict[int, list[FinishedAnswer]] = {}
        self._unfinished: dict[int, _Unfinished] = {}

    @property
    def open(self) -> int:
        """Completions whose result has not been taken."""
        return len(self._early) + len(self._unfinished) + len(self.results)

    def know(self, per: Sequence[Per]) -> None:
        """What functions are called per; until then completions only wait. The first to tell is believed."""
        if self._per:
            return
        self._per = tuple(per)
        early = self._early
        self._early = []
        for answer, group, size in early:
            self.add(answer, group, size)

    def add(self, answer: FinishedAnswer, group: int, size: int) -> None:
        """A completion is finished, of a group that will have `size` of them."""
        if not self._per:
            self._early.append((answer, group, size))
            return
        self._unfinished[answer.request_id] = _Unfinished(RewardResult(answer.request_id), len(self._per))
        if "completion" in self._per:
            self.waiting.append(RewardCall("completion", [answer]))
        if "arrived" in self._per:
            self._arrived.append(answer)
        if "group" in self._per:
            finished = self._groups.setdefault(group, [])
            finished.append(answer)
            if len(finished) == size:  # in the order of their ids, whichever was finished first
                del self._groups[group]
                self.waiting.append(RewardCall("group", sorted(finished, key=lambda one: one.request_id)))

    def arrived(self) -> RewardCall | None:
        """A call with what has arrived, as much as one takes; it stays here until `took` says that it was made."""
        answers: list[FinishedAnswer] = []
        chars = 0
        for answer in self._arrived:
            chars += len(answer.text)
            if answers and (len(answers) == MAX_ARRIVED or chars > MAX_ARRIVED_CHARS):
                break
            answers.append(answer)
        return RewardCall("arrived", answers) if answers else None

    def took(self, call: RewardCall) -> None:
        for _ in call.answers:
            self._arrived.popleft()

    def done(self, done: RewardDone) -> None:
        """A call was made. The first error of a completion is the one that is told."""
        for name, logged in done.metrics.items():
            self.metrics[name] = self.metrics.get(name, MeanOf()) + logged
        for part in done.results:
            unfinished = self._unfinished[part.request_id]
            whole = unfinished.result
            unfinished.calls -= 1
            if whole.error is None and part.error is not None:
                part.extra = whole.extra | part.extra
                unfinished.result = part
            else:
                whole.values |= part.values
                whole.extra |= part.extra
            if not unfinished.calls:
                del self._unfinished[part.request_id]
                self.results.append(unfinished.result)
