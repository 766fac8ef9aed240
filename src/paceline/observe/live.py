"""The run as a person sees it: a live view in a terminal, a line per step anywhere else, a table at the end."""

from __future__ import annotations

import contextlib
import math
import os
import time
from typing import IO, Any

import numpy as np
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
from rich.table import Table
from rich.text import Text

from paceline.config import Config

PARTS = {
    "gen": ("rollout", "cyan"),
    "reward": ("reward", "yellow"),
    "end": ("end", "white"),
    "update_actor": ("update", "magenta"),
    "train_drafter": ("drafter", "blue"),
    "merge_drafter": ("merge", "blue"),
    "save_checkpoint": ("save", "green"),
}
BARS = " ▁▂▃▄▅▆▇█"
WIDTH = 40
SHORT = 0.05  # seconds: a part that took less is left out of a step's line


class Lasting:
    """A stream that may go away: a closed terminal, or a pipe whose reader has ended. A run goes on without it."""

    def __init__(self, stream: IO[str]):
        self._stream = stream
        self._gone = False

    def write(self, text: str) -> int:
        return self._try("write", text) or len(text)

    def flush(self) -> None:
        self._try("flush")

    def _try(self, name: str, *args: str) -> Any:
        if self._gone:
            return None
        try:
            return getattr(self._stream, name)(*args)
        except UnicodeError:
            raise
        except (OSError, ValueError):  # ValueError: it was closed on our side
            self._gone = True
            # What is still in its buffer would fail again when the program ends, and change its exit code.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nothing:
                os.dup2(nothing.fileno(), self._stream.fileno())
            return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class LiveView:
    def __init__(self, config: Config, console: Console | None = None, quiet: bool = False):
        self.console = console or Console(quiet=quiet, highlight=False)
        if not isinstance(self.console.file, Lasting):
            self.console.file = Lasting(self.console.file)  # type: ignore[assignment]
        self.steps = config.steps
        self.rewards: list[float] = []
        self.last: dict[str, float] = {}
        self._live: Live | None = None
        self._tokens_before, self._rollout_started = 0, 0.0
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(WIDTH),
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
        self._requests, self._rollout_started = requests, time.perf_counter()
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
            parts.append(time_bar(m))
            if said := of_workers(m):
                parts.append(Text(f"       {said}"))
            if m.get("rollout/spec_rounds"):
                parts.append(Text(guessing(m)))
        return Group(*parts)


def line_of(step: int, steps: int, m: dict[str, float]) -> str:
    seconds = {name: m.get(f"timing_s/{key}", 0.0) for key, (name, _) in PARTS.items()}
    split = " + ".join(f"{name} {s:.1f}" for name, s in seconds.items() if s >= SHORT)
    return (
        f"step {step:>{len(str(steps))}}/{steps}  reward {m['critic/rewards/mean']:.3f}  "
        f"length {m['response_length/mean']:.0f} (p99 {m['response_length/p99']:.0f})  "
        f"{m['rollout/tok_s']:,.0f} tokens/s  {m['timing_s/step']:.1f} s"
        + (f" = {split}" if split else "")
        + (f"  {said}" if (said := of_workers(m)) else "")
    )


def of_workers(m: dict[str, float]) -> str:
    """How many workers took part in a step, and what they did with their idle time; nothing if there is only one."""
    if "cluster/workers" not in m:
        return ""
    count, lost = f"{m['cluster/workers']:.0f}", m.get("cluster/lost", 0.0)
    words = [f"{count} worker{'s' if count != '1' else ''}"]
    if lost >= 1:
        words.append(f"{lost:.0f} lost")
    if m.get("cluster/training_s", 0.0) >= SHORT:
        words.append(f"{m['cluster/training_s']:.1f} s of training in idle time")
    return ", ".join(words)


def time_bar(m: dict[str, float]) -> Text:
    """The seconds of a step, by part."""
    text = Text(f"step   {m['timing_s/step']:.1f} s  ")
    for key, (name, colour) in PARTS.items():
        seconds = m.get(f"timing_s/{key}", 0.0)
        if seconds >= 0.005 * m["timing_s/step"]:
            text.append("█" * max(1, round(WIDTH * seconds / m["timing_s/step"])), style=colour)
            text.append(f" {name} {seconds:.1f}  ", style=colour)
    return text


def guessing(m: dict[str, float]) -> str:
    """How guessing went in a step: how much held, where the time of the rollout went, and what ran most."""
    shares = ", ".join(f"{name} {m[f'rollout/share/{name}']:.0%}" for name in ("plain", "draft", "verify"))
    prefix = "rollout/rounds/"
    runs = sorted(((n, name.removeprefix(prefix)) for name, n in m.items() if name.startswith(prefix)), reverse=True)
    often = ", ".join(f"{name} {n:.0f}" for n, name in runs[:3])
    return (
        f"guess  {m['rollout/spec_accept_length']:.2f} tokens per check, {m['rollout/spec_accept_rate']:.0%} hold; "
        f"time {shares}\nrounds {often}"
    )


def sparkline(values: list[float], width: int = WIDTH) -> str:
    """Values that are not finite are blanks."""
    values = values[-width:]
    finite = [v for v in values if math.isfinite(v)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BARS) - 2) / (high - low) if high > low else 0.0
    return "".join(BARS[1 + round((v - low) * scale)] if math.isfinite(v) else BARS[0] for v in values)


def summary(rows: list[dict[str, Any]], folder: str, report: str | None = None) -> Table:
    """What a run came to."""
    rewards = [row.get("critic/rewards/mean", math.nan) for row in rows] or [math.nan]
    third = max(1, len(rewards) // 3)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")  # a path that is cut short is no use to anyone
    table.add_row("steps", str(len(rows)))
    table.add_row("mean reward", f"first {rewards[0]:.3f}, last {rewards[-1]:.3f}")
    table.add_row("by thirds", f"first {np.mean(rewards[:third]):.3f}, last {np.mean(rewards[-third:]):.3f}")
    table.add_row("reward", sparkline(rewards))
    median = lambda name: float(np.median([row.get(name, 0.0) for row in rows] or [math.nan]))  # noqa: E731
    speed = f"{median('rollout/tok_s'):,.0f} tokens/s (median)"
    guessed = [row.get("rollout/spec_accept_length", math.nan) for row in rows if row.get("rollout/spec_rounds")]
    if guessed:
        speed += f", {np.median(guessed):.2f} tokens per check where guesses were made"
    table.add_row("rollout", speed)
    parts = [(name, f"timing_s/{key}") for key, (name, _) in PARTS.items() if any(f"timing_s/{key}" in r for r in rows)]
    split = ", ".join(f"{name} {median(key):.2f}" for name, key in parts)
    table.add_row("seconds per step", f"{median('timing_s/step'):.2f} (median): {split}")
    several = [row for row in rows if "cluster/workers" in row]
    if several:
        total = {name: sum(row.get(name, 0.0) for row in several) for name in ("cluster/lost", "cluster/training_s")}
        most = max(row["cluster/workers"] for row in several)
        said = of_workers(total | {"cluster/workers": most})
        table.add_row("workers", said.replace(" workers", "", 1))
    table.add_row("run", folder)
    if report:
        table.add_row("report", report)
    return table
