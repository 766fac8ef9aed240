"""From sampled tokens to completions: append them to their sequences, find out which sequences end, take those out.

A sequence that acts does not end with its turn: it leaves the batch, and is told what the turn has led to."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import numpy as np

from paceline.core import Completion, FinishReason, Observation, Turn
from paceline.draft.base import BaseDrafter
from paceline.rollout.in_flight import SampledTokens
from paceline.rollout.rows import Rows
from paceline.rollout.scheduler import Scheduler
from paceline.rollout.sequence import Sequence
from paceline.rollout.stops import Decode, continues, finish_reason

if TYPE_CHECKING:
    from paceline.rollout.verify_ahead import Accepted


class OutputProcessor:
    def __init__(
        self, scheduler: Scheduler, drafters: Mapping[str, BaseDrafter], max_length: int, decode: Decode | None
    ):
        """`max_length` bounds prompt and completion together; `decode` turns tokens into text, for stop strings."""
        self.scheduler = scheduler
        self.rows: Rows = scheduler.rows
        self.drafters = drafters
        self.max_length = max_length
        self.decode = decode
        self.ended_rows: set[int] = set()
        """Rows of sequences that are complete, or whose turn has ended, which a round in flight still computes."""
        self.turns: list[Turn] = []
        """That have ended and were not taken yet."""

    def append_accepted(self, row: int, accepted: Accepted) -> tuple[Completion | None, int]:
        """The tokens that were written ahead of a sequence that has just been admitted and were accepted -> its
        completion, if it ends with one of them, and how many were appended. It leaves the batch with `append_first`,
        which drops the token that it samples."""
        seq = self.scheduler.running[row]
        reason, appended = self._extend(seq, *accepted)
        self.scheduler.verified(row)
        if reason is None:
            return None, appended
        self.ended_rows.add(row)
        return self._end(seq, reason), appended

    def append_first(self, first: int, sampled: SampledTokens) -> list[Completion]:
        """The first token of each row from `first` on. Its context is what the prefill left in the KV cache."""
        return self._append(first, sampled, in_flight=False)[0]

    def append(self, sampled: SampledTokens, in_flight: bool) -> tuple[list[Completion], int]:
        """The tokens of a round for all rows -> completions, and how many tokens were appended. Complete sequences
        leave the batch; if the next round is `in_flight` with the same rows, they leave when that one has been read.

        A row's context is the number of tokens in the KV cache. The pass has put the last token there and the accepted
        draft tokens: as many as it returns."""
        self.rows.context[: len(sampled.num_tokens)] += sampled.num_tokens
        return self._append(0, sampled, in_flight)

    def _append(self, first: int, sampled: SampledTokens, in_flight: bool) -> tuple[list[Completion], int]:
        running = self.scheduler.running
        rows = self.rows
        num_tokens = sampled.num_tokens
        last = first + len(num_tokens)
        rows.token[first:last] = [tokens[n - 1] for tokens, n in zip(sampled.tokens, num_tokens, strict=True)]
        rows.min_left[first:last] = np.maximum(rows.min_left[first:last] - num_tokens, 0)
        done: list[Completion] = []
        ended = False
        ending_rows: set[int] = set()
        appended = 0
        for row in range(last - 1, first - 1, -1):  # backwards, because removing a row moves the last one into it
            if row in self.ended_rows:
                self.ended_rows.discard(row)
                self.scheduler.remove(row)
                continue
            seq = running[row]
            count = num_tokens[row - first]
            tokens = sampled.tokens[row - first][:count]
            logprobs = sampled.logprobs[row - first]
            if continues(seq, tokens, self.max_length):
                seq.tokens += tokens
                seq.logprobs += logprobs[:count]
                appended += count
                continue
            reason, extended = self._extend(seq, tokens, logprobs)
            appended += extended
            if reason:  # tokens beyond the end are dropped with the row
                completion = self._end(seq, reason)
                if in_flight:
                    ending_rows.add(row)
                else:
                    self.scheduler.remove(row)
                ended = True
                done += [completion] if completion else []
        self.ended_rows |= ending_rows
        if ended and self.scheduler.pool.k.device.type == "cpu":
            self.scheduler.compact()
        return done[::-1], appended

    def _end(self, seq: Sequence, reason: FinishReason) -> Completion | None:
        """The completion, unless only its turn has ended. Whoever calls this takes its row out of the batch."""
        if seq.request.acts:
            self.turns.append(seq.end_turn(reason))
            self.scheduler.suspend(seq)
            return None
        return self._complete(seq, reason)

    def _complete(self, seq: Sequence, reason: FinishReason) -> Completion:
        for drafter in self.drafters.values():
            drafter.finish([seq])
        return seq.complete(reason)

    def observe(self, observation: Observation) -> Completion | None:
        """What a turn has led to: the sequence goes on behind it. If it ends with the turn, its completion."""
        seq = self.scheduler.suspended[observation.request_id]
        assert observation.turn == seq.turn, "each turn is answered once"
        written = finish_reason(seq, self.max_length, self.decode)
        assert written is not None, "a turn has ended"
        if observation.done or written == "length":
            return self._complete(self.scheduler.drop(observation.request_id), written)
        new = len(observation.tokens)
        if seq.generated + new >= seq.request.sampling.max_tokens or len(seq.tokens) + new >= self.max_length:
            return self._complete(self.scheduler.drop(observation.request_id), "length")
        self.scheduler.resume(observation.request_id).observe(observation)
        return None

    def _extend(self, seq: Sequence, tokens: Many[int], logprobs: Many[float]) -> tuple[FinishReason | None, int]:
        """Append tokens up to the one that ends the sequence, if one does -> why it ended, and how many there were."""
        for count, (token, logprob) in enumerate(zip(tokens, logprobs, strict=False), 1):
            seq.tokens.append(token)
            seq.logprobs.append(logprob)
            reason = finish_reason(seq, self.max_length, self.decode)
            if reason:
                return reason, count
        return None, len(tokens)

    def remove_ended(self) -> None:
        """No round is in flight any more: let go of sequences that are complete."""
        for row in sorted(self.ended_rows, reverse=True):
            self.scheduler.remove(row)
        self.ended_rows.clear()
