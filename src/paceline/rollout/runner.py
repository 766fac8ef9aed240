"""Runs the model for the engine: prompts into pages, one token for every running request or a tree of guesses, and the
race.

On CUDA each of these is one graph replay: upload the rows, replay, read tokens and log-probabilities back in a single
copy. Graphs are captured on first use for a ladder of batch sizes; the optimizer updates weights in place, so they stay
valid across RL steps. A graph that checks guesses does not care who made them.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core import Filters
from paceline.draft.base import Draft
from paceline.draft.eagle.drafting import EagleDrafting
from paceline.draft.eagle.features import FeatureRing
from paceline.draft.strategy import MAX_NODES, Strategy
from paceline.draft.tree import chain, tree, walk
from paceline.draft.tuner import sizes
from paceline.kernels.accept import pack_output
from paceline.kernels.move_kv import move_accepted_kv
from paceline.kernels.noise import noise_ahead, noise_dtype
from paceline.kernels.positions import tree_nodes
from paceline.model.decoder import Decoder
from paceline.rollout.attention import DecodeAttention, PrefillAttention
from paceline.rollout.graphs import GraphPool
from paceline.rollout.in_flight import PendingOutput, PinnedOutput, SampledTokens
from paceline.rollout.pages import PagePool
from paceline.rollout.rows import Rows, RowsView
from paceline.rollout.sampling import NoiseAhead, draw
from paceline.rollout.scheduler import Fill


class PrefillResult(NamedTuple):
    """What a text leaves: of its last token the state that the next one is drawn from and the features, and the
    drafter's last entries."""

    hidden: Tensor
    features: Tensor | None = None
    entries: Any = None
    length: int = 0


