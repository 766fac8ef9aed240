"""Runs the model for the engine: prompts into pages, one token for every running request or a tree of draft tokens to
verify, and sampling.

On CUDA each of these is one graph replay: upload the rows, replay, read tokens and log-probabilities back in a single
copy. Graphs are captured for a ladder of batch sizes, when the engine is made or on first use; the optimizer updates
weights in place, so they stay valid across RL steps. A graph that verifies a draft does not care who made it.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.draft.base import BaseDrafter, DeviceDrafter, Draft, DraftSequence, PassShape, Work
from paceline.draft.confidence import Calibration, share_rows
from paceline.draft.ladder import batch_ladder, bucket
from paceline.draft.strategy import Strategy
from paceline.draft.tree import chain, tree, walk
from paceline.kernels.accept import pack_output
from paceline.kernels.move_kv import move_accepted_kv
from paceline.kernels.noise import noise_ahead, noise_dtype
from paceline.kernels.paged_attention import chain_tree
from paceline.kernels.positions import tree_nodes
from paceline.model.decoder import Decoder
from paceline.rollout.attention import DecodeAttention, SharedAttention, prefill_attention
from paceline.rollout.draft_buffer import DraftBuffer
from paceline.rollout.filters import Filters
from paceline.rollout.graphs import GraphPool
from paceline.rollout.in_flight import PendingOutput, PinnedOutput, SampledTokens
from paceline.rollout.pages import PagePool
from paceline.rollout.rows import Rows, RowsView
from paceline.rollout.sampling import NoiseAhead, draw
from paceline.rollout.scheduler import Fill
from paceline.rollout.shared_verify import verify_shared
from paceline.rollout.verify_ahead import NOTHING, Accepted, verify_ahead


class PassRows(NamedTuple):
    """The rows that a round runs over: those of the first sequences, whose last token is not in the KV cache yet."""

    sequences: int
    filters: Filters = Filters.NONE
    upload: bool = True
    """Whether the host's rows are uploaded first; otherwise the device goes on with its own, which the last pass has
    advanced."""
    version: int | None = None
    """A number that stays the same while the rows do, but for the token that each gained in the last pass."""


class PrefillResult(NamedTuple):
    """What a prompt leaves: the hidden state of its last token, what each drafter keeps of it, and which of the tokens
    that were written ahead of it were accepted: they count as a part of it."""

    hidden: Tensor
    kept: tuple[Any, ...]
    accepted: Accepted = NOTHING


class ModelRunner:
    def __init__(
        self,
        model: Decoder,
        pool: PagePool,
        rows: Rows,
        graphs: GraphPool | None,
        drafters: Many[DeviceDrafter] = (),
    ):
        self.model = model
        self.pool = pool
        self.rows = rows
        self.graphs = graphs
        self.drafters = tuple(drafters)
        self.ladder = batch_ladder(len(rows.host))
        self._taps = any(d.uses_features for d in drafters)
        self._noise = NoiseAhead(model.config.vocab_size, model.dtype)
        self._attention: DecodeAttention | None = None
        self._version: tuple[int, int] | None = None  # batch size and version of the rows of the last plain pass
        self._draft_noise: Tensor | None = None  # that the last draft was sampled with
        self._drafts = DraftBuffer(len(rows.host), model.device)
        self._calibration = Calibration(model.device)
        self._pinned = PinnedOutput(len(rows.host)) if model.device.type == "cuda" else None

    def shape(self, count: int) -> PassShape:
        """The shape of a pass over so many rows."""
        if self.graphs is None:
            return PassShape(count, count, False)
        return PassShape(count, bucket(self.ladder, count), True)

    # Prompts

    def prefill(self, fills: list[Fill], filters: Filters = Filters.NONE) -> list[PrefillResult]:
        """Run sequences, whole or behind what is in their pages, and leave their keys and values there; verify what was
        written ahead."""
        device = self.model.device
        lengths = [len(f.tokens) for f in fills]
        starts = [f.start for f in fills]
        tokens = torch.tensor([t for f in fills for t in f.tokens], device=device)
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]).to(device)
        attention = prefill_attention(self.pool, fills, positions)
        hidden, features = self.model(tokens, positions, attention, taps=self._taps)
        accepted = [NOTHING] * len(fills)
        if any(f.ahead for f in fills):
            accepted = self._verify_ahead(fills, hidden, filters)
            begun = [n - f.ahead + len(a.tokens) for n, f, a in zip(lengths, fills, accepted, strict=True)]
            index = torch.cat([torch.arange(n) < m for n, m in zip(lengths, begun, strict=True)]).nonzero()[:, 0]
            index = index.to(device)
            lengths = begun
            tokens = tokens[index]
            positions = positions[index]
            hidden = hidden[index]
            features = None if features is None else features[index]
        last = torch.tensor(lengths, device=device).cumsum(0) - 1
        kept = [d.prefill(tokens, features, positions, lengths, starts) for d in self.drafters]
        each = zip(*kept, strict=True) if kept else [()] * len(fills)
        return [PrefillResult(*parts) for parts in zip(hidden[last], each, accepted, strict=True)]

    def _verify_ahead(self, fills: list[Fill], hidden: Tensor, filters: Filters) -> list[Accepted]:
        last = max(f.row for f in fills) + 1
        self.rows.upload(last)
        return verify_ahead(self.model, fills, hidden, self.rows.view(0, last).sampling, filters)

    def sample_first(self, filled: list[PrefillResult], first: int, filters: Filters) -> SampledTokens:
        """Sample the first token of the rows from `first` on, given what their prompts left."""
        last = first + len(filled)
        self.rows.upload(last)
        rows = self.rows.view(first, last)
        noise = NoiseAhead(self._noise.vocab, self.model.dtype)
        logits = self.model.logits(torch.stack([f.hidden for f in filled]))
        tokens, logprobs = draw(
            logits, rows.sampling, rows.context, filters, lambda: noise.next(rows.sampling.keys, rows.context)
        )
        slots = self.rows.slot[first:last].tolist()
        for i, drafter in enumerate(self.drafters):
            drafter.take_prefill(rows, slots, [f.kept[i] for f in filled], tokens)
        self._version = None
        return self._fetch(self._pack(tokens[:, None], logprobs[:, None]), len(filled)).read()

    # Plain decoding

    def decode(self, rows: PassRows) -> PendingOutput:
        """One more token for each row."""
        batch = self.shape(rows.sequences).batch
        version = None if self.rows.apart else rows.version
        work = lambda: self._decode(batch, rows.filters, version)  # noqa: E731
        return self._fetch(self._run(("plain", batch, rows.filters), batch, work, rows.upload), rows.sequences)

    def _decode(self, batch: int, filters: Filters, version: int | None) -> tuple[Tensor, ...]:
        rows = self.rows.view(0, batch)
        attention = self._decode_attention(batch, rows, version)
        hidden, features = self.model(rows.tokens, rows.context, attention, taps=self._taps)
        noise = lambda: self._noise.next(rows.sampling.keys, rows.context + 1)  # noqa: E731
        tokens, logprobs = draw(self.model.logits(hidden), rows.sampling, rows.context, filters, noise, ahead=1)
        for drafter in self.drafters:
            drafter.on_pass(rows, None if features is None else features[:, None], tokens[:, None])
        return self._advance(batch, tokens[:, None], logprobs[:, None])

    def _decode_attention(self, batch: int, rows: RowsView, version: int | None) -> DecodeAttention:
        """While the rows stay the same, the attention of the last pass only moves on by a token."""
        same = version is not None and (batch, version) == self._version
        if not same:
            self._noise.forget()
        self._version = None if version is None else (batch, version)
        if not (same and self._attention and self._attention.advance()):
            self._attention = DecodeAttention(self.pool, rows.table, rows.context, self.model.config.heads)
        return self._attention

    # Drafting and verifying

    def propose(
        self, rows: PassRows, drafter: BaseDrafter, strategy: Strategy, sequences: Many[DraftSequence] = ()
    ) -> None:
        """Let a drafter propose for the rows, and leave the draft for `verify`. A drafter on the host gets the
        sequences of the rows."""
        shape = self.shape(rows.sequences)
        if not isinstance(drafter, DeviceDrafter):
            self._drafts.upload(drafter.propose(sequences, strategy), shape.batch)
            return
        if rows.upload:  # otherwise it took part in the last round, which left it nothing to catch up on
            for work in drafter.catch_up(shape):
                self._run(("catch up", drafter.name, shape.batch), shape.batch, work, upload=True)
                self._wait()
        work = lambda: self._propose(shape.batch, drafter, strategy)  # noqa: E731
        self._run(("draft", shape.batch, strategy), shape.batch, work, rows.upload)

    def propose_nothing(self, rows: PassRows, strategy: Strategy) -> None:
        """Leave an empty draft for `verify`."""
        draft = Draft.empty(rows.sequences, strategy.nodes)
        draft.parents[:] = 0
        self._drafts.upload(draft, self.shape(rows.sequences).batch)

    def _propose(self, batch: int, drafter: DeviceDrafter, strategy: Strategy) -> tuple[Tensor, ...]:
        def noise() -> Tensor:
            self._draft_noise = self._next_noise(self.rows.view(0, batch), strategy.depth)
            return self._draft_noise

        self._drafts.put(drafter.propose_on_device(batch, strategy, noise))
        return ()

    def verify(self, rows: PassRows, strategy: Strategy) -> PendingOutput:
        """Verify the draft of each row: what plain decoding would have sampled, as far as its accepted tokens reach."""
        batch = self.shape(rows.sequences).batch
        verify = self._verify_shared if strategy.shared else self._verify
        work = lambda: verify(batch, rows.filters, strategy)  # noqa: E731
        self._version = None
        key = ("verify", batch, rows.filters, strategy.nodes, strategy.depth, strategy.chain, strategy.shared)
        return self._fetch(self._run(key, batch, work, rows.upload), rows.sequences)

    def _verify(self, batch: int, filters: Filters, strategy: Strategy) -> tuple[Tensor, ...]:
        rows = self.rows.view(0, batch)
        model = self.model
        depth = strategy.depth
        drafted, parents = self._drafts.get(batch, strategy)
        shape = chain(batch, strategy.nodes, model.device) if strategy.chain else tree(parents, depth)
        tokens, positions = tree_nodes(rows.tokens, rows.context, drafted, shape.depth)
        attention = DecodeAttention(self.pool, rows.table, rows.context, model.config.heads, shape.bits)
        hidden, features = model(tokens, positions, attention, taps=self._taps)
        known, self._draft_noise = self._draft_noise, None
        noise = lambda: self._tree_noise(rows, shape.depth, strategy, known)  # noqa: E731
        logits = model.logits(hidden)
        sampled, logprobs = draw(logits, rows.sampling, rows.context, filters, noise, shape.depth, ahead=1)
        sampled, logprobs = sampled.view(batch, -1), logprobs.view(batch, -1)
        num_accepted, path = walk(shape, drafted, parents, sampled, attention.usable)
        if not strategy.chain:
            path = path[:, : depth + 1]
            self._move_accepted_kv(attention, path, num_accepted)
            sampled, logprobs = sampled.gather(1, path), logprobs.gather(1, path)
        if features is not None:
            features = features.view(batch, strategy.num_verified, -1)
        for drafter in self.drafters:
            drafter.on_pass(rows, features, sampled, None if strategy.chain else path, num_accepted)
        return self._advance(batch, sampled, logprobs, num_accepted)

    def _verify_shared(self, batch: int, filters: Filters, strategy: Strategy) -> tuple[Tensor, ...]:
        """Of all chains those draft tokens that are likeliest to be accepted."""
        rows = self.rows.view(0, batch)
        drafted, _ = self._drafts.get(batch, strategy)
        log_probs = self._drafts.log_probs(batch, strategy)
        present = rows.slot > 0
        shared = share_rows(self._calibration.log_rates(log_probs), present, strategy.shared * batch)
        known, self._draft_noise = self._draft_noise, None
        noise = lambda: self._noise_of_levels(rows, strategy, known)  # noqa: E731
        bits = chain_tree(batch, strategy.num_verified, self.model.device)
        attention = SharedAttention(self.pool, rows.table, rows.context, self.model.config.heads, bits, shared)
        out = verify_shared(self.model, rows, drafted, attention, filters, self._taps, noise)
        self._calibration.observe(log_probs, shared.chosen[:, 1:], out.num_accepted, present)
        for drafter in self.drafters:
            drafter.on_pass(rows, out.features, out.sampled, None, out.num_accepted)
        return self._advance(batch, out.sampled, out.logprobs, out.num_accepted)

    def _noise_of_levels(self, rows: RowsView, strategy: Strategy, known: Tensor | None) -> Tensor:
        """The noise [B, depth + 1, V] of the next positions."""
        # What a draft was just sampled with need not be made again, but graphs hand nothing on to each other.
        return self._next_noise(rows, strategy.depth) if known is None or self.graphs is not None else known

    def _tree_noise(self, rows: RowsView, level: Tensor, strategy: Strategy, known: Tensor | None) -> Tensor:
        """The noise [B * T, V] of each node's position, made once per level."""
        noise = self._noise_of_levels(rows, strategy, known)
        if not strategy.chain:
            noise = noise[torch.arange(len(level), device=level.device)[:, None], level]
        return noise.flatten(0, 1)

    def _next_noise(self, rows: RowsView, depth: int) -> Tensor:
        """The noise [B, depth + 1, V] of the next positions."""
        dtype = noise_dtype(self.model.dtype)
        return noise_ahead(rows.sampling.keys, rows.context + 1, depth + 1, self.model.config.vocab_size, dtype)

    def _move_accepted_kv(self, attention: DecodeAttention, path: Tensor, num_accepted: Tensor) -> None:
        """Move the keys and values of accepted draft tokens to where plain decoding would have put them."""
        slots = attention.slots.view(*attention.tree.shape, -1)  # [B, T, kv_heads]
        k, v = (pool.view(pool.shape[0], -1, pool.shape[-1]) for pool in (self.pool.k, self.pool.v))
        move_accepted_kv(k, v, slots, path, num_accepted)

    # Passes

    def _run(self, key: object, batch: int, work: Work, upload: bool) -> tuple[Tensor, ...]:
        if upload:
            self.rows.upload(batch)
        return work() if self.graphs is None else self.graphs.run(key, work, self.rows.device[:batch])

    def _wait(self) -> None:
        """Until the device has read the rows, which are about to change."""
        if self.model.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _advance(
        self, batch: int, tokens: Tensor, logprobs: Tensor, num_accepted: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Advance the device's rows -> what a pass leaves for the host."""
        return self._pack(tokens, logprobs, num_accepted, self.rows.advance(batch, tokens, logprobs, num_accepted))

    def _pack(
        self, tokens: Tensor, logprobs: Tensor, num_accepted: Tensor | None = None, packed: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """What was sampled, as it is copied to the host; on a GPU in one piece, which may be `packed` already."""
        if self._pinned is not None:
            return (pack_output(tokens, logprobs, num_accepted) if packed is None else packed,)
        return tokens, logprobs, tokens.new_zeros(len(tokens)) if num_accepted is None else num_accepted

    def _fetch(self, parts: tuple[Tensor, ...], count: int) -> PendingOutput:
        if self._pinned is not None:
            return self._pinned.fetch(parts[0][:count])
        tokens, logprobs, num_accepted = (part[:count] for part in parts)
        return PendingOutput(tokens, logprobs, num_accepted)
