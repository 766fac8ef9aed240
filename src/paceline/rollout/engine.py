"""The engine: submit requests, step until none are left, take completions as they finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch

from paceline.core import Completion, Filters, Request, Sequence
from paceline.draft.base import BaseDrafter
from paceline.draft.crowd import FEW
from paceline.draft.eagle.drafting import EagleDrafting
from paceline.draft.eagle.features import FeatureRing
from paceline.draft.eagle.model import EagleModel
from paceline.draft.pace import rates
from paceline.draft.strategy import NEURAL, PLAIN, Strategy, default_strategies
from paceline.draft.tuner import Prospect, Tuner
from paceline.errors import UserError
from paceline.model.decoder import Decoder
from paceline.rollout.graphs import GraphPool
from paceline.rollout.in_flight import InFlightRound, SampledTokens
from paceline.rollout.pages import PagePool, affordable_pages, default_page_size, page_bytes
from paceline.rollout.rows import Rows
from paceline.rollout.runner import ModelRunner, PrefillResult
from paceline.rollout.scheduler import Admission, Scheduler
from paceline.rollout.stats import EngineStats, RoundRecord
from paceline.rollout.stops import Decode, continues, finish_reason
from paceline.rollout.timer import DraftTimer


@dataclass(frozen=True)
class EngineSettings:
    max_batch: int = 256
    """Most requests that decode at the same time."""
    max_length: int | None = None
    """Longest prompt and answer together; the model's context if not given."""
    page_size: int | None = None
    """Tokens per KV page; by default what suits the device."""
    pages: int | None = None
    """Pages in the pool; by default as many as the full batch can use, within `kv_bytes`."""
    kv_bytes: int | None = None
    prefill_tokens: int = 8192
    cuda_graphs: bool = True
    graph_bytes: int | None = None
    """Most memory for captured graphs; beyond it, what is new runs without."""
    explore: float = 0.02
    """Share of the time that may go to strategies that are not the best known."""
    overlap: bool | None = None
    """Whether a round may begin before the last one was read; by default on a GPU, which would wait otherwise."""


AHEAD = 4  # rounds for which pages are taken in advance, if there are enough, so that they need not be waited for
ON_DEVICE = (PLAIN.drafter, NEURAL)  # who needs nothing from the host


