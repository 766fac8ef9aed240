"""What a run is doing now, in one line that fits the terminal: the phase and how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable

PHASES = {
    "gen": "rollout",
    "reward": "rewards",
    "end_rollout": "rollout ends",
    "update_actor": "update",
    "train_drafter": "drafter training",
    "merge_drafter": "drafter merging",
    "testing": "evaluation",
    "save_checkpoint": "saving",
}
"""Parts of a step (`timing_s/PART`) in words."""
LOADING = "loading"
PHASE_BAR = 20  # characters of a bar


class Phase:
    """The present one. `clock` is for tests."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.name = LOADING
        self.detail = ""
        """What is loaded."""
        self.done = 0
        self.total = 0
        """Completions that are finished, and to be finished."""
        self.tokens = 0
        self._clock = clock
        self._started = clock()
        self._lasted: dict[str, float] = {}
        """Seconds that each phase took the last time."""

    def begin(self, name: str, detail: str = "") -> None:
        """A part of a step, or LOADING; what a phase counts begins anew with `count`."""
        name = PHASES.get(name, name)
        if name != self.name:
            self._lasted[self.name] = self.seconds
            self.name = name
            self.done = self.total = self.tokens = 0
            self._started = self._clock()
        self.detail = detail

    def count(self, total: int) -> None:
        """The phase is about so many completions, from now on."""
        self.total = total
        self.done = self.tokens = 0
        self._started = self._clock()

    @property
    def seconds(self) -> float:
        return self._clock() - self._started

    def words(self) -> str:
        """In less than 80 characters."""
        seconds = self.seconds
        if self.total:
            rate = f"  {self.tokens / seconds:,.0f} tokens/s" if self.tokens and seconds > 0 else ""
            return f"{self.name}  {bar(self.done / self.total)}  {self.done}/{self.total} answers{rate}"
        last = self._lasted.get(self.name)
        how_far = f"  {bar(min(0.99, seconds / last))}" if last else ""
        about = f" of about {last:.1f} s" if last else " s"
        detail = f"  {self.detail}" if self.detail else ""
        return f"{self.name}{detail}{how_far}  {seconds:.1f}{about}"


def bar(share: float) -> str:
    full = round(PHASE_BAR * min(1.0, max(0.0, share)))
    return "━" * full + "╌" * (PHASE_BAR - full)
