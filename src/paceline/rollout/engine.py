"""The engine: submit requests, step until none are left, take completions as they finish."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from paceline.errors import UserError
from paceline.model.decoder import Decoder
from paceline.rollout.pages import PagePool, page_bytes
from paceline.rollout.request import Completion, Request
from paceline.rollout.rows import Rows
from paceline.rollout.runner import Drawn, Runner
from paceline.rollout.scheduler import Admission, Scheduler, Sequence
from paceline.rollout.stops import Decode, finish_reason

CPU_KV_BYTES = 2 * 10**9
GPU_KV_SHARE = 0.5


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


@dataclass
class EngineStats:
    """Counted since the engine was made; the loop takes differences."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    prefill_tokens: int = 0
    decoded_tokens: int = 0
    decode_steps: int = 0
    paused: int = 0
    peak_batch: int = 0
    peak_pages: int = field(default=0)


class Engine:
    def __init__(self, model: Decoder, settings: EngineSettings | None = None, decode: Decode | None = None):
        """`decode` turns tokens into text; only stop texts need it."""
        s = settings or EngineSettings()
        self.model, self.settings, self.stats = model, s, EngineStats()
        self.max_length = min(s.max_length or model.config.max_positions, model.config.max_positions)
        self._decode_text = decode
        page_size = s.page_size or _page_size(model.device, s.max_batch)
        most_pages = -(-self.max_length // page_size)
        pages = s.pages or _pool_pages(model, s, page_size, most_pages)
        self.pool = PagePool(model.config, pages, page_size, model.dtype, model.device)
        self.rows = Rows(s.max_batch, most_pages, model.device)
        self.scheduler = Scheduler(self.pool, self.rows, s.max_batch, s.prefill_tokens)
        self.runner = Runner(model, self.pool, self.rows, s.cuda_graphs)
        self._ids: set[int] = set()

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
        """Schedule, run, advance: one token for every running request, or the first for newly admitted ones."""
        if not self.unfinished:
            return []
        started = time.perf_counter()
        admission = self.scheduler.admit()
        if admission.sequences:
            first = len(self.scheduler.running) - len(admission.sequences)
            drawn = self._prefill(admission, first)
            self.stats.prefill_s += time.perf_counter() - started
        else:
            first = 0
            self.scheduler.reserve()
            running = self.scheduler.running
            filters = any(s.request.sampling.filters for s in running)
            drawn = self.runner.decode(len(running), filters, batch=self.scheduler.changes)
            self.stats.decode_s += time.perf_counter() - started
            self.stats.decode_steps += 1
        self._count(admission)
        return self._advance(first, drawn, fed=not admission.sequences)

    def _prefill(self, admission: Admission, first: int) -> Drawn:
        """Fill pages, hand each new sequence the last hidden state of its prompt, and draw its first token."""
        own: dict[int, torch.Tensor] = {}
        if admission.fills:
            hidden = self.runner.fill(admission.fills)
            for fill, row in zip(admission.fills, hidden, strict=True):
                if isinstance(fill.owner, Sequence):
                    own[id(fill.owner)] = row
                else:
                    fill.owner.hidden = row
        for page, (tokens, targets) in admission.copies.items():
            self.pool.copy(page, targets, tokens)
        rows = []
        for i, seq in enumerate(admission.sequences):
            row = admission.prefixes[i].hidden if i in admission.prefixes else own[id(seq)]
            assert row is not None
            rows.append(row)
        self.scheduler.settle()
        filters = any(s.request.sampling.filters for s in admission.sequences)
        return self.runner.draw(torch.stack(rows), first, filters)

    def _advance(self, first: int, drawn: Drawn, fed: bool) -> list[Completion]:
        """Append the drawn tokens to the rows from `first` on and take out those that are finished.

        A row's context is the number of tokens in the cache. A decode pass has fed the last token, so it grew by one;
        a prefill has just filled exactly the tokens that were there."""
        tokens, logprobs = drawn
        running, rows = self.scheduler.running, self.rows
        last = first + len(tokens)
        rows.token[first:last] = tokens
        if fed:
            rows.context[first:last] += 1
        done: list[Completion] = []
        for row in range(last - 1, first - 1, -1):  # backwards, because removing a row moves the last one into it
            seq = running[row]
            seq.tokens.append(tokens[row - first])
            seq.logprobs.append(logprobs[row - first])
            reason = finish_reason(seq, self.max_length, self._decode_text)
            if reason:
                self.scheduler.remove(row)
                self._ids.discard(seq.request.id)
                done.append(seq.complete(reason))
            elif seq.request.sampling.min_tokens:
                rows.put_banned(row, seq)
        if done and self.pool.k.device.type == "cpu":
            self.scheduler.compact()
        return done[::-1]

    def _count(self, admission: Admission) -> None:
        stats = self.stats
        stats.prefill_tokens += sum(len(f.tokens) for f in admission.fills)
        stats.decoded_tokens += len(admission.sequences) or len(self.scheduler.running)
        stats.paused = self.scheduler.paused
        stats.peak_batch = max(stats.peak_batch, len(self.scheduler.running))
        stats.peak_pages = max(stats.peak_pages, self.pool.usable - self.pool.free)

    def pause(self) -> None:
        """Send all running requests back to the queue; they go on identically with the next step."""
        self.scheduler.pause_all()

    def clear(self) -> None:
        """Drop every request."""
        self.scheduler.clear()
        self._ids.clear()


def _page_size(device: torch.device, max_batch: int) -> int:
    """A GPU wastes less with small pages. A CPU looks at whole pages, as far into them as the longest request needs:
    one large page is best for a single request, but in a batch short ones would pay for long ones."""
    if device.type == "cuda":
        return 64
    return 256 if max_batch > 2 else 1024


def _pool_pages(model: Decoder, settings: EngineSettings, page_size: int, most_pages: int) -> int:
    """Enough pages for a full batch of longest requests, within what the machine can spare."""
    size = page_bytes(model.config, page_size, model.dtype)
    wanted = settings.max_batch * (most_pages + 1) + 1
    if settings.kv_bytes is not None:
        room = settings.kv_bytes
    elif model.device.type == "cuda":
        room = int(torch.cuda.mem_get_info(model.device)[0] * GPU_KV_SHARE)
    else:
        room = CPU_KV_BYTES
    pages = min(wanted, room // size)
    if pages < 2:
        raise UserError(
            f"{room / 1e9:.3g} GB for KV pages is less than two pages of {size / 1e6:.1f} MB each; "
            "raise rollout.kv_memory_gb"
        )
    return pages
