"""vLLM as the engine of a worker: it runs in a process of its own, and gets the policy's weights after each update.

Tokens are drawn by race (`same_tokens`), so they are a function of the policy, the request and its seed up to rounding,
which in vLLM depends on what else is in the batch. In vLLM's first model runner the noise is that of Paceline's engine.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.core import Completion, Observation, Request, Turn
from paceline.draft.strategy import PLAIN, Strategy
from paceline.errors import Sentence, UserError
from paceline.integrations.vllm.drafter_folder import DrafterFolder
from paceline.integrations.vllm.engine_process import Deadlines, EngineLost, EngineProcess
from paceline.integrations.vllm.rollout_messages import (
    AbortRequests,
    AddRequests,
    Asleep,
    EngineProgress,
    EngineRound,
    FinishedRequest,
    GoToSleep,
    NewRequest,
    StartEngine,
    TakeWeights,
    WeightsTaken,
)
from paceline.integrations.vllm.rollout_settings import (
    engine_arguments,
    environment,
    needs_race,
    sampling_of,
    without_speculation,
)
from paceline.integrations.vllm.versions import installed_version, names_of
from paceline.integrations.vllm.weights import shared_weights
from paceline.kernels.noise import request_key, seed_with_key
from paceline.model.checkpoint import layout
from paceline.model.foreign import ForeignModel, foreign_layout
from paceline.rollout.stats import EngineStats, RoundRecord
from paceline.rollout.worker_engine import WorkerEngine
from paceline.setup.engines import EngineSetup

STEP_S = 0.05  # that one call of `step` waits for news
AHEAD = 8  # a part of the slots: so many more requests wait within vLLM, so that none is empty for a while
LOG = "vllm.log"


class VllmTuner:
    """vLLM's scheduler has the tuner, which keeps its state in a file of its own."""

    def __init__(self) -> None:
        self.explored_s = 0.0
        self.total_s = 0.0

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """It was restored when the engine started."""

    def renew(self) -> None:
        """The engine does, when it takes the drafter."""