class ModelRunner:
    def __init__(
        self,
        model: Decoder,
        pool: PagePool,
        rows: Rows,
        graphs: GraphPool | None,
        ring: FeatureRing | None = None,
        neural: EagleDrafting | None = None,
    ):
        self.model, self.pool, self.rows, self.graphs = model, pool, rows, graphs
        self.ring, self.neural = ring, neural
        self.ladder = sizes(len(rows.host))
        self.catch_ups = 0
        """Passes in which the neural drafter made up for rounds that it had missed."""
        self._noise = NoiseAhead(model.config.vocab_size, model.dtype)
        self._attention: DecodeAttention | None = None
        self._batch = (-1, -1)
        self._ahead: Tensor | None = None
        # Guesses and their parents, where the checking pass finds them, and where the host lays out its own.
        self._guesses = torch.zeros(2, len(rows.host), MAX_NODES, dtype=torch.int32, device=model.device)
        self._outbox = torch.zeros_like(self._guesses, device="cpu", pin_memory=self._guesses.is_cuda)
        self._landing = PinnedOutput(len(rows.host)) if self._guesses.is_cuda else None

    def fill(self, fills: list[Fill]) -> list[PrefillResult]:
        """Run whole sequences and leave their keys and values in their pages."""
        device, size = self.model.device, self.pool.page_size
        lengths = [len(f.tokens) for f in fills]
        tokens = torch.tensor([t for f in fills for t in f.tokens], device=device)
        pages = torch.tensor([f.pages[i // size] for f in fills for i in range(len(f.tokens))], device=device)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
        attention = PrefillAttention(self.pool, lengths, self.pool.slots(pages, positions % size))
        hidden, features = self.model(tokens, positions, attention, taps=self.ring is not None)
        last = torch.tensor(lengths, device=device).cumsum(0) - 1
        if features is None:
            return [PrefillResult(row) for row in hidden[last]]
        assert self.neural is not None, "features are for a drafter"
        entries = self.neural.prefill(tokens, features, positions, lengths)
        return [PrefillResult(*parts) for parts in zip(hidden[last], features[last], entries, lengths, strict=True)]

    def draw(self, filled: list[PrefillResult], first: int, filters: Filters) -> SampledTokens:
        """Draw the next token of the rows from `first` on, given what their prompts left."""
        last = first + len(filled)
        self.rows.upload(last)
        rows = self.rows.view(first, last)
        noise = NoiseAhead(self._noise.vocab, self.model.dtype)
        logits = self.model.logits(torch.stack([f.hidden for f in filled]))
        tokens, logprobs = draw(
            logits, rows.sampling, rows.context, filters, lambda: noise.next(rows.sampling.keys, rows.context)
        )
        if self.ring is not None:
            features = torch.stack([f.features for f in filled if f.features is not None])
            self.ring.put(rows.slot, rows.context - 1, features[:, None], tokens[:, None])
        if self.neural is not None:
            for f, slots in _by_prompt(filled, self.rows.slot[first:last].tolist()):
                self.neural.cache.fill(torch.tensor(slots, device=tokens.device), f.entries, f.length)
        self._batch = (-1, -1)
        return self._result(self._drawn(tokens[:, None], logprobs[:, None]), len(filled)).read()

    def decode(self, count: int, filters: Filters, batch: int, upload: bool = True) -> PendingOutput:
        """One more token for each of the first `count` rows, whose last token is not in the cache yet. `batch` is a
        number that stays the same while the rows do, but for the one token that each gained in the last step. Without
        `upload` the device goes on with its own rows, which the last pass has moved on."""
        bucket = self._bucket(count)
        steady = -1 if self.rows.apart else batch
        work = lambda: self._decode(bucket, filters, steady)  # noqa: E731
        return self._result(self._run(("plain", bucket, filters), bucket, work, upload), count)

    def _decode(self, count: int, filters: Filters, batch: int) -> tuple[Tensor, ...]:
        rows = self.rows.view(0, count)
        attention = self._steady(count, rows, batch)
        hidden, features = self.model(rows.tokens, rows.context, attention, taps=self.ring is not None)
        noise = lambda: self._noise.next(rows.sampling.keys, rows.context + 1)  # noqa: E731
        tokens, logprobs = draw(self.model.logits(hidden), rows.sampling, rows.context, filters, noise, ahead=1)
        if self.ring is not None and features is not None:
            self.ring.put(rows.slot, rows.context, features[:, None], tokens[:, None])
        return self._landed(count, tokens[:, None], logprobs[:, None])

    def _steady(self, count: int, rows: RowsView, batch: int) -> DecodeAttention:
        """What this step looks at. While the batch stays the same, the last step's view only moves on."""
        same = batch >= 0 and (count, batch) == self._batch
        if not same:
            self._noise.forget()
        self._batch = (count, batch)
        if not (same and self._attention and self._attention.advance()):
            self._attention = DecodeAttention(self.pool, rows.table, rows.context, self.model.config.heads)
        return self._attention

    def missed(self, count: int) -> int:
        """Rows of the passes in which the neural drafter would make up for what it missed, before it can guess."""
        neural = self.neural
        if neural is None:
            return 0
        bucket, missing = self._bucket(count), min(neural.missing(count), neural.reach(count) - 1)
        most = neural.entries(bucket)
        passes = -(-max(0, missing - neural.step) // most)
        return bucket * (passes * most if self.graphs else min(missing, passes * most))

    def propose(self, count: int, strategy: Strategy) -> None:
        """Let the neural drafter guess for the first `count` rows. What it missed while it was off is made up first."""
        neural = self.neural
        assert neural is not None, "the engine offers only strategies whose drafter it has"
        neural.skip(count)
        bucket = self._bucket(count)
        while (missing := neural.missing(count)) > neural.step:
            # A graph has one size; without one, no more is made than is missing.
            new = neural.entries(bucket) if self.graphs else min(neural.entries(bucket), missing)
            self._run(("catch up", bucket), bucket, lambda new=new: neural.catch_up(bucket, new)[:1])
            self._wait()
            self.catch_ups += 1
            made = self.rows.drafted[:count] + new
            # The last entry comes with the guesses.
            self.rows.drafted[:count] = made.clip(max=self.rows.context[:count])
        self.propose_on(count, strategy, upload=True)

    def propose_on(self, count: int, strategy: Strategy, upload: bool = False) -> None:
        """Let it guess where it has missed nothing but the last round."""
        bucket = self._bucket(count)
        self._run(("draft", bucket, strategy), bucket, lambda: self._propose(bucket, strategy), upload)

    def _propose(self, bucket: int, strategy: Strategy) -> tuple[Tensor, ...]:
        assert self.neural is not None
        if not (strategy.chain and self.neural.races):
            self._ahead = self._noise_ahead(self.rows.view(0, bucket), strategy.depth)
        tokens, parents = self.neural.propose(bucket, strategy, self._ahead)
        self._guesses[0, :bucket, : strategy.nodes] = tokens
        self._guesses[1, :bucket, : strategy.nodes] = parents
        self.rows.have_drafted(bucket)
        return ()

    def hand_in(self, draft: Draft) -> None:
        """Take guesses that were made on the host."""
        count, nodes = draft.tokens.shape
        bucket = self._bucket(count)
        # The last round has been read, so nobody reads the outbox any more.
        box = self._outbox.view(-1)[: 2 * bucket * nodes].view(2, bucket, nodes)
        box[0, :count], box[1, :count] = torch.from_numpy(draft.tokens), torch.from_numpy(draft.parents)
        box[:, count:] = 0  # rows that pad a graph are trees too: what an earlier draft left may not be one
        self._guesses[:, :bucket, :nodes].copy_(box, non_blocking=True)

    def verify(self, count: int, filters: Filters, strategy: Strategy, upload: bool = True) -> PendingOutput:
        """Check the guesses of the first `count` rows: what plain decoding would have written, as far as they reach.
        `upload` as in `decode`; after `propose` the device has the rows already."""
        bucket = self._bucket(count)
        shape = (strategy.nodes, strategy.depth, strategy.chain)
        work = lambda: self._verify(bucket, filters, *shape)  # noqa: E731
        self._batch = (-1, -1)
        return self._result(self._run(("verify", bucket, filters, *shape), bucket, work, upload), count)

    def _verify(self, count: int, filters: Filters, nodes: int, depth: int, is_chain: bool) -> tuple[Tensor, ...]:
        rows, model = self.rows.view(0, count), self.model
        guesses, parents = self._guesses[0, :count, :nodes], self._guesses[1, :count, :nodes]
        shape = chain(count, nodes, model.device) if is_chain else tree(parents, depth)
        tokens, places = tree_nodes(rows.tokens, rows.context, guesses, shape.depth)
        attention = DecodeAttention(self.pool, rows.table, rows.context, model.config.heads, shape.bits)
        hidden, features = model(tokens, places, attention, taps=self.ring is not None)
        ahead, self._ahead = self._ahead, None
        noise = lambda: self._tree_noise(rows, shape.depth, depth, is_chain, ahead)  # noqa: E731
        logits = model.logits(hidden)
        winners, logprobs = draw(logits, rows.sampling, rows.context, filters, noise, shape.depth, ahead=1)
        winners, logprobs = winners.view(count, -1), logprobs.view(count, -1)
        held, way = walk(shape, guesses, parents, winners, attention.usable)
        if not is_chain:
            way = way[:, : depth + 1]
            self._settle(attention, way, held)
            winners, logprobs = winners.gather(1, way), logprobs.gather(1, way)
        if self.ring is not None and features is not None:
            features = features.view(count, nodes + 1, -1)
            self.ring.put(rows.slot, rows.context, features, winners, None if is_chain else way, held)
        return self._landed(count, winners, logprobs, held)

    def _tree_noise(self, rows: RowsView, level: Tensor, depth: int, is_chain: bool, ahead: Tensor | None) -> Tensor:
        """The noise [B * T, V] of each member's position, made once per level."""
        # What a draft has just raced with (`ahead`) need not be made again, but graphs hand nothing on to each other.
        noise = self._noise_ahead(rows, depth) if ahead is None or self.graphs is not None else ahead
        if not is_chain:
            noise = noise[torch.arange(len(level), device=level.device)[:, None], level]
        return noise.flatten(0, 1)

    def _noise_ahead(self, rows: RowsView, depth: int) -> Tensor:
        """The noise [B, depth + 1, V] of the next places."""
        dtype = noise_dtype(self.model.dtype)
        return noise_ahead(rows.sampling.keys, rows.context + 1, depth + 1, self.model.config.vocab_size, dtype)

    def _settle(self, attention: DecodeAttention, way: Tensor, held: Tensor) -> None:
        """Bring the keys and values of the guesses that hold to where plain decoding would have put them."""
        slots = attention.slots.view(*attention.tree.shape, -1)  # [B, T, kv_heads]
        k, v = (pool.view(pool.shape[0], -1, pool.shape[-1]) for pool in (self.pool.k, self.pool.v))
        move_accepted_kv(k, v, slots, way, held)

    def _bucket(self, count: int) -> int:
        return count if self.graphs is None else self.ladder[bisect_left(self.ladder, count)]

    def _wait(self) -> None:
        """Until the device has read the rows, which are about to change."""
        if self.model.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _run(self, key: object, bucket: int, work: Any, upload: bool = True) -> tuple[Tensor, ...]:
        if upload:
            self.rows.upload(bucket)  # catching up changes the rows in between
        return work() if self.graphs is None else self.graphs.run(key, work, self.rows.device[:bucket])

    def _landed(self, count: int, tokens: Tensor, logprobs: Tensor, held: Tensor | None = None) -> tuple[Tensor, ...]:
        """Move the device's rows on -> what a pass leaves for the host."""
        return self._drawn(tokens, logprobs, held, self.rows.move_on(count, tokens, logprobs, held))

    def _drawn(
        self, tokens: Tensor, logprobs: Tensor, held: Tensor | None = None, packed: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """What was drawn, as the host is told; on a GPU in one piece, which may be `packed` already."""
        if self._landing is not None:
            return (pack_output(tokens, logprobs, held) if packed is None else packed,)
        return tokens, logprobs, tokens.new_zeros(len(tokens)) if held is None else held

    def _result(self, parts: tuple[Tensor, ...], count: int) -> PendingOutput:
        if self._landing is not None:
            return self._landing.fetch(parts[0][:count])
        tokens, logprobs, held = (part[:count] for part in parts)
        return PendingOutput(tokens, logprobs, held)


def _by_prompt(filled: list[PrefillResult], slots: list[int]) -> list[tuple[PrefillResult, list[int]]]:
    """Answers to the same prompt share what it left: a copy for each on its own would take longer than the prompt."""
    shared: dict[int, tuple[PrefillResult, list[int]]] = {}
    for one, slot in zip(filled, slots, strict=True):
        shared.setdefault(id(one), (one, []))[1].append(slot)
    return list(shared.values())
