"""The run in a terminal: a live view, or a line per step where the output is no terminal."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from paceline.config import Config
from paceline.observe.step_text import (
    BAR_WIDTH,
    describe_learning,
    describe_speculation,
    describe_workers,
    line_of,
    sparkline,
    time_bar,
)
from paceline.observe.stream import DurableStream


class LiveView:
    def __init__(self, config: Config, console: Console | None = None, quiet: bool = False):
        self.console = console or Console(quiet=quiet, highlight=False)
        if not isinstance(self.console.file, DurableStream):
            self.console.file = DurableStream(self.console.file)  # type: ignore[assignment]
        self.steps = config.steps
        self.rewards: list[float] = []
        self.last: dict[str, float] = {}
        """Metrics of the last step."""
        self._live: Live | None = None
        self._requests = 0
        self._rollout_started = 0.0
        self._tokens_before = 0
        """Tokens that workers had written when the rollout began; -1 until the first of them reports."""
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(BAR_WIDTH),
            TimeElapsedColumn(),
            TextColumn("left"),
        )
        self._progress = Progress(*columns, TimeRemainingColumn(elapsed_when_finished=True), console=self.console)
        self._steps = self._progress.add_task("steps", total=config.steps)
        self._rollout = Text("")

    def start(self, step: int) -> None:
        self._progress.update(self._steps, completed=step)
        if self.console.is_terminal:
            self._live = Live(self._render(), console=self.console, refresh_per_second=8, transient=True)
            self._live.start()

    def stop(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def note(self, text: str) -> None:
        self.console.print(Text.assemble(("note ", "yellow"), text), soft_wrap=True)

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)

    def rollout_started(self, step: int, requests: int) -> None:
        self._requests = requests
        self._rollout_started = time.perf_counter()
        self._tokens_before = -1

    def rollout_progress(self, finished: int, tokens: int) -> None:
        """Called after every engine step, so it must cost next to nothing."""
        if not self._live:
            return
        if self._tokens_before < 0:
            self._tokens_before = tokens
        rate = (tokens - self._tokens_before) / max(1e-9, time.perf_counter() - self._rollout_started)
        self._rollout.plain = f"now   {finished}/{self._requests} answers   {rate:,.0f} tokens/s"
        self._live.update(self._render())

    def step_done(self, step: int, metrics: dict[str, float]) -> None:
        self.rewards.append(metrics["critic/rewards/mean"])
        self.last = metrics
        self._progress.update(self._steps, completed=step)
        if self._live:
            self._live.update(self._render())
        else:
            self.console.print(line_of(step, self.steps, metrics), soft_wrap=True)

    def _render(self) -> Group:
        parts: list[Any] = [self._progress, self._rollout]
        if self.last:
            m = self.last
            parts.append(Text(f"reward {m['critic/rewards/mean']:.3f}  {sparkline(self.rewards)}"))
            parts.append(
                Text(
                    f"length {m['response_length/mean']:.0f}  p50 {m['response_length/p50']:.0f}  "
                    f"p99 {m['response_length/p99']:.0f}   {m['rollout/tok_s']:,.0f} tokens/s"
                )
            )
            parts.append(Text(f"learn  {describe_learning(m)}"))
            parts.append(time_bar(m))
            if workers := describe_workers(m):
                parts.append(Text(f"       {workers}"))
            if m.get("rollout/spec_rounds"):
                parts.append(Text(describe_speculation(m)))
        return Group(*parts)
