"""What is called after every step: the user's callbacks, and a look at whether anything is learned."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.config import Config, flat
from paceline.observe.signal import LOOK_BACK, causes_now, find_causes

if TYPE_CHECKING:
    from paceline.core import Group


@dataclass
class StepInfo:
    """What a callback is given: a step that is done, learned from and saved where that was due."""

    step: int
    steps: int
    """Of the whole run."""
    metrics: dict[str, float]
    """Of the step, by the names of metrics.jsonl; see `log`."""
    groups: Sequence[Group]
    """What it was learned from: a prompt's sample, and its completions, texts and rewards by request id."""
    stopped: str | None = field(default=None, init=False)
    """Why the run ends after this step, if it was asked to."""

    def log(self, name: str, value: float) -> None:
        """Write a number of one's own into the step's metrics, and into every tracker."""
        self.metrics[name] = float(value)

    def stop(self, why: str = "a callback asked for it") -> None:
        """End the run after this step, saved; resuming it goes on."""
        self.stopped = why


FAQ = "docs/faq.md#why-does-it-not-learn"
Callback = Callable[[StepInfo], Any]


class CallbackFailed(Exception):
    """A callback of the user's raised an error: the run is saved and stops."""


class StepHooks:
    def __init__(self, config: Config, earlier: list[dict[str, Any]], callbacks: Sequence[Callback] = ()):
        """`config` is the resolved one, `earlier` the metrics of steps before a run was resumed."""
        self.callbacks = list(callbacks)
        self.groups: Sequence[Group] = ()
        """Of the present step."""
        self.stopped: str | None = None
        self._steps = config.steps
        self._settings = dict(flat(config.model_dump(mode="json")))
        self._rows = deque(earlier[-LOOK_BACK:], maxlen=LOOK_BACK)
        self._told = {one.cause for one in find_causes(self._settings, earlier)}

    def after(self, step: int, metrics: dict[str, float]) -> list[str]:
        """Call them; what they log is added to `metrics` -> what is to be said: causes of learning nothing that were
        not told before, and why the run ends here."""
        info = StepInfo(step, self._steps, metrics, self.groups)
        for callback in self.callbacks:
            try:
                callback(info)
            except Exception as err:
                name = getattr(callback, "__name__", type(callback).__name__)
                raise CallbackFailed(f"the callback {name} raised {type(err).__name__}: {err}") from err
        self.stopped = info.stopped
        self._rows.append({"step": step} | metrics)
        new = [one for one in causes_now(self._settings, list(self._rows)) if one.cause not in self._told]
        self._told |= {one.cause for one in new}
        ends = [f"the run ends after step {step}: {info.stopped}"] if info.stopped else []
        return [f"{one.heading}: {one.sentence} ({FAQ})" for one in new] + ends
