"""What environments and tools returned, in the run: a step that is made again after a kill is told the same.

A row is found by the step and by all that has led to it: the request and what the policy has written in it so far. So
it is only used where the policy writes the same again.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Protocol

from paceline.core import Sample
from paceline.tasks.environments.messages import Action
from paceline.tasks.environments.protocol import StepResult


class TurnLog(Protocol):
    """Rows of a file in the run (`run/turns.py`)."""

    def find(self, key: str) -> dict[str, Any] | None: ...

    def write(self, row: dict[str, Any]) -> None: ...


class TurnRecords:
    def __init__(self, log: TurnLog | None):
        self._log = log

    def find(self, key: str) -> tuple[StepResult, bool] | None:
        """The result, and whether the step had failed."""
        row = self._log.find(key) if self._log else None
        if row is None:
            return None
        names = ("observation", "reward", "done", "calls", "errors", "seconds", "attributes")
        return StepResult(*(row[name] for name in names)), row["failed"]

    def write(self, key: str, step: int, request: int, turn: int, result: StepResult, failed: bool) -> None:
        """Before anybody acts on it."""
        if self._log is None:
            return
        row = {"step": step, "request": request, "turn": turn, "key": key, "observation": result.observation}
        row |= {"reward": result.reward, "done": result.done, "calls": result.calls, "errors": result.errors}
        row |= {"attributes": result.attributes}
        self._log.write(row | {"failed": failed, "seconds": round(result.seconds, 6)})


def key_of(step: int, request: int, sample: Sample, actions: tuple[Action, ...]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in (step, request, sample.index, json.dumps(sample.prompt, default=str), *(a.raw for a in actions)):
        digest.update(str(part).encode("utf-8", "surrogatepass") + b"\x1f")
    return digest.hexdigest()
