"""An engine and a drafter next to somebody else's trainer: it writes the answers, and between the trainer's steps the
drafter learns from them, for a share of the time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.config import Config
from paceline.core import Completion, Request
from paceline.draft.eagle.files import DRAFTER, save_drafter
from paceline.draft.eagle.model import EagleModel
from paceline.errors import UserError
from paceline.files.reading import read_object
from paceline.model.decoder import Decoder
from paceline.model.foreign import ForeignModel
from paceline.rollout.stats import EngineStats
from paceline.rollout.stops import Decode
from paceline.rollout.worker_engine import EngineTuner, WorkerEngine
from paceline.setup.engines import EngineSetup, is_own, make_engine_of_worker
from paceline.spot.learning import DrafterLearning
from paceline.spot.state import load_training, save_training
from paceline.spot.trainer import TrainingStats
from paceline.spot.versions import Versions

STATE = "state.json"
MIN_PROMPT_TOKENS = 512  # that an engine has room for: it is made anew for longer prompts


class SideCar:
    def __init__(
        self,
        model: Decoder | ForeignModel,
        config: Config,
        decode: Decode | None = None,
        neural: EagleModel | None = None,
        warm: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        source: str = "",
        folder: Path | None = None,
    ):
        """A `warm` drafter was trained before. `spot.share` of the config is the share of the time for training it.
        An engine other than ours loads the model from `source`, and writes what it has to into `folder`."""
        self.model = model
        self.config = config
        self.neural = neural
        self._decode = decode
        self._clock = clock
        self._capacity = 0  # tokens of a prompt and its answer that the engine was made for
        self._engine: WorkerEngine | None = None
        self._where = (source, folder)
        self._tuned: dict[str, Any] | None = None  # what an earlier tuner knew
        self.learning: DrafterLearning | None = None
        if neural is not None and config.spot.when != "off":
            spot = config.spot.model_copy(update={"when": "tail"})  # answers are read by us: the learner is another's
            self.learning = DrafterLearning(neural, spot, config.seed, 1, warm)
        self.versions = Versions(config.spot)
        self.updates = 0
        """Of the trainer, after which the drafter could learn."""
        self._answered = -1  # updates before the last rollout
        self._owed = 0.0  # seconds that training may still take
        self._first_accept_rate: float | None = None

    def answer(self, requests: Sequence[Request], learn: bool = True) -> tuple[list[Completion], EngineStats]:
        """Write all answers -> in the order of the requests, and what the engine did. With `learn`, the drafter may
        learn from them later."""
        engine = self._engine_for(requests)
        before = engine.stats.snapshot()
        # Side by side, answers to the same prompt share its prefill, in whatever order they were asked for.
        first: dict[tuple[int, ...], int] = {}
        for request in requests:
            first.setdefault(request.prompt, len(first))
        try:
            engine.submit(sorted(requests, key=lambda r: first[r.prompt]))
            done: dict[int, Completion] = {}
            while engine.unfinished:
                done |= {c.request.id: c for c in engine.step()}
            engine.rest()
        except BaseException:
            engine.clear()  # so that the next rollout is not in the way of the one that was given up
            raise
        stats = engine.stats.since(before)
        if self.learning and learn:
            self.learning.begin_rollout(new_step=self._answered != self.updates)
            self._answered = self.updates  # a conversation takes several rollouts, all of one step
            for completion in done.values():
                self.learning.finished(completion.request.prompt, completion.tokens)
            self._first_accept_rate = stats.first_accept_rate
        return [done[r.id] for r in requests], stats

    def _engine_for(self, requests: Sequence[Request]) -> WorkerEngine:
        """The engine, made when it is first needed, and anew when a sequence is longer than it can take."""
        longest = max(len(r.prompt) for r in requests)
        answer = min(max(r.sampling.max_tokens for r in requests), self.model.config.max_positions)
        if not is_own(self.config):  # it has room for the model's whole context
            if self._engine is None:
                self._engine = self._make_engine(self.config)
        elif self._engine is None or longest + answer > self._capacity:
            prompts = max(MIN_PROMPT_TOKENS, 1 << (longest - 1).bit_length())
            self._capacity = prompts + answer
            c = self.config
            task = c.task.model_copy(update={"max_prompt_tokens": prompts})
            rollout = c.rollout.model_copy(update={"max_tokens": answer})
            known = self._engine.tuner.state() if self._engine else self._tuned
            self._engine = None  # lets go of its memory first
            self._engine = self._make_engine(c.model_copy(update={"task": task, "rollout": rollout}))
            if known:
                self._engine.tuner.restore(known)
        self._engine.refresh()
        return self._engine

    def _make_engine(self, config: Config) -> WorkerEngine:
        source, folder = self._where
        note = lambda sentence: print(f"paceline: {sentence}", file=sys.stderr, flush=True)  # noqa: E731
        alive = lambda: None  # noqa: E731
        return make_engine_of_worker(
            EngineSetup(config, self.model, source, self.neural, self._decode, 0, 1, folder, alive, note)
        )

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    @property
    def tuner(self) -> EngineTuner | None:
        return self._engine.tuner if self._engine else None

    def learn(self, elapsed: float) -> dict[str, float]:
        """The trainer has made an update; `elapsed` seconds have passed since the one before. Train the drafter for
        its share of that, and use what came of it if it is not worse -> metrics."""
        self.updates += 1
        if self.learning is None:
            return {}
        started = self._clock()
        self.learning.stats = TrainingStats()
        if self.versions.training_is_due(self.updates - 1):
            self._owed += self.config.spot.share * elapsed
            while self._owed > self._clock() - started and self.learning.step():
                pass
        merge = self.learning.trainer.publish
        metrics = self.versions.make(merge, self.learning.stats, self._first_accept_rate)
        self._first_accept_rate = None
        if metrics["drafter/published"] and self._engine:
            self._engine.drafter_accepted()
        spent = self._clock() - started
        self._owed = min(0.0, self._owed - spent)  # what was not used is lost: there was nothing to learn from
        return metrics | {"drafter/seconds": spent}

    def save(self, folder: Path, more: dict[str, Any]) -> None:
        """Write all that it has learned, and `more` beside it."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.learning and self.neural:
            save_drafter(self.neural, folder / DRAFTER)
            save_training(self.learning.trainer, folder / DRAFTER)
        state = {
            "updates": self.updates,
            "owed": self._owed,
            "version": self.versions.version,
            "backoff": self.versions.backoff.state(),
            "tuner": self.tuner.state() if self.tuner else self._tuned,
        }
        # Last, so that where it is, the rest is too.
        (folder / STATE).write_text(json.dumps(state | more) + "\n")

    def take_over(self, other: SideCar) -> None:
        """Go on where another one stands that followed the same model elsewhere in memory."""
        self.updates = other.updates
        self.versions = other.versions
        self._owed = other._owed
        self._tuned = other.tuner.state() if other.tuner else other._tuned
        if self.learning and other.learning and self.neural and other.neural:
            with torch.no_grad():
                for mine, theirs in zip(self.neural.parameters(), other.neural.parameters(), strict=True):
                    mine.copy_(theirs)
            self.learning.trainer.load(*other.learning.trainer.state())

    def restore(self, folder: Path, state: dict[str, Any]) -> None:
        """Go on from what was saved; the drafter's weights are those that it was made with."""
        try:
            self.updates = state["updates"]
            self._owed = state["owed"]
            self.versions = Versions(self.config.spot, state["version"], state["backoff"])
            self._tuned = state["tuner"]
        except KeyError as err:
            raise UserError(f"{folder / STATE} has no {err}; remove {folder} to begin with a new drafter") from err
        if self.learning:
            load_training(self.learning.trainer, folder / DRAFTER)


def read_state(folder: Path) -> dict[str, Any]:
    try:
        return read_object(folder / STATE)
    except UserError as err:
        raise UserError(f"{err}; remove {folder} to begin with a new drafter") from err
