"""How many tokens a training step of the drafter takes, so that it is over within a set time and training can stop at
any moment. The time of a step is measured; nothing else is known about the machine."""

from __future__ import annotations

import math

from paceline.draft.eagle.gradients import SMALLEST, size_of

MIN_STEP_TOKENS = 128  # with fewer, the fixed cost of a step is most of it
MAX_STEP_TOKENS = 4096  # with more, a drafter would learn more from several smaller steps
FIRST_STEP_TOKENS = 128  # before anything is measured, on a CPU: short, whatever the CPU
FIRST_STEP_TOKENS_GPU = 2048  # and on a GPU, where fewer take about as long
PROBE_EVERY = 50  # steps after which sizes are tried again that were found to be no faster than larger ones
FASTER = 0.8  # a smaller step is worth it if it takes less than this share of the time of the larger one
SMALLER = 0.7  # steps are compared if one has at most this share of the other's tokens


class StepSize:
    def __init__(self, step_s: float, on_gpu: bool):
        self.step_s = step_s
        """How long a step may take."""
        self.on_gpu = on_gpu
        self.tokens = float(FIRST_STEP_TOKENS_GPU if on_gpu else FIRST_STEP_TOKENS)
        """Of the next step."""
        self._floor = self._smallest
        self._last = (0, 0.0)  # tokens and seconds of the last step
        self._captured: set[int] = set()  # sizes that a graph was captured for

    @property
    def _smallest(self) -> float:
        return float(SMALLEST if self.on_gpu else MIN_STEP_TOKENS)

    def forget_graphs(self) -> None:
        """The drafter's copy in training is a new one, and so are its graphs."""
        self._captured.clear()

    def is_measurable(self, tokens: int) -> bool:
        """Whether the time of a step of so many tokens says something about the next: on a GPU the first of each size
        captures a graph."""
        if not self.on_gpu:
            return True
        size = size_of(tokens)
        known = size in self._captured
        self._captured.add(size)
        return known

    def adjust(self, tokens: int, seconds: float, steps: int) -> None:
        """Move towards the set time, by at most a factor of two at once, because the first steps are slow for other
        reasons; but not to where smaller steps take as long as larger ones: part of a step takes the same however small
        it is. `steps` were made so far."""
        if tokens <= self.tokens / 2:  # what is left over at the end of the buffer says little
            return
        before, took = self._last
        if steps % PROBE_EVERY == 0:
            self._floor = self._smallest
        if tokens <= SMALLER * before and took >= seconds > FASTER * took:
            self._floor = max(self._floor, min(before, MAX_STEP_TOKENS))
        self._last = (tokens, seconds)
        wanted = tokens * self.step_s / max(seconds, 1e-9)
        self.tokens = min(MAX_STEP_TOKENS, max(self._floor, self.tokens / 2, min(wanted, 2 * self.tokens)))
        if self.on_gpu:  # graphs come in powers of two
            self.tokens = 2.0 ** int(math.log2(self.tokens))
