"""Training as the engine's process sees it, whether it goes on there or in a side-car: answers in, versions out. And
the loop that both run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from paceline.integrations.vllm.messages import Activity, NewVersion, When

if TYPE_CHECKING:
    from paceline.integrations.vllm.online import OnlineDrafter

PUBLISH_EVERY_S = 1.0
"""Seconds between looks whether it is time for a version."""
ANSWERS = list[tuple[list[int], list[int]]]
TRAINS_IN: dict[str, tuple[str, ...]] = {
    "idle": ("idle",),
    "tail": ("idle", "tail"),
    "always": ("idle", "tail", "busy"),
}
"""What the engine may be doing while the drafter is trained, by `when`."""


class Training(Protocol):
    def answers(self, of: ANSWERS) -> None: ...

    def activity(self, now: Activity) -> None: ...

    def policy_updated(self, weights: Mapping[str, Tensor] | Path) -> None: ...

    def offer(self, folder: Path) -> None:
        """A UserError says why it is refused."""
        ...

    def train(self, seconds: float) -> None:
        """Train for so long now, whatever the engine does."""
        ...

    def poll(self) -> NewVersion | None:
        """The newest version that the engine does not have, if there is one. Never waits."""
        ...

    def close(self) -> None: ...


class TrainingLoop:
    """One turn after another: a step if it may, and a version when it is time."""

    def __init__(self, online: OnlineDrafter, when: When, clock: Callable[[], float] = time.monotonic):
        self.online = online
        self.when = when
        self.activity: Activity = "idle"
        self._clock = clock
        self._looked = clock()

    @property
    def may_train(self) -> bool:
        return self.activity in TRAINS_IN[self.when]

    def turn(self) -> tuple[bool, NewVersion | None]:
        """Whether there was anything to learn, and a version if one was made."""
        worked = self.online.step()
        new = None
        if self._clock() - self._looked >= PUBLISH_EVERY_S:
            new = self.online.publish()
            self._looked = self._clock()
        return worked, new
