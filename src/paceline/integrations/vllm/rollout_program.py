"""The program of a vLLM engine that rolls out for a trainer: requests and weights in, completions out. It ends with the
process that started it, however that ends."""

from __future__ import annotations

import dataclasses
import time
import traceback
from typing import Any

from paceline.errors import Sentence, UserError
from paceline.integrations.vllm.rollout_messages import (
    AbortRequests,
    AddRequests,
    Asleep,
    EngineFailed,
    EngineProgress,
    EngineRound,
    EngineStarted,
    FinishedRequest,
    GoToSleep,
    StartEngine,
    TakeWeights,
    WeightsTaken,
)
from paceline.integrations.vllm.versions import installed_version, names_of
from paceline.process.program import Parent, join_parent

TELL_S = 0.1  # between two words about how decoding goes
LOAD_S = 600.0  # that workers may take for new weights


class RolloutProgram:
    def __init__(self, parent: Parent):
        self.parent = parent
        start: StartEngine = parent.receive()
        began = time.monotonic()
        from paceline.integrations.vllm.plugin import register

        register()  # also where the environment does not list the plug-in
        # A CPU has the first of vLLM's model runners.
        otherwise = start.otherwise is not None and "first" not in names_of(installed_version())[0].raced
        self.engine = make_engine(start.otherwise if otherwise and start.otherwise else start.arguments)
        self.rounds = RoundMeter(self.engine)
        self._finished: list[FinishedRequest] = []
        self._told = time.monotonic()
        longest = self.engine.vllm_config.model_config.max_model_len
        parent.send(EngineStarted(longest, installed_version(), time.monotonic() - began, otherwise))

    def run(self) -> None:
        while True:
            busy = self.engine.has_unfinished_requests()
            if not busy:
                self._tell()
            message = self.parent.receive(block=not busy)
            while message is not None:
                self._hear(message)
                message = self.parent.receive(block=False)
            if self.engine.has_unfinished_requests():
                self._step()

    def _step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                self._finished.append(_finished(output))
        if self._finished or time.monotonic() - self._told > TELL_S:
            self._tell()

    def _tell(self) -> None:
        rounds = self.rounds.take()
        self._told = time.monotonic()
        if self._finished or rounds:
            self.parent.send(EngineProgress(self._finished, rounds, *self._tuner_seconds()))
            self._finished = []

    def _tuner_seconds(self) -> tuple[float, float]:
        core = getattr(self.engine.engine_core, "engine_core", None)
        tuning = getattr(getattr(core, "scheduler", None), "paceline", None)
        if tuning is None:
            return 0.0, 0.0
        return tuning.tuner.tuner.explored_s, tuning.tuner.tuner.total_s

    def _hear(self, message: Any) -> None:
        match message:
            case AddRequests(requests=requests):
                from vllm import SamplingParams
                from vllm.sampling_params import RequestOutputKind

                for request in requests:
                    sampling = SamplingParams(**request.sampling, output_kind=RequestOutputKind.FINAL_ONLY)
                    self.engine.add_request(request.id, {"prompt_token_ids": list(request.prompt)}, sampling)
                self.rounds.begin()
            case AbortRequests(ids=ids):
                self.engine.abort_request(ids)
            case GoToSleep():
                self._drain()
                began = time.monotonic()
                self.engine.sleep(level=1)
                self.parent.send(Asleep(time.monotonic() - began))
            case TakeWeights():
                self._take(message)

    def _drain(self) -> None:
        """A scheduler that runs ahead has a step in flight when the last request has ended."""
        core = getattr(self.engine.engine_core, "engine_core", None)
        while getattr(core, "batch_queue", None):
            self.engine.step()

    def _take(self, message: TakeWeights) -> None:
        self._drain()
        began = time.monotonic()
        error = None
        drafter_error = None
        try:
            asleep = self.engine.is_sleeping()
            if asleep:
                self.engine.wake_up(tags=["weights"])
            if message.policy is not None:
                self.engine.collective_rpc("paceline_take_policy", timeout=LOAD_S, args=(message.policy,))
            if asleep:
                self.engine.wake_up(tags=["kv_cache"])
            self.engine.reset_prefix_cache()  # of the policy before
            self._resume()
        except Exception as err:  # noqa: BLE001 (vLLM raises anything from a worker; the learner's process says it)
            traceback.print_exc()
            error = first_line(err)
        if error is None and message.drafter is not None:
            drafter_error = self._take_drafter(message.drafter)
        self.parent.send(WeightsTaken(error, time.monotonic() - began, drafter_error))

    def _resume(self) -> None:
        """A scheduler that was put to sleep is paused; not in all versions does waking part by part end that."""
        core = getattr(self.engine.engine_core, "engine_core", None)
        if core is not None and hasattr(core, "is_scheduler_paused") and core.is_scheduler_paused():
            core.resume_scheduler()

    def _take_drafter(self, folder: str) -> str | None:
        found = self.engine.collective_rpc("paceline_load_drafter", timeout=LOAD_S, args=(folder,))
        core = getattr(self.engine.engine_core, "engine_core", None)
        if core is not None and hasattr(core, "paceline_drafter_changed"):
            core.paceline_drafter_changed()
        return next((sentence for sentence in found if sentence), None)


