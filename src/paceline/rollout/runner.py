"""Runs the model for the engine: prompts into pages, one token for every running request, and the race.

On CUDA a decode step is one graph replay: upload the rows, replay, read tokens and log-probabilities back in a single
copy. Graphs are captured on first use for a ladder of batch sizes; the optimizer updates weights in place, so they
stay valid across RL steps.
"""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from paceline.model.decoder import Decoder
from paceline.rollout.attention import DecodeAttention, PrefillAttention
from paceline.rollout.pages import PagePool
from paceline.rollout.rows import Rows, RowsView
from paceline.rollout.sampling import NoiseAhead, race
from paceline.rollout.scheduler import Fill

Drawn = tuple[list[int], list[float]]


def buckets(most: int) -> list[int]:
    """Batch sizes that get a graph: 1, 2, 3, 4, 6, 8, 12, … so that at most a third of a batch is padding."""
    ladder = {most, 1}
    size = 2
    while size < most:
        ladder |= {size, min(most, size * 3 // 2)}
        size *= 2
    return sorted(ladder)


class Runner:
    def __init__(self, model: Decoder, pool: PagePool, rows: Rows, graphs: bool):
        self.model, self.pool, self.rows = model, pool, rows
        self.graphs = GraphPool() if graphs and model.device.type == "cuda" else None
        self.ladder = buckets(len(rows.host))
        self._noise = NoiseAhead(model.config.vocab_size, model.dtype)
        self._attention: DecodeAttention | None = None
        self._batch = (-1, -1)

    def fill(self, fills: list[Fill]) -> Tensor:
        """Run whole sequences and leave their keys and values in their pages -> last hidden states [len(fills), D]."""
        device, size = self.model.device, self.pool.page_size
        lengths = [len(f.tokens) for f in fills]
        tokens = torch.tensor([t for f in fills for t in f.tokens], device=device)
        pages = torch.tensor([f.pages[i // size] for f in fills for i in range(len(f.tokens))], device=device)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
        attention = PrefillAttention(self.pool, lengths, self.pool.slots(pages, positions % size))
        hidden, _ = self.model(tokens, positions, attention)
        last = torch.tensor(lengths, device=device).cumsum(0) - 1
        return hidden[last]

    def draw(self, hidden: Tensor, first: int, filters: bool) -> Drawn:
        """Draw the next token of the rows from `first` on, given their last hidden states."""
        last = first + len(hidden)
        self.rows.upload(last)
        rows = self.rows.view(first, last)
        noise = NoiseAhead(self._noise.vocab, self.model.dtype).next(rows.sampling.keys, rows.context)
        return read(*race(self.model.logits(hidden), rows.sampling, noise, filters))

    def decode(self, count: int, filters: bool, batch: int) -> Drawn:
        """One more token for each of the first `count` rows, whose last token is not in the cache yet. `batch` is a
        number that stays the same while the rows do, but for the one token that each gained in the last step."""
        if self.graphs is None:
            self.rows.upload(count)
            return read(*self._decode(count, filters, batch))
        bucket = self.ladder[bisect_left(self.ladder, count)]
        self.rows.upload(bucket)
        tokens, logprobs = self.graphs.run((bucket, filters), lambda: self._decode(bucket, filters, -1))
        return read(tokens[:count], logprobs[:count])

    def _decode(self, count: int, filters: bool, batch: int) -> tuple[Tensor, Tensor]:
        rows = self.rows.view(0, count)
        attention = self._steady(count, rows, batch)
        hidden, _ = self.model(rows.tokens, rows.context, attention)
        noise = self._noise.next(rows.sampling.keys, rows.context + 1)
        return race(self.model.logits(hidden), rows.sampling, noise, filters)

    def _steady(self, count: int, rows: RowsView, batch: int) -> DecodeAttention:
        """What this step looks at. While the batch stays the same, the last step's view only moves on."""
        same = batch >= 0 and (count, batch) == self._batch
        if not same:
            self._noise.forget()
        self._batch = (count, batch)
        if not (same and self._attention and self._attention.advance()):
            self._attention = DecodeAttention(self.pool, rows.table, rows.context, self.model.config.heads)
        return self._attention


def read(tokens: Tensor, logprobs: Tensor) -> Drawn:
    """Bring a result to the host; from a GPU in one copy, with the floats' bits riding along as integers."""
    if tokens.is_cuda:
        both = torch.stack((tokens.int(), logprobs.float().view(torch.int32))).cpu()
        tokens, logprobs = both[0], both[1].view(torch.float32)
    return tokens.tolist(), logprobs.tolist()


class GraphPool:
    """Captured graphs by key, sharing one memory pool."""

    def __init__(self) -> None:
        self._graphs: dict[object, tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]] = {}
        self._memory = torch.cuda.graph_pool_handle()

    def run(self, key: object, work: object) -> tuple[Tensor, Tensor]:
        if key not in self._graphs:
            self._graphs[key] = self._capture(work)
        graph, output = self._graphs[key]
        graph.replay()
        return output

    def _capture(self, work: object) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]:
        assert callable(work)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # compiles kernels and warms up libraries, which must not happen inside a capture
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            output = work()
        return graph, output
