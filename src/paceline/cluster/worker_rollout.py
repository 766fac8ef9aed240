"""A worker's part in rollouts: the engines that decode, and what the driver hears of them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from paceline.cluster.coordinator import Released
from paceline.cluster.messages import RolloutMode, RolloutOutcome, RolloutProgress, WorkerSpec
from paceline.cluster.rollout_log import RolloutLog
from paceline.model.tokenizer import load_tokenizer
from paceline.setup.engines import EngineSetup, make_engine_of_worker

if TYPE_CHECKING:
    from paceline.cluster.reporter import Reporter
    from paceline.config import Config
    from paceline.core import Completion, Observation, Request
    from paceline.draft.eagle.model import EagleModel
    from paceline.model.decoder import Decoder
    from paceline.model.foreign import ForeignModel
    from paceline.rollout.worker_engine import WorkerEngine
    from paceline.spot.trainer import TrainingStats


class WorkerRollout:
    def __init__(
        self,
        config: Config,
        spec: WorkerSpec,
        model: Decoder | ForeignModel,
        drafter: EagleModel | None,
        reporter: Reporter,
    ):
        self.config = config
        self.spec = spec
        self.model = model
        self.drafter = drafter
        self.reporter = reporter
        # Only stop strings need a tokenizer here, and it takes seconds to load.
        self._decode = load_tokenizer(spec.source).decode if config.rollout.stop else None
        self._engines: dict[str, WorkerEngine] = {}
        self.adaptive = self._engine("adaptive")
        self.engine = self.adaptive
        self.learned_from = True
        """Whether the present rollout is the one that drafters learn from."""
        self.log = self._new_log(step=0)

    def _engine(self, name: str) -> WorkerEngine:
        """Made when it is first asked for."""
        if name not in self._engines:
            config = self.config
            if name == "plain":
                plain = config.speculation.model_copy(update={"mode": "plain"})
                config = config.model_copy(update={"speculation": plain})
            spec = self.spec
            self._engines[name] = make_engine_of_worker(
                EngineSetup(
                    config,
                    self.model,
                    spec.source,
                    self.drafter,
                    self._decode,
                    spec.number,
                    spec.sharing,
                    spec.run,
                    self.reporter.still_alive,
                    self.reporter.note,
                )
            )
        return self._engines[name]

    def _new_log(self, step: int) -> RolloutLog:
        return RolloutLog(self.spec.number, step, self.engine, alone=self.spec.workers == 1)

    @property
    def unfinished(self) -> int:
        """Requests."""
        return self.engine.unfinished

    @property
    def runnable(self) -> int:
        """Requests that do not wait for an observation."""
        return self.engine.runnable

    def begin(self, step: int, mode: RolloutMode) -> bool:
        """A rollout begins -> whether it is the first one of its step."""
        first = step != self.log.step
        self.engine = self._engine(mode.engine)
        self.learned_from = mode.learn and self.engine is self.adaptive
        self.engine.clear()
        self.log = self._new_log(step)
        return first

    def assign(self, requests: Sequence[Request], written: Mapping[int, array[int]]) -> None:
        """`written` is what was written ahead of some."""
        if not self.engine.runnable:
            self.log.begin(None)
        self.engine.submit(requests, written)

    def release(self, count: int) -> None:
        """Give up to so many requests that have not begun."""
        released = tuple(self.engine.release(count))
        self.reporter.tell(Released(self.spec.number, self.spec.generation, released))
        if not self.engine.unfinished:
            self.log.begin("idle")

    def step(self) -> list[Completion]:
        """One round -> what it has finished."""
        return self.engine.step()

    def report(self, done: Sequence[Completion]) -> None:
        """Say how decoding goes, after a round."""
        turns = tuple(self.engine.take_turns())
        if done or turns or self.reporter.quiet:
            progress = RolloutProgress(
                self.spec.number, self.spec.generation, tuple(done), self.engine.waiting, self.log.tokens, turns
            )
            self.reporter.tell(progress)
        if not self.engine.runnable:
            self.log.begin("tools" if self.engine.unfinished else "idle")

    def observe(self, observations: Sequence[Observation]) -> list[Completion]:
        """What turns have led to -> completions that end with theirs."""
        if not self.engine.runnable:
            self.log.begin(None)
        done = [self.engine.observe(observation) for observation in observations]
        return [completion for completion in done if completion]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def end(self, training: TrainingStats, ahead: Mapping[int, array[int]]) -> RolloutOutcome:
        """`ahead` is what was written of the next step's requests."""
        outcome = self.log.end(training, ahead)
        self.engine.rest()
        self.engine = self.adaptive
        self.learned_from = True
        return outcome
