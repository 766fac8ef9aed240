"""The engine: submit requests, step until none are left, take completions as they finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch

from paceline.draft.drafter import Drafter
from paceline.draft.neural import NeuralDrafter
from paceline.draft.strategy import NEURAL, Strategy, default_strategies
from paceline.draft.tuner import Prospect, Tuner
from paceline.errors import UserError
from paceline.model.decoder import Decoder
from paceline.rollout.drafting import NeuralDrafting
from paceline.rollout.features import FeatureRing
from paceline.rollout.graphs import GraphPool
from paceline.rollout.pages import PagePool, affordable_pages, default_page_size, page_bytes
from paceline.rollout.request import Completion, Request, Sequence
from paceline.rollout.rows import Rows
from paceline.rollout.runner import Drawn, Filled, Runner
from paceline.rollout.scheduler import Admission, Scheduler
from paceline.rollout.stats import EngineStats, Round
from paceline.rollout.stops import Decode, finish_reason, goes_on
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


class Engine:
    def __init__(
        self,
        model: Decoder,
        settings: EngineSettings | None = None,
        decode: Decode | None = None,
        drafters: Many[Drafter | NeuralDrafter] = (),
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
        neural = next((d for d in drafters if isinstance(d, NeuralDrafter)), None)
        self.drafters = {d.name: d for d in drafters if isinstance(d, Drafter)}
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
        self.rows = Rows(s.max_batch, most_pages, model.device)
        self.scheduler = Scheduler(self.pool, self.rows, s.max_batch, s.prefill_tokens)
        self.graphs = GraphPool(s.graph_bytes) if s.cuda_graphs and model.device.type == "cuda" else None
        self.runner = self._make_runner(neural)
        self.runner.meanwhile = self._meanwhile
        self._follow_every = 2 if model.device.type == "cuda" else 8
        self._unfollowed = 0
        self._timer = DraftTimer(model.device)
        self._ids: set[int] = set()
        self._started = time.perf_counter()
        self.record: Callable[[Round], None] | None = None
        """Called with every round, if set."""

    def _check_strategies(self, drafters: list[str]) -> None:
        for strategy in self.strategies:
            if not strategy.plain and strategy.drafter not in drafters:
                have = ", ".join(drafters) or "none"
                raise UserError(f"strategy {strategy} needs the drafter '{strategy.drafter}'; there is: {have}")

    def _make_runner(self, neural: NeuralDrafter | None) -> Runner:
        model = self.model
        if neural is None:
            return Runner(model, self.pool, self.rows, self.graphs)
        width = len(model.config.tap_layers) * model.config.hidden_size
        ring = FeatureRing(self.settings.max_batch, neural.shape.window, width, model.dtype, model.device)
        drafting = NeuralDrafting(neural, self.rows, ring, self.strategies)
        return Runner(model, self.pool, self.rows, self.graphs, ring, drafting)

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
        started = time.perf_counter()
        admission = self.scheduler.admit()
        if admission.sequences:
            first = len(self.scheduler.running) - len(admission.sequences)
            drawn = self._prefill(admission, first)
            done, _ = self._advance(first, drawn, fed=False)
            seconds = time.perf_counter() - started
            self.stats.prefill_s += seconds
            self._note(started, seconds, len(drawn.tokens), "prefill", len(drawn.tokens))
            return done
        batch = len(self.scheduler.running)
        strategy = self.choose(batch)
        captured, caught_up = self._captured, self.runner.catch_ups
        missed = self.runner.missed(batch) if strategy.drafter == NEURAL else 0
        drawn = self._plain() if strategy.plain else self._speculate(strategy)
        batch = len(drawn.held)  # reserving pages may have paused some
        done, written = self._advance(0, drawn, fed=True)
        seconds = time.perf_counter() - started
        accepted = None if strategy.plain else [c - 1 for c in drawn.held]
        # What makes a round take longer than the next one will: a captured graph, a drafter that catches up.
        new, made_up = self._captured > captured, self.runner.catch_ups > caught_up
        warm = not new and not made_up
        self.tuner.observe(batch, strategy, seconds, accepted, warm, missed if made_up and not new else 0)
        self._count(strategy, seconds, batch, written, accepted)
        self._note(started, seconds, batch, str(strategy), written)
        return done

    def _prospect(self) -> Prospect:
        count, rows = len(self.scheduler.running), self.rows
        if not count:
            return Prospect()
        left = (rows.ends[:count] - rows.context[:count]).mean() - 1  # the last token is on its way
        return Prospect(float(left), {NEURAL: self.runner.missed(count)})

    @property
    def _captured(self) -> int:
        return self.graphs.captured if self.graphs else 0

    def _count(self, strategy: Strategy, seconds: float, batch: int, written: int, accepted: list[int] | None) -> None:
        stats = self.stats
        stats.count(strategy, seconds, batch, written)
        if accepted is not None:
            stats.count_guesses(strategy, seconds, self._timer.seconds(strategy, seconds), accepted, written)
        stats.paused = self.scheduler.paused
        stats.peak_pages = max(stats.peak_pages, self.pool.usable - self.pool.free)
        stats.graph_bytes = self.graphs.memory_bytes if self.graphs else 0

    def _plain(self) -> Drawn:
        self.scheduler.reserve()
        running = self.scheduler.running
        return self.runner.decode(len(running), self._filters(running), batch=self.scheduler.changes)

    def _speculate(self, strategy: Strategy) -> Drawn:
        """Guess, check, keep what plain decoding would have written."""
        self.scheduler.reserve(strategy.places)
        running = self.scheduler.running
        self._timer.begin(strategy)
        if strategy.drafter in self.drafters:
            self.runner.hand_in(self.drafters[strategy.drafter].propose(running, strategy))
        else:
            self.runner.propose(len(running), strategy)
        self._timer.drafted()
        return self.runner.verify(len(running), self._filters(running), strategy)

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
    def _filters(sequences: list[Sequence]) -> bool:
        return any(s.request.sampling.filters for s in sequences)

    def _prefill(self, admission: Admission, first: int) -> Drawn:
        """Fill pages, hand each new sequence what its prompt has left, and draw its first token."""
        own: dict[int, Filled] = {}
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

    def _advance(self, first: int, drawn: Drawn, fed: bool) -> tuple[list[Completion], int]:
        """Append the drawn tokens to the rows from `first` on and take out those that are finished -> those, and how
        many tokens were appended.

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
        written = 0
        for row in range(last - 1, first - 1, -1):  # backwards, because removing a row moves the last one into it
            seq, held = running[row], drawn.held[row - first]
            tokens, logprobs = drawn.tokens[row - first][:held], drawn.logprobs[row - first]
            if goes_on(seq, tokens, self.max_length):
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
                    self.scheduler.remove(row)
                    self._ids.discard(seq.request.id)
                    ended.append(seq)
                    done.append(seq.complete(reason))
                    break
        if ended:
            for drafter in self.drafters.values():
                drafter.finish(ended)
            if self.pool.k.device.type == "cpu":
                self.scheduler.compact()
        return done[::-1], written

    def _note(self, started: float, seconds: float, batch: int, strategy: str, tokens: int) -> None:
        if self.record:
            self.record(Round(started - self._started, seconds, batch, strategy, tokens))

    @property
    def neural(self) -> NeuralDrafter | None:
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
        self.scheduler.pause_all()

    def clear(self) -> None:
        """Drop every request."""
        begun = [seq for seq in (*self.scheduler.running, *self.scheduler.waiting) if not seq.fresh]
        for drafter in self.drafters.values():
            drafter.finish(begun)
        self.scheduler.clear()
        self._ids.clear()