class VllmEngine:
    def __init__(self, setup: EngineSetup):
        self._setup = setup
        if setup.config.rollout.vllm_python is None:
            installed_version()  # without vLLM, one sentence, before anything is loaded
        self._drafters = EngineDrafters(setup)
        self._restarts = 0
        """In a row, without a completion in between."""
        self._process: EngineProcess | None = None
        self._has_weights = False
        """Whether it is awake, with the policy as it is now."""
        self.tuner = VllmTuner()
        self.stats = EngineStats()
        self.record: Callable[[RoundRecord], None] | None = None
        self._started = time.time()
        self._epoch = 0
        """Counts what was cleared: vLLM may still finish a request of before."""
        self._waiting: deque[Request] = deque()
        self._in_flight: dict[str, Request] = {}
        process = self._start()
        self.max_length = process.facts.max_length
        _, warning = names_of(process.facts.version)
        if warning:
            setup.note(warning)

    def _start(self) -> EngineProcess:
        setup = self._setup
        c = setup.config.cluster
        if setup.model.device.type == "cuda":
            torch.cuda.empty_cache()
        log = setup.run / LOG if setup.run else None
        deadlines = Deadlines(c.start_timeout_s, c.timeout_s)
        drafter = self._drafters.newest()
        arguments = engine_arguments(setup, drafter, self._drafters.tuner_state)
        plain = without_speculation(arguments) if drafter is not None and needs_race(setup) else None
        self._slots = int(arguments["max_num_seqs"])
        python = setup.config.rollout.vllm_python or sys.executable
        self._process = EngineProcess(
            StartEngine(arguments, plain), environment(setup), log, deadlines, python, setup.still_alive
        )
        if self._process.facts.otherwise:
            self._drafters.turn_off()
        self._has_weights = False
        return self._process

    @property
    def pid(self) -> int | None:
        """Of the guardian of the process that vLLM runs in; None while there is none."""
        return self._process.pid if self._process else None

    # Requests in

    def submit(self, requests: Iterable[Request], ahead: Mapping[int, Sequence[int]] | None = None) -> None:
        for request in requests:
            if len(request.prompt) + 1 > self.max_length:
                raise UserError(
                    f"the prompt of request {request.id} has {len(request.prompt)} tokens, which leaves no room for an "
                    f"answer in a context of {self.max_length}"
                )
            self._waiting.append(request)

    @property
    def unfinished(self) -> int:
        return len(self._waiting) + len(self._in_flight)

    @property
    def runnable(self) -> int:
        return self.unfinished

    def take_turns(self) -> list[Turn]:
        return []

    def observe(self, observation: Observation) -> Completion | None:
        raise AssertionError("requests that act are refused before (setup/conversations.py)")

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def release(self, count: int) -> list[int]:
        return [self._waiting.pop().id for _ in range(min(count, len(self._waiting)))]

    def clear(self) -> None:
        if self._in_flight and self._process is not None:
            self._process.send(AbortRequests(list(self._in_flight)))
        self._epoch += 1
        self._waiting.clear()
        self._in_flight.clear()

    # Completions out

    def step(self) -> list[Completion]:
        """Wait a little for what the engine finishes. One that was lost is started again; its requests begin anew."""
        if not self.unfinished:
            return []
        try:
            process = self._process or self._start()
            if not self._has_weights:
                self._give_weights(process)
            self._feed(process)
            done: list[Completion] = []
            for message in process.take(STEP_S, expected=True):
                if isinstance(message, EngineProgress):
                    done += self._progress(message)
            if done:
                self._restarts = 0
            return done
        except EngineLost as err:
            self._lose(str(err))
            return []

    def _feed(self, process: EngineProcess) -> None:
        new: list[NewRequest] = []
        while self._waiting and len(self._in_flight) < self._slots + self._slots // AHEAD:
            request = self._waiting.popleft()
            name = f"{self._epoch}:{request.id}"
            sampling = sampling_of(request, self.max_length)
            if request.sampling.temperature > 0:
                sampling["seed"] = seed_with_key(request_key(request.seed, request.id))
            new.append(NewRequest(name, request.prompt, sampling))
            if not self._in_flight:
                process.working()
            self._in_flight[name] = request
        if new:
            process.send(AddRequests(new))

    def _progress(self, message: EngineProgress) -> list[Completion]:
        self.tuner.explored_s = message.explored_s
        self.tuner.total_s = message.tuned_s
        for one in message.rounds:
            self._count(one)
        done = [(self._in_flight.pop(one.id), one) for one in message.finished if one.id in self._in_flight]
        return [completion(request, one) for request, one in done]

    def _count(self, one: EngineRound) -> None:
        depth = round(one.drafted / one.drafts) if one.drafts else 0
        strategy = Strategy("neural", depth, 1, depth) if depth else PLAIN
        if one.prompts:
            self.stats.prefill_s += one.seconds
            self.stats.decoded_tokens += one.tokens
            self.stats.peak_batch = max(self.stats.peak_batch, one.batch)
        else:
            self.stats.count(strategy, one.seconds, one.batch, one.tokens)
            if depth:
                self.stats.verify_s += one.seconds
                self.stats.drafted_sequences += one.drafts
                self.stats.drafted_tokens += one.tokens
                self.stats.draft_positions += one.drafted
                for position, count in enumerate(one.accepted, 1):
                    self.stats.accepted[position] += count
        if self.record is not None:
            label = "prefill" if one.prompts else str(strategy)
            at = one.end - one.seconds - self._started
            self.record(RoundRecord(at, one.seconds, one.batch, label, one.tokens))

    # Weights

    def refresh(self) -> None:
        self._has_weights = False
        self._drafters.policy_updated()

    def drafter_accepted(self) -> None:
        self._drafters.changed = True
        self._has_weights = False

    def _give_weights(self, process: EngineProcess) -> None:
        model = self._setup.model
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # what the learner has used belongs to the engine now
        tensors = foreign_layout(model) if isinstance(model, ForeignModel) else dict(layout(model))
        with shared_weights(tensors, self._setup.run) as weights:
            taken = process.ask(TakeWeights(weights, self._drafters.exchange()), WeightsTaken)
        if taken.error is not None:
            raise UserError(f"vLLM could not load the policy's new weights: {taken.error}")
        if taken.drafter_error is not None:
            self._setup.note(f"vLLM goes on with the drafter before: {taken.drafter_error}")
        self._has_weights = True

    def rest(self) -> None:
        """Where there is a GPU, it is the learner's now."""
        sleeps = self._setup.config.rollout.vllm.get("enable_sleep_mode", True)
        if self._setup.model.device.type != "cuda" or not sleeps or self._process is None:
            return
        try:
            self._process.ask(GoToSleep(), Asleep)
        except EngineLost as err:
            self._lose(str(err))
        self._has_weights = False

    # Its end

    def _lose(self, why: str) -> None:
        """The process is gone, or hangs: what it had begun is begun again by another one."""
        self._end()
        self._epoch += 1
        self._waiting.extendleft(reversed(self._in_flight.values()))
        self._in_flight.clear()
        limit = self._setup.config.cluster.restarts
        if self._restarts >= limit:
            raise UserError(f"the vLLM engine was lost {limit + 1} times in a row (cluster.restarts): {why}")
        self._restarts += 1
        self._setup.note(f"the vLLM engine was lost: {why}; it is started again, and its requests begin anew")

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()
        self._process = None
        self._has_weights = False

    def close(self) -> None:
        self._end()


