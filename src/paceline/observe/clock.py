"""The seconds of a step, by part."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Clock:
    """Times the parts of a step; `on_begin(name)` is called when one begins, `on_part(name, seconds)` when it is
    over."""

    def __init__(
        self, on_part: Callable[[str, float], None] | None = None, on_begin: Callable[[str], None] | None = None
    ) -> None:
        self.on_part = on_part
        self.on_begin = on_begin
        self.started = time.perf_counter()
        self.parts: dict[str, float] = {}
        """Seconds by part, named as in the metrics: `timing_s/PART`."""

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def part(self, name: str) -> _Part:
        return _Part(self, name)

    def metrics(self, tokens: int) -> dict[str, float]:
        """Of a step whose answers have so many tokens."""
        step = self.elapsed
        parts = {f"timing_s/{name}": seconds for name, seconds in self.parts.items()}
        rates = {"perf/throughput": tokens / step, "rollout/tok_s": tokens / max(self.parts["gen"], 1e-9)}
        return parts | {"timing_s/step": step} | rates


class _Part:
    def __init__(self, clock: Clock, name: str):
        self.clock = clock
        self.name = name

    def __enter__(self) -> None:
        if self.clock.on_begin:
            self.clock.on_begin(self.name)
        self.started = time.perf_counter()

    def __exit__(self, *_: Any) -> None:
        seconds = time.perf_counter() - self.started
        parts = self.clock.parts
        parts[self.name] = parts.get(self.name, 0.0) + seconds
        if self.clock.on_part:
            self.clock.on_part(self.name, seconds)
