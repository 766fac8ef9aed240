"""The run in a terminal: a line per step that stays, and below it what the run is doing now."""

from __future__ import annotations

import textwrap
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from paceline.config import Config
from paceline.observe.phase import LOADING, Phase, bar
from paceline.observe.step_text import fitted_line, line_of, rough_duration, sparkline
from paceline.observe.stream import DurableStream

REFRESH_HZ = 8


class LiveView:
    """Where the output is no terminal, there are only the lines."""

    def __init__(self, config: Config, console: Console | None = None, quiet: bool = False):
        self.console = console or Console(quiet=quiet, highlight=False)
        if not isinstance(self.console.file, DurableStream):
            self.console.file = DurableStream(self.console.file)  # type: ignore[assignment]
        self.steps = config.steps
        self.rewards: list[float] = []
        self.step = 0
        """That is done."""
        self.folder: Path | None = None
        """Of the run, once it has one."""
        self.phase = Phase()
        self._seconds: list[float] = []  # of the steps that were made
        self._live: Live | None = None
        self._tokens_before = 0
        """Tokens that workers had written when the rollout began; -1 until the first of them reports."""

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def loading(self, what: str) -> None:
        """Before the first step: shows what is being loaded."""
        self.phase.begin(LOADING, what)
        self._show()

    def start(self, step: int) -> None:
        self.step = step
        self._show()

    def _show(self) -> None:
        if self.console.is_terminal and self._live is None:
            self._live = Live(self, console=self.console, refresh_per_second=REFRESH_HZ, transient=True)
            self._live.start()

    def stop(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def part(self, name: str) -> None:
        """A part of a step begins, named as in the metrics."""
        self.phase.begin(name)

    def note(self, text: str) -> None:
        self._print(f"note {text}", Text.assemble(("note ", "yellow")))

    def say(self, text: str) -> None:
        self._print(text, Text())

    def _print(self, text: str, styled: Text) -> None:
        """Wrapped between words in a terminal; in a file one line."""
        if self.console.is_terminal:
            text = wrapped(text, self.console.width)
        self.console.print(styled.append(text[len(styled) :]), soft_wrap=True)

    def rollout_started(self, step: int, requests: int) -> None:
        self.phase.count(requests)
        self._tokens_before = -1

    def rollout_progress(self, finished: int, tokens: int) -> None:
        """Called after every engine step, so it must cost next to nothing."""
        if self._tokens_before < 0:
            self._tokens_before = tokens
        self.phase.done = finished
        self.phase.tokens = tokens - self._tokens_before

    def step_done(self, step: int, metrics: dict[str, float]) -> None:
        self.rewards.append(metrics["critic/rewards/mean"])
        self.step = step
        self._seconds.append(metrics["timing_s/step"])
        if self.console.is_terminal:
            line = fitted_line(step, self.steps, metrics, self.console.width)
        else:
            line = line_of(step, self.steps, metrics)
        self.console.print(line, soft_wrap=True, markup=False)

    def __rich__(self) -> Group:
        """The lines that change, made anew whenever they are shown; each is cut at the terminal's width."""
        now = f"step {self.step + 1}/{self.steps}  " if self.step < self.steps and self.phase.name != LOADING else ""
        lines = [Text(now + self.phase.words(), no_wrap=True, overflow="ellipsis")]
        if self.rewards:
            left = sorted(self._seconds)[len(self._seconds) // 2] * (self.steps - self.step)
            words = f"{bar(self.step / self.steps)}  about {rough_duration(left)} left"
            lines.append(Text(f"{words}  reward {sparkline(self.rewards)}", no_wrap=True, overflow="ellipsis"))
        return Group(*lines)


def wrapped(text: str, width: int) -> str:
    """Lines that end between words, the second and further ones indented; a word that is too long stays whole."""
    parts = [
        textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) or [""]
        if len(line) > width
        else [line]
        for line in text.split("\n")
    ]
    return "\n".join(line for lines in parts for line in lines)