class RoundMeter:
    """What each step of the engine did, from what its core hands over."""

    def __init__(self, engine: Any):
        self._rounds: list[EngineRound] = []
        self._began = time.time()
        self._running: set[str] = set()
        self._get = engine.engine_core.get_output
        engine.engine_core.get_output = self._measured

    def begin(self) -> None:
        """There are requests: if there were none, the next step begins now."""
        if not self._running:
            self._began = time.time()

    def _measured(self) -> Any:
        outputs = self._get()
        now = time.time()
        got = [(o.request_id, len(o.new_token_ids), o.finish_reason is not None) for o in outputs.outputs]
        new = [request for request, _, _ in got if request not in self._running]
        stats = getattr(outputs.scheduler_stats, "spec_decoding_stats", None)
        self._rounds.append(
            EngineRound(
                now,
                now - self._began,
                sum(count > 0 for _, count, _ in got),
                sum(count for _, count, _ in got),
                bool(new) or not got,
                stats.num_draft_tokens if stats else 0,
                stats.num_drafts if stats else 0,
                tuple(stats.num_accepted_tokens_per_pos) if stats else (),
            )
        )
        self._began = now
        self._running |= set(new)
        self._running -= {request for request, _, ended in got if ended}
        return outputs

    def take(self) -> list[EngineRound]:
        rounds = self._rounds
        self._rounds = []
        return rounds


def make_engine(arguments: dict[str, Any]) -> Any:
    from vllm import EngineArgs, LLMEngine

    unknown = sorted(set(arguments) - {one.name for one in dataclasses.fields(EngineArgs)})
    if unknown:
        raise UserError(f"rollout.vllm has '{unknown[0]}', which is no argument of vLLM {installed_version()}'s engine")
    return LLMEngine.from_engine_args(EngineArgs(**arguments))


def _finished(output: Any) -> FinishedRequest:
    (one,) = output.outputs
    tokens = list(one.token_ids)
    logprobs = [float(found[token].logprob) for token, found in zip(tokens, one.logprobs, strict=True)]
    return FinishedRequest(output.request_id, tokens, logprobs, one.finish_reason == "stop")


def first_line(err: Exception) -> str:
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return f"{type(err).__name__}: {lines[0]}" if lines else type(err).__name__


def main() -> None:
    parent = join_parent()
    try:
        RolloutProgram(parent).run()
    except Sentence as err:
        parent.send(EngineFailed(str(err)))
    except Exception as err:  # noqa: BLE001 (vLLM raises anything; its traceback is in the log, and the process ends)
        traceback.print_exc()
        parent.send(EngineFailed(first_line(err)))


if __name__ == "__main__":
    main()
