"""The engine: submit requests, step until none are left, take completions as they finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Many

import torch

from paceline.core import Completion, Observation, Request, Turn
from paceline.draft.base import BaseDrafter, DeviceDrafter
from paceline.draft.registry import default_strategies
from paceline.draft.strategy import Strategy
from paceline.draft.tuner import Tuner
from paceline.errors import UserError
from paceline.model.decoder import Decoder
from paceline.rollout.admissions import Admissions
from paceline.rollout.capture import rounds_to_capture, run_empty_round
from paceline.rollout.graphs import GraphPool
from paceline.rollout.outputs import OutputProcessor
from paceline.rollout.pages import PagePool, affordable_pages, default_page_size, page_bytes, pages_for_batch
from paceline.rollout.recorder import Recorder
from paceline.rollout.rounds import Rounds
from paceline.rollout.rows import Rows
from paceline.rollout.runner import ModelRunner
from paceline.rollout.scheduler import Admission, Scheduler
from paceline.rollout.settings import EngineSettings
from paceline.rollout.stats import EngineStats, RoundRecord
from paceline.rollout.stops import Decode
from paceline.rollout.timer import DraftTimer


class RolloutEngine:
    def __init__(
        self,
        model: Decoder,
        settings: EngineSettings | None = None,
        decode: Decode | None = None,
        drafters: Many[BaseDrafter] = (),
        strategies: Many[Strategy] | None = None,
    ):
        """`decode` turns tokens into text; only stop strings need it. With `drafters` the engine speculates where that
        pays, by the `strategies` given or the drafters' own; the tokens stay the same."""
        if model.device.type == "cuda" and model.dtype == torch.float64:
            raise UserError("float64 models run on a CPU only: set model.device=cpu, or another model.dtype")
        s = settings or EngineSettings()
        cuda = model.device.type == "cuda"
        overlap = cuda if s.overlap is None else s.overlap
        self.model = model
        self.settings = s
        self.max_length = min(s.max_length or model.config.max_positions, model.config.max_positions)
        self.drafters = {d.name: d for d in drafters}
        self.strategies = list(default_strategies(self.drafters) if strategies is None else strategies)
        self._check_strategies()
        self.pool = self._make_pool()
        device_drafters = [d for d in drafters if isinstance(d, DeviceDrafter)]
        most_pages = self.pool.needed(self.max_length)
        rows = Rows(s.max_batch, most_pages, model.device, overlap, len(device_drafters))
        for index, drafter in enumerate(device_drafters):
            drafter.bind(rows, index, self.strategies)
        self.scheduler = Scheduler(self.pool, rows, s.max_batch, s.prefill_tokens)
        graphs = GraphPool(s.graph_bytes) if s.cuda_graphs and cuda else None
        self.runner = ModelRunner(model, self.pool, rows, graphs, device_drafters)
        self.recorder = Recorder(DraftTimer(model.device))
        self.outputs = OutputProcessor(self.scheduler, self.drafters, self.max_length, decode)
        self.admissions = Admissions(self.scheduler, self.runner, self.drafters, self.outputs, self.recorder)
        tuner = Tuner(self.strategies, s.max_batch, s.explore)
        self.rounds = Rounds(self.scheduler, self.runner, self.drafters, tuner, self.outputs, self.recorder, overlap)
        self._ids: set[int] = set()

    def _check_strategies(self) -> None:
        for strategy in self.strategies:
            if not strategy.plain and strategy.drafter not in self.drafters:
                have = ", ".join(self.drafters) or "none"
                raise UserError(f"strategy {strategy} needs the drafter '{strategy.drafter}'; there is: {have}")
            if strategy.shared and not self.drafters[strategy.drafter].has_confidence:
                raise UserError(
                    f"strategy {strategy} shares draft tokens by confidence, which the drafter '{strategy.drafter}' "
                    f"does not give: name {strategy.drafter}:{strategy.depth}"
                )

    def _make_pool(self) -> PagePool:
        s = self.settings
        model = self.model
        page_size = s.page_size or default_page_size(model.device, s.max_batch)
        wanted = pages_for_batch(s.max_batch, self.max_length, page_size)
        size = page_bytes(model.config, page_size, model.dtype)
        pages = s.pages or affordable_pages(wanted, size, s.kv_bytes, model.device)
        return PagePool(model.config, pages, page_size, model.dtype, model.device)

    # Its parts, as callers know them

    @property
    def rows(self) -> Rows:
        return self.scheduler.rows

    @property
    def tuner(self) -> Tuner:
        return self.rounds.tuner

    @property
    def stats(self) -> EngineStats:
        return self.recorder.stats

    @property
    def choose(self) -> Callable[[int], Strategy] | None:
        """Picks the strategy of a round from the number of running sequences; None leaves that to the tuner."""
        return self.rounds.choose

    @choose.setter
    def choose(self, choose: Callable[[int], Strategy] | None) -> None:
        self.rounds.choose = choose

    @property
    def record(self) -> Callable[[RoundRecord], None] | None:
        """Called with every round, if set."""
        return self.recorder.on_round

    @record.setter
    def record(self, record: Callable[[RoundRecord], None] | None) -> None:
        self.recorder.on_round = record

    # Requests in

    def submit(self, requests: Iterable[Request], ahead: Mapping[int, Many[int]] | None = None) -> None:
        """`ahead` has what was written ahead of some, by id: of that, what this policy would have written is kept. What
        goes beyond `prefill_tokens` is not verified."""
        for request in requests:
            self._check(request)
            self._ids.add(request.id)
            written = ahead.get(request.id, ()) if ahead else ()
            # The last token that there can be is sampled anyway; and a pass is no longer than is planned for.
            length = min(self.max_length - 1, self.settings.prefill_tokens) - len(request.prompt)
            self.scheduler.submit(request, written[: max(0, min(request.sampling.max_tokens - 1, length))])

    def _check(self, request: Request) -> None:
        if request.id in self._ids:
            raise ValueError(f"request {request.id} is in the engine already; ids must be unique")
        if request.sampling.stop and self.outputs.decode is None:
            raise ValueError("stop strings need an engine that can decode: Engine(..., decode=tokenizer.decode)")
        length = len(request.prompt)
        if length + 1 > self.max_length:
            raise UserError(
                f"the prompt of request {request.id} has {length} tokens, which leaves no room for an answer "
                f"in a context of {self.max_length}"
            )
        longest = min(length + request.sampling.max_tokens, self.max_length)
        if self.pool.needed(longest) > self.pool.usable:
            raise UserError(
                f"request {request.id} can grow to {longest} tokens, which needs {self.pool.needed(longest)} KV pages, "
                f"but there are {self.pool.usable}; raise rollout.kv_memory_gb or lower rollout.max_tokens"
            )

    @property
    def unfinished(self) -> int:
        return len(self._ids)

    @property
    def runnable(self) -> int:
        """Those of them that do not wait for an observation."""
        return len(self._ids) - len(self.scheduler.suspended)

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return sum(seq.fresh for seq in self.scheduler.waiting)

    # Completions out

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Submit and yield completions in the order in which they finish; of requests that act, none."""
        self.submit(requests)
        while self.runnable:
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Schedule, run, append: a round for every running sequence, or the first token of newly admitted ones."""
        if not self.runnable:
            return []
        started = time.perf_counter()
        admission = None if self.rounds.in_flight else self.scheduler.admit()
        done = self._admit(admission, started) if admission and admission.sequences else self.rounds.run()
        self._ids.difference_update(completion.request.id for completion in done)
        if not self.runnable:
            self.rounds.drain()
        return done

    # Turns, of requests that act: when one has ended, its request waits for what it has led to

    def take_turns(self) -> list[Turn]:
        """Turns that have ended since this was asked last."""
        turns = self.outputs.turns
        self.outputs.turns = []
        return turns

    def observe(self, observation: Observation) -> Completion | None:
        """Let a request go on behind what its turn has led to -> its completion, if it ends with the turn."""
        completion = self.outputs.observe(observation)
        if completion:
            self._ids.discard(completion.request.id)
        return completion

    def _admit(self, admission: Admission, started: float) -> list[Completion]:
        done, self.rounds.last_read = self.admissions.run(admission, started)
        return done

    # Between rollouts

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the CUDA graphs of rounds that may come, so that none has to wait for it. Before the first
        request."""
        assert not self.unfinished, "a captured pass runs over all rows"
        for batch, strategy in rounds_to_capture(self.runner.ladder, self.strategies):
            run_empty_round(self.runner, self.drafters, batch, strategy)

    def refresh(self) -> None:
        """The policy has been updated: renew what drafters copy from it."""
        for drafter in self.drafters.values():
            drafter.refresh()

    def rest(self) -> None:
        """Everything stays where the next rollout finds it."""

    def drafter_accepted(self) -> None:
        self.tuner.renew()

    def close(self) -> None:
        """It has nothing that runs elsewhere."""

    def release(self, count: int) -> list[int]:
        """Give up to `count` requests that have not begun, the last ones first -> their ids."""
        ids = [request.id for request in self.scheduler.release(count)]
        self._ids.difference_update(ids)
        return ids

    def pause(self) -> None:
        """Send all running requests back to the queue; they go on identically with the next step."""
        self.rounds.drain()
        self.scheduler.pause_all()

    def clear(self) -> None:
        """Drop every request."""
        self.rounds.drain()
        scheduler = self.scheduler
        begun = [s for s in (*scheduler.running, *scheduler.waiting, *scheduler.suspended.values()) if not s.fresh]
        self.outputs.turns.clear()
        for drafter in self.drafters.values():
            drafter.finish(begun)
        self.scheduler.clear()
        self._ids.clear()