class EngineDrafters:
    """The drafter on its way from the learner's process to vLLM, as versions in the run directory."""

    def __init__(self, setup: EngineSetup):
        self.changed = False
        self._drafter = setup.drafter
        self._note = setup.note
        self._version = 0
        self._folder: DrafterFolder | None = None
        self.tuner_state: Path | None = None
        """Where the tuner in vLLM keeps its state."""
        if self._drafter is not None:
            if setup.run is None:
                raise UserError("speculation in vLLM needs a run directory, where its drafter is kept")
            self._folder = DrafterFolder(setup.run / f"vllm-drafter-{setup.worker}")
            self.tuner_state = setup.run / f"vllm-tuner-{setup.worker}.json"

    def turn_off(self) -> None:
        """vLLM has started without speculation."""
        self._drafter = None
        self._note(
            "rollouts go without speculation: above temperature 0 this vLLM draws wrongly on a CPU while it "
            "speculates, and Paceline's race, which does not, was not tested in it"
        )

    def newest(self) -> Path | None:
        """The folder that an engine starts with."""
        if self._drafter is None or self._folder is None:
            return None
        self.changed = False
        out = self._folder.write(self._version, self._drafter)
        self._folder.keep = out  # what comes later is compared with it
        return out

    def policy_updated(self) -> None:
        """A head with some of the policy's rows has others now."""
        self.changed = self.changed or (self._drafter is not None and self._drafter.vocab is not None)

    def exchange(self) -> str | None:
        """The folder of a new version, if there is one. One that cannot be written is left out: it costs speed only."""
        if not self.changed or self._drafter is None or self._folder is None:
            return None
        self.changed = False
        self._version += 1
        try:
            return str(self._folder.write(self._version, self._drafter).resolve())
        except Sentence as err:
            self._note(f"vLLM goes on with the drafter before: {err}")
            return None


def completion(request: Request, one: FinishedRequest) -> Completion:
    return Completion(request, one.tokens, one.logprobs, "stop" if one.stopped else "length")


def make_worker_engine(setup: EngineSetup) -> WorkerEngine:
    return VllmEngine(setup)
