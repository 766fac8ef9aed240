"""The tuner's state as a file, so that an engine that starts again knows what the last one has measured."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from pydantic import ConfigDict
from typing_extensions import TypedDict

from paceline.draft.tuner_state import TunerState
from paceline.errors import UserError
from paceline.files import reading
from paceline.files.writing import write_aside
from paceline.integrations.vllm.tuning import DepthTuner

SAVE_S = 60.0  # seconds between two saves
IDLE_SAVE_S = 5.0  # the same when the engine has nothing to do: its process may be ended without being told
log = logging.getLogger("vllm.paceline")  # below vLLM's own logger, whose level and format it shares


class SavedTuner(TypedDict):
    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    engine: dict[str, Any]
    """What step times depend on: model, drafter, device, version."""
    summary: dict[str, Any]
    tuner: TunerState


class StateFile:
    """What goes wrong with it is told in one sentence and costs no more than what the tuner had learned."""

    def __init__(self, file: Path, engine: dict[str, Any]):
        self.file = file
        self.engine = engine
        self._saved = time.monotonic() - IDLE_SAVE_S
        self._foreign = False  # the file is something else, which is not overwritten
        self._told = False

    def restore(self, tuner: DepthTuner) -> None:
        if not self.file.exists():
            return
        try:
            saved = reading.check(SavedTuner, reading.read_object(self.file), str(self.file))
        except UserError as err:
            self._foreign = True
            log.warning("%s; the tuner starts anew, and its state is not saved: name another file", err)
            return
        other = [name for name, value in self.engine.items() if saved["engine"].get(name) != value]
        if other:
            log.warning(
                "the tuner's state in %s is of an engine with another %s; it starts anew",
                self.file,
                " and ".join(other),
            )
            return
        tuner.tuner.restore(saved["tuner"])
        log.info("the tuner goes on from %s, after %d steps", self.file, saved["tuner"]["round"])

    def save_if_due(self, tuner: DepthTuner, idle: bool) -> None:
        if time.monotonic() - self._saved >= (IDLE_SAVE_S if idle else SAVE_S):
            self.save(tuner)

    def save(self, tuner: DepthTuner) -> None:
        self._saved = time.monotonic()
        if self._foreign:
            return
        saved = {"engine": self.engine, "summary": tuner.summary(), "tuner": tuner.tuner.state()}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_aside(self.file, json.dumps(saved) + "\n")
        except OSError as err:
            if not self._told:
                log.warning("the tuner's state cannot be saved to %s (%s); the engine goes on", self.file, err.strerror)
            self._told = True
        else:
            self._told = False
