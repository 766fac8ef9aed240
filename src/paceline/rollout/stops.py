"""When a completion ends. A pure function of its tokens, asked after each one, so that it does not matter how many of
them a round returns."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core import FinishReason
from paceline.rollout.sequence import Sequence

Decode = Callable[[list[int]], str]


def finish_reason(seq: Sequence, longest: int, decode: Decode | None) -> FinishReason | None:
    """Why `seq` ends with its last token, or None if it goes on. `longest` bounds prompt and completion together."""
    s = seq.request.sampling
    if seq.generated >= s.min_tokens:
        if seq.tokens[-1] in s.stop_token_ids:
            return "stop"
        if s.stop and _has_stop_string(seq, decode):
            return "stop"
    if seq.generated >= s.max_tokens or len(seq.tokens) >= longest:
        return "length"
    return None


def continues(seq: Sequence, tokens: list[int], longest: int) -> bool:
    """Whether it is clear without looking at each that `seq` does not end with any of these tokens: true for most
    rounds."""
    s = seq.request.sampling
    length = len(seq.tokens) + len(tokens)
    if s.stop or length >= longest or length - len(seq.request.prompt) >= s.max_tokens:
        return False
    return s.stop_set.isdisjoint(tokens)


def _has_stop_string(seq: Sequence, decode: Decode | None) -> bool:
    assert decode is not None, "submit() refuses stop strings when the engine cannot decode"
    # A character takes at most four bytes and a token holds at least one, so this window covers any stop string
    # that the last token can complete.
    window = 4 * max(len(text) for text in seq.request.sampling.stop) + 4
    text = decode(seq.tokens[-min(window, seq.turn_length) :])  # of this turn: what was observed stops nothing
    return any(stop in text for stop in seq.request.sampling.stop)
