"""The program of a side-car: follow a policy, and train its drafter while the engine leaves time for it."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.errors import Sentence
from paceline.integrations.vllm.features import read_update
from paceline.integrations.vllm.messages import (
    Answers,
    Beat,
    Following,
    GaveUp,
    NewVersion,
    NowDoing,
    Offered,
    PolicyAt,
    Trouble,
)
from paceline.integrations.vllm.training import TrainingLoop
from paceline.process.program import Parent, join_parent

BEAT_S = 5.0
PAUSE_S = 0.05  # while there is nothing to do


class SideCarProgram:
    def __init__(self, parent: Parent):
        self.parent = parent
        plan, when = parent.receive()
        self.loop = TrainingLoop(plan.make(), when)
        parent.send(Following(plan.describe_memory()))
        self._last_beat = time.monotonic()

    def run(self) -> None:
        while True:
            while (message := self.parent.receive(block=False)) is not None:
                self._hear(message)
            worked = self.loop.may_train and self._turn()
            if not worked:
                time.sleep(PAUSE_S)
            if time.monotonic() - self._last_beat >= BEAT_S:
                self.parent.send(Beat())
                self._last_beat = time.monotonic()

    def _turn(self) -> bool:
        try:
            worked, new = self.loop.turn()
        except Sentence as err:
            self.parent.send(Trouble(str(err)))
            return False
        self._send(new)
        return worked

    def _hear(self, message: Any) -> None:
        online = self.loop.online
        match message:
            case Answers(of=of):
                for prompt, tokens in of:
                    online.finished(prompt, tokens)
            case NowDoing(activity=activity):
                self.loop.activity = activity
            case PolicyAt(folder=folder, temporary=temporary):
                self._update(Path(folder), temporary)
            case Offered(folder=folder):
                try:
                    self._send(replace(online.offer(Path(folder)), of_offer=True))
                except Sentence as err:
                    self.parent.send(Trouble(str(err), of_offer=True))

    def _update(self, folder: Path, temporary: bool) -> None:
        try:
            self._send(self.loop.online.policy_updated(read_update(folder)))
        except Sentence as err:
            self.parent.send(Trouble(f"the policy of the drafter's training could not be updated: {err}"))
        finally:
            if temporary:
                shutil.rmtree(folder, ignore_errors=True)

    def _send(self, new: NewVersion | None) -> None:
        if new is not None:
            self.parent.send(new)


def main() -> None:
    parent = join_parent()
    try:
        SideCarProgram(parent).run()
    except Sentence as err:
        parent.send(GaveUp(str(err)))
    except torch.OutOfMemoryError as err:
        parent.send(GaveUp(f"out of memory ({err})"))


if __name__ == "__main__":
    main()