class RolloutEngine:
    def __init__(
        self,
        model: Decoder,
        settings: EngineSettings | None = None,
        decode: Decode | None = None,
        drafters: Many[BaseDrafter | EagleModel] = (),
        strategies: Many[Strategy] | None = None,
    ):
        """`decode` turns tokens into text; only stop texts need it. With `drafters` the engine guesses ahead where
        that pays, by the `strategies` given or a default set; what is written stays the same."""
        if model.device.type == "cuda" and model.dtype == torch.float64:
            raise UserError("float64 models run on a CPU only: set model.device=cpu, or another model.dtype")
        s = settings or EngineSettings()
        self.model, self.settings, self.stats = model, s, EngineStats()
        self.max_length = min(s.max_length or model.config.max_positions, model.config.max_positions)
        self._decode_text = decode
        neural = next((d for d in drafters if isinstance(d, EagleModel)), None)
        self.drafters = {d.name: d for d in drafters if isinstance(d, BaseDrafter)}
        names = [*self.drafters, *([NEURAL] if neural else [])]
        self.strategies = list(default_strategies(names) if strategies is None else strategies)
        self._check_strategies(names)
        self.tuner = Tuner(self.strategies, s.max_batch, s.explore, self._prospect)
        self.choose: Callable[[int], Strategy] = self.tuner.choose
        """Picks the strategy of a round from the number of running requests."""

        page_size = s.page_size or default_page_size(model.device, s.max_batch)
        most_pages = -(-self.max_length // page_size)
        wanted = s.max_batch * (most_pages + 1) + 1  # a full batch of longest requests
        size = page_bytes(model.config, page_size, model.dtype)
        pages = s.pages or affordable_pages(wanted, size, s.kv_bytes, model.device)
        self.pool = PagePool(model.config, pages, page_size, model.dtype, model.device)
        self._overlap = model.device.type == "cuda" if s.overlap is None else s.overlap
        self.rows = Rows(s.max_batch, most_pages, model.device, self._overlap)
        self.scheduler = Scheduler(self.pool, self.rows, s.max_batch, s.prefill_tokens)
        self.graphs = GraphPool(s.graph_bytes) if s.cuda_graphs and model.device.type == "cuda" else None
        self.runner = self._make_runner(neural)
        self._follow_every = 2 if model.device.type == "cuda" else 8
        self._unfollowed = 0
        self._timer = DraftTimer(model.device)
        self._ids: set[int] = set()
        self._started = self._landed = time.perf_counter()
        self._flying: InFlightRound | None = None
        self._chosen: Strategy | None = None  # for the next round
        self._leaving: set[int] = set()  # rows whose texts have ended, but which a round that flies still has
        self.record: Callable[[RoundRecord], None] | None = None
        """Called with every round, if set."""

    def _check_strategies(self, drafters: list[str]) -> None:
        for strategy in self.strategies:
            if not strategy.plain and strategy.drafter not in drafters:
                have = ", ".join(drafters) or "none"
                raise UserError(f"strategy {strategy} needs the drafter '{strategy.drafter}'; there is: {have}")

    def _make_runner(self, neural: EagleModel | None) -> ModelRunner:
        model = self.model
        if neural is None:
            return ModelRunner(model, self.pool, self.rows, self.graphs)
        width = len(model.config.tap_layers) * model.config.hidden_size
        ring = FeatureRing(self.settings.max_batch, neural.shape.window, width, model.dtype, model.device)
        drafting = EagleDrafting(neural, self.rows, ring, self.strategies)
        return ModelRunner(model, self.pool, self.rows, self.graphs, ring, drafting)

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._check(request)
            self._ids.add(request.id)
            self.scheduler.submit(request)

    def _check(self, request: Request) -> None:
        if request.id in self._ids:
            raise ValueError(f"request {request.id} is in the engine already; ids must be unique")
        if request.sampling.stop and self._decode_text is None:
            raise ValueError("stop texts need an engine that can decode: Engine(..., decode=tokenizer.decode)")
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

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Submit and yield completions in the order in which they finish."""
        self.submit(requests)
        while self.unfinished:
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Schedule, run, advance: a round for every running request, or the first token of newly admitted ones."""
        if not self.unfinished:
            return []
        if self._flying is None:
            started = time.perf_counter()
            admission = self.scheduler.admit()
            if admission.sequences:
                return self._admit(admission, started)
            self._flying = self._launch(self._choose())
        following = self._launch_ahead(self._flying)
        self._meanwhile()
        done = self._land(self._flying, following is not None)
        self._flying = following
        if not self.unfinished:
            self._ground()
        return done

    def _admit(self, admission: Admission, started: float) -> list[Completion]:
        first = len(self.scheduler.running) - len(admission.sequences)
        drawn = self._prefill(admission, first)
        done, _ = self._advance(first, drawn, fed=False)
        self._landed = time.perf_counter()
        seconds = self._landed - started
        self.stats.prefill_s += seconds
        self._note(started, seconds, len(drawn.tokens), "prefill", len(drawn.tokens))
        return done

    def _choose(self) -> Strategy:
        chosen, self._chosen = self._chosen or self.choose(len(self.scheduler.running)), None
        return chosen

    def _launch(self, strategy: Strategy) -> InFlightRound:
        """Begin a round with the rows that the host has."""
        started, captured, caught_up = time.perf_counter(), self._captured, self.runner.catch_ups
        exploring = self.tuner.exploring
        missed = self.runner.missed(len(self.scheduler.running)) if strategy.drafter == NEURAL else 0
        # Reserving pages may pause some.
        self.scheduler.reserve(strategy.places * (AHEAD if self._overlap else 1))
        running, timed = self.scheduler.running, False
        count, filters = len(running), self._filters(running)
        if strategy.plain:
            result = self.runner.decode(count, filters, batch=self.scheduler.changes)
        else:
            timed = self._timer.begin(strategy)
            if strategy.drafter in self.drafters:
                self.runner.hand_in(self.drafters[strategy.drafter].propose(running, strategy))
            else:
                self.runner.propose(count, strategy)
            self._timer.drafted()
            result = self.runner.verify(count, filters, strategy, upload=strategy.drafter in self.drafters)
        made_up = missed if self.runner.catch_ups > caught_up else 0
        return InFlightRound(strategy, result, started, self._captured > captured, made_up, timed, exploring)

    def _launch_ahead(self, flying: InFlightRound) -> InFlightRound | None:
        """Begin the next round before the one that flies was read, if the device knows all that it takes: the same
        texts go on, with guesses that it makes itself, and with room for both rounds. What a text that ends with the
        first of them writes in the second is dropped."""
        running = self.scheduler.running
        count = len(running)
        if not self._overlap or self._leaving or (self.scheduler.waiting and count < self.settings.max_batch):
            return None
        if flying.strategy.drafter not in ON_DEVICE:
            return None
        strategy = self._chosen = self._chosen or self.choose(count)
        if strategy.drafter != flying.strategy.drafter:
            return None
        new = flying.strategy.places + strategy.places
        if min(len(s.pages) * self.pool.page_size - len(s.tokens) for s in running) < new:
            return None
        self._chosen = None
        started, captured, exploring = time.perf_counter(), self._captured, self.tuner.exploring
        filters = self._filters(running)
        if strategy.plain:
            result = self.runner.decode(count, filters, batch=-1, upload=False)
        else:
            self.runner.propose_on(count, strategy)
            result = self.runner.verify(count, filters, strategy, upload=False)
        return InFlightRound(strategy, result, started, self._captured > captured, exploring=exploring)

    def _land(self, flight: InFlightRound, followed: bool) -> list[Completion]:
        """Read a round and take note of it; `followed` by one that has begun already with the same rows."""
        strategy, drawn = flight.strategy, flight.result.read()
        gone = set(self._leaving)
        if not strategy.plain:
            for seq, tokens in zip(self.scheduler.running, drawn.held, strict=True):
                seq.pace.add(tokens - 1, strategy.depth)
        if strategy.drafter == NEURAL:  # only now: while the device might read the rows, they must not change
            count = len(drawn.held)
            self.rows.drafted[:count] = self.rows.context[:count] + 1
        done, written = self._advance(0, drawn, fed=True, followed=followed)
        now = time.perf_counter()
        # A round that began before the last one was read has waited for it.
        seconds, self._landed = now - max(flight.started, self._landed), now
        held = [n for row, n in enumerate(drawn.held) if row not in gone] if gone else drawn.held
        if not held:  # all of them had ended
            return done
        accepted = None if strategy.plain else [n - 1 for n in held]
        # What makes a round take longer than the next one will: a captured graph, a drafter that catches up.
        warm = not flight.captured and not flight.made_up
        made_up = 0 if flight.captured else flight.made_up
        self.tuner.observe(len(drawn.held), strategy, seconds, accepted, warm, made_up, flight.exploring)
        self._count(flight, seconds, len(held), written, accepted)
        self._note(now - seconds, seconds, len(held), str(strategy), written)
        return done

    def _ground(self) -> None:
        """Forget the round that flies, if there is one, and let texts go that have ended."""
        self._flying = None
        for row in sorted(self._leaving, reverse=True):
            self.scheduler.remove(row)
        self._leaving.clear()

    def _prospect(self) -> Prospect:
        running, rows = self.scheduler.running, self.rows
        count = len(running)
        if not count:
            return Prospect()
        left = (rows.ends[:count] - rows.context[:count]).mean() - 1  # the last token is on its way
        held = rates([seq.pace for seq in running]) if count > FEW else None
        return Prospect(float(left), {NEURAL: self.runner.missed(count)}, held, more=bool(self.scheduler.waiting))

    @property
    def _captured(self) -> int:
        return self.graphs.captured if self.graphs else 0

    def _count(
        self, flight: InFlightRound, seconds: float, batch: int, written: int, accepted: list[int] | None
    ) -> None:
        stats, strategy = self.stats, flight.strategy
        stats.count(strategy, seconds, batch, written)
        if accepted is not None:
            drafting = self._timer.seconds(strategy, seconds, flight.timed)
            stats.count_guesses(strategy, seconds, drafting, accepted, written)
        stats.paused = self.scheduler.paused
        stats.peak_pages = max(stats.peak_pages, self.pool.usable - self.pool.free)
        stats.graph_bytes = self.graphs.memory_bytes if self.graphs else 0

    def _meanwhile(self) -> None:
        """While the device is busy: think about the next round, and let drafters take in what was written, which is
        cheaper for several rounds at once. A CPU is not busy meanwhile, so there it is done seldom."""
        self.tuner.think(len(self.scheduler.running))
        self._unfollowed += 1
        if self._unfollowed >= self._follow_every:
            self._unfollowed = 0
            for drafter in self.drafters.values():
                drafter.follow(self.scheduler.running)

    @staticmethod
    def _filters(sequences: list[Sequence]) -> Filters:
        return max((s.request.sampling.filters for s in sequences), default=Filters.NONE)

    def _prefill(self, admission: Admission, first: int) -> SampledTokens:
        """Fill pages, hand each new sequence what its prompt has left, and draw its first token."""
        own: dict[int, PrefillResult] = {}
        if admission.fills:
            for fill, filled in zip(admission.fills, self.runner.fill(admission.fills), strict=True):
                if isinstance(fill.owner, Sequence):
                    own[id(fill.owner)] = filled
                else:
                    fill.owner.filled = filled
        for page, (tokens, targets) in admission.copies.items():
            self.pool.copy(page, targets, tokens)
        pairs = enumerate(admission.sequences)
        left = [admission.prefixes[i].filled if i in admission.prefixes else own[id(seq)] for i, seq in pairs]
        self.scheduler.settle()
        for drafter in self.drafters.values():
            drafter.begin(admission.sequences)
        self.stats.prefill_tokens += sum(len(f.tokens) for f in admission.fills)
        self.stats.decoded_tokens += len(admission.sequences)
        return self.runner.draw(left, first, self._filters(admission.sequences))

    def _advance(
        self, first: int, drawn: SampledTokens, fed: bool, followed: bool = False
    ) -> tuple[list[Completion], int]:
        """Append the drawn tokens to the rows from `first` on and take out those that are finished -> those, and how
        many tokens were appended. If the round is `followed` by one with the same rows, they are taken out with that.

        A row's context is the number of tokens in the cache. A decode pass has fed the last token and the guesses that
        held; a prefill has just filled exactly the tokens that were there."""
        running, rows = self.scheduler.running, self.rows
        last = first + len(drawn.held)
        rows.token[first:last] = [tokens[n - 1] for tokens, n in zip(drawn.tokens, drawn.held, strict=True)]
        if fed:
            rows.context[first:last] += drawn.held
        rows.min_left[first:last] = np.maximum(rows.min_left[first:last] - drawn.held, 0)
        done: list[Completion] = []
        ended: list[Sequence] = []
        leaving: set[int] = set()
        written = 0
        for row in range(last - 1, first - 1, -1):  # backwards, because removing a row moves the last one into it
            if row in self._leaving:
                self._leaving.discard(row)
                self.scheduler.remove(row)
                continue
            seq, held = running[row], drawn.held[row - first]
            tokens, logprobs = drawn.tokens[row - first][:held], drawn.logprobs[row - first]
            if continues(seq, tokens, self.max_length):
                seq.tokens += tokens
                seq.logprobs += logprobs[:held]
                written += held
                continue
            for token, logprob in zip(tokens, logprobs, strict=False):
                seq.tokens.append(token)
                seq.logprobs.append(logprob)
                written += 1
                reason = finish_reason(seq, self.max_length, self._decode_text)
                if reason:  # what was guessed beyond the end is dropped with the row
                    if followed:
                        leaving.add(row)
                    else:
                        self.scheduler.remove(row)
                    self._ids.discard(seq.request.id)
                    ended.append(seq)
                    done.append(seq.complete(reason))
                    break
        self._leaving |= leaving
        if ended:
            self.tuner.ended(len(completion.tokens) for completion in done)
            for drafter in self.drafters.values():
                drafter.finish(ended)
            if self.pool.k.device.type == "cpu":
                self.scheduler.compact()
        return done[::-1], written

    def _note(self, started: float, seconds: float, batch: int, strategy: str, tokens: int) -> None:
        if self.record:
            self.record(RoundRecord(started - self._started, seconds, batch, strategy, tokens))

    @property
    def neural(self) -> EagleModel | None:
        return self.runner.neural.drafter if self.runner.neural else None

    def refresh(self) -> None:
        """The policy has learned: bring along what drafters copy from it."""
        if self.runner.neural:
            self.runner.neural.drafter.refresh()

    def release(self, count: int) -> list[int]:
        """Give up to `count` requests that have not begun, the last ones first -> their ids."""
        ids = [request.id for request in self.scheduler.release(count)]
        self._ids.difference_update(ids)
        return ids

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return sum(seq.fresh for seq in self.scheduler.waiting)

    def pause(self) -> None:
        """Send all running requests back to the queue; they go on identically with the next step."""
        self._ground()
        self.scheduler.pause_all()

    def clear(self) -> None:
        """Drop every request."""
        self._ground()
        begun = [seq for seq in (*self.scheduler.running, *self.scheduler.waiting) if not seq.fresh]
        for drafter in self.drafters.values():
            drafter.finish(begun)
        self.scheduler.clear()
        self._ids.clear()
