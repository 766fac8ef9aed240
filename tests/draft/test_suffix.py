from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core import Request
from paceline.draft.base import Draft
from paceline.draft.strategy import Strategy
from paceline.draft.suffix.drafter import GRAMS, LATE, SuffixDrafter


@dataclass
class Running:
    request: Request
    tokens: list[int] = field(default_factory=list)


def sequence(number: int, prompt: list[int], answer: list[int]) -> Running:
    return Running(Request(number, tuple(prompt)), prompt + answer)


SONG = [7, 3, 9, 4, 8, 2, 6, 5, 11, 13, 12, 10, 17, 15, 14]


def begin(drafter: SuffixDrafter, *sequences: Running) -> None:
    drafter.begin(sequences)
    drafter.follow(sequences)


def chain(drafter: SuffixDrafter, sequence: Running, depth: int) -> list[int]:
    draft = drafter.propose([sequence], Strategy.parse(f"suffix:{depth}"))
    assert draft.parents[0].tolist() == list(range(depth))
    return draft.tokens[0].tolist()


def paths(draft: Draft, row: int) -> list[list[int]]:
    """The draft tokens that lead to each node, the node included."""
    out: list[list[int]] = []
    for i, (token, parent) in enumerate(zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True)):
        assert 0 <= parent <= i, "parents come first"
        out.append([*(out[parent - 1] if parent else []), token])
    return [path for path in out if path[-1] >= 0]


def test_earlier_turns_and_siblings_conversations_are_known():
    """Also what was observed in them. A sequence that comes back behind an observation has begun again."""
    drafter = SuffixDrafter(4, 256)
    told = [40, 41, 42, 43, 44, 45]
    first = sequence(1, [1, 2], [*SONG, 99, *told])  # a turn, and what it led to
    begin(drafter, first)
    first.tokens += SONG[:4]
    drafter.begin([first])
    assert chain(drafter, first, 6) == SONG[4:10]
    sibling = sequence(2, [1, 2], [50, 51, 99, *told[:3]])
    begin(drafter, sibling)
    assert chain(drafter, sibling, 3) == told[3:]


def test_goes_on_as_the_sequence_itself_did():
    drafter = SuffixDrafter(4, 256)
    t = sequence(1, [1, 2], SONG + SONG[:4])
    begin(drafter, t)
    draft = drafter.propose([t], Strategy.parse("suffix:6"))
    assert draft.tokens[0].tolist() == SONG[4:10] and draft.parents[0].tolist() == [0, 1, 2, 3, 4, 5]


def test_goes_on_as_siblings_and_earlier_answers_did_but_never_as_another_prompt():
    drafter = SuffixDrafter(4, 256)
    finished, running = sequence(1, [1, 2], SONG), sequence(2, [1, 2], [40, 41, 42, 43, 44])
    begin(drafter, finished, running)
    drafter.finish([finished])
    own, other = sequence(3, [1, 2], SONG[:5]), sequence(4, [1, 99], SONG[:5])
    sibling = sequence(5, [1, 2], [40, 41, 42])
    begin(drafter, own, other, sibling)
    draft = drafter.propose([own, other, sibling, running], Strategy.parse("suffix:3"))
    assert draft.tokens[0].tolist() == SONG[5:8]
    assert draft.tokens[1].tolist() == [-1, -1, -1]
    assert draft.tokens[3].tolist() == [-1, -1, -1]
    draft = drafter.propose([sibling], Strategy.parse("suffix:3"))
    assert draft.tokens[0].tolist() == [43, 44, -1]


def test_trees_hold_the_continuations_by_their_counts():
    drafter = SuffixDrafter(8, 256)
    past = [sequence(i, [1], [5, 6, 7, *end]) for i, end in enumerate([[20, 21], [20, 22], [30, 31]])]
    begin(drafter, *past)
    now = sequence(9, [1], [5, 6, 7])
    begin(drafter, now)
    draft = drafter.propose([now], Strategy.parse("suffix:2x3/5"))
    assert sorted(paths(draft, 0)) == [[20], [20, 21], [20, 22], [30], [30, 31]]
    assert draft.tokens[0, 0] == 20, "two of three go on with 20"


@pytest.mark.parametrize("budget", [2**16, 2**20])
def test_memory_is_bounded_and_old_answers_make_room(budget):
    drafter = SuffixDrafter(4, 128, budget)
    size = drafter.memory_bytes
    assert size <= 1.2 * budget + 4 * 8 * 128 * 4
    r = np.random.default_rng(0)
    for i in range(300):
        t = sequence(i, [1, 2], r.integers(3, 100, 60).tolist())
        begin(drafter, t)
        drafter.finish([t])
    assert drafter.memory_bytes == size
    latest = sequence(1000, [1, 2], t.tokens[2:20])
    begin(drafter, latest)
    assert drafter.propose([latest], Strategy.parse("suffix:4")).tokens[0].tolist() == t.tokens[20:24]


def test_a_round_late_is_early_enough():
    drafter = SuffixDrafter(4, 256)
    first, second = sequence(1, [1, 2], SONG), sequence(2, [1, 2], SONG[:2])
    begin(drafter, first, second)
    drafter.finish([first])
    for written in range(2, 10, 2):
        assert chain(drafter, second, 3) == SONG[written : written + 3]
        drafter.follow([second])  # while the next two tokens are on their way
        second.tokens += SONG[written : written + 2]
    second.tokens += [50, 51, 52, 53, 50, 51]
    assert chain(drafter, second, 3) == [-1] * 3, "not taken in yet"
    drafter.follow([second])
    assert chain(drafter, second, 2) == [52, 53]


def test_who_is_never_followed_is_taken_in_when_drafts_are_asked_for():
    drafter = SuffixDrafter(4, 256)
    t = sequence(1, [1, 2], [])
    drafter.begin([t])
    t.tokens += [*SONG, *SONG, *SONG[:4]]
    assert len(t.tokens) > LATE
    assert chain(drafter, t, 4) == SONG[4:8]
    drafter.finish([t])
    later = sequence(2, [1, 2], SONG[10:13])
    drafter.begin([later])
    assert chain(drafter, later, 4) == [*SONG[13:], *SONG[:2]]


def test_finish_takes_in_what_is_left():
    drafter = SuffixDrafter(4, 256)
    t = sequence(1, [1, 2], SONG[:3])
    begin(drafter, t)
    t.tokens += SONG[3:]
    drafter.finish([t])
    later = sequence(2, [1, 2], SONG[:9])
    begin(drafter, later)
    assert chain(drafter, later, 5) == SONG[9:14]


def test_the_majority_decides():
    drafter = SuffixDrafter(8, 256)
    ends = [[20, 21], [30, 31], [20, 21], [40]]
    begin(drafter, *(sequence(i, [1], [5, 6, 7, 8, *end]) for i, end in enumerate(ends)))
    now = sequence(9, [1], [5, 6, 7, 8])
    begin(drafter, now)
    assert chain(drafter, now, 3) == [20, 21, -1]


def test_a_text_that_repeats_itself_goes_on_doing_so():
    drafter = SuffixDrafter(4, 256)
    t = sequence(1, [1, 2], [7, 8, 9] * 3)
    begin(drafter, t)
    assert chain(drafter, t, 8) == [7, 8, 9, 7, 8, 9, 7, 8]


def test_comes_back_after_a_pause():
    drafter = SuffixDrafter(1, 64, 0)
    assert drafter.lines == 2
    t = sequence(1, [1, 2], SONG)
    for _ in range(5):
        begin(drafter, t)
    t.tokens += SONG[:4]
    assert chain(drafter, t, 4) == SONG[4:8]


def test_without_capacity_there_are_no_draft_tokens():
    drafter = SuffixDrafter(1, 32, 0)
    a, b, c = (sequence(i, [i + 1], [*SONG[:12], *SONG[:4]]) for i in range(3))
    begin(drafter, a, b, c)
    for strategy in ("suffix:3", "suffix:3x2/6"):
        draft = drafter.propose([a, b, c], Strategy.parse(strategy))
        assert draft.tokens[:, 0].tolist() == [SONG[4], SONG[4], -1] and (draft.tokens[2] == -1).all()
    a.tokens += range(200, 400)  # longer than any text may be
    drafter.follow([a, b])
    assert chain(drafter, a, 3) == [-1] * 3
    assert chain(drafter, b, 3) == SONG[4:7]
    drafter.finish([a, b, c])
    begin(drafter, c)
    assert chain(drafter, c, 3) == SONG[4:7]


def test_a_place_in_the_table_is_not_proof():
    prompts = [(1, i) for i in range(5000)]
    drafter = SuffixDrafter(4, 64, 0)
    start = hash(prompts[0]) % 1024
    other = next(p for p in prompts[1:] if hash(p) % 1024 == start)  # the smallest table has as many keys
    a, b = sequence(1, list(prompts[0]), SONG), sequence(2, list(other), SONG[:5])
    begin(drafter, a, b)
    assert chain(drafter, b, 3) == [-1] * 3


def test_what_is_overwritten_leaves_nothing_behind():
    drafter = SuffixDrafter(1, 64, 0)
    old, kept = sequence(1, [1], SONG), sequence(2, [2], [40, 41])
    begin(drafter, old, kept)
    drafter.finish([old])
    new = sequence(3, [2], [40, 41, 42])
    begin(drafter, new)
    assert chain(drafter, kept, 3) == [42, -1, -1]

    drafter = SuffixDrafter(1, 64, 0)
    old, kept = sequence(1, [1], SONG), sequence(2, [1], SONG)
    drafter.begin([old, kept])
    drafter.finish([kept])
    drafter.finish([old])
    new = sequence(3, [1], SONG[:5])  # takes the place of the one that was taken in last
    begin(drafter, new)
    assert chain(drafter, new, 3) == SONG[5:8]


def test_a_full_line_ends_where_it_ends():
    drafter = SuffixDrafter(2, 16, 0)
    full, next_to_it = sequence(1, [1], SONG), sequence(2, [1], [60, 61, 62, 63])
    begin(drafter, full, next_to_it)
    now = sequence(3, [1], SONG[:13])
    begin(drafter, now)
    assert chain(drafter, now, 12) == [*SONG[13:], *[-1] * 10]


steps = st.tuples(st.integers(0, 5), st.lists(st.integers(0, 4), max_size=24), st.sampled_from("gfne"))


@given(st.lists(steps, max_size=40), st.sampled_from(["suffix:1", "suffix:5", "suffix:4x3/9"]))
@settings(max_examples=200, deadline=None)
def test_draft_tokens_have_always_been_written_before(history, strategy):
    """Sequences grow, are followed or not, end, and are overwritten: what is proposed has followed the same token in an
    answer to the same prompt, or is the sequence's own repetition."""
    drafter = SuffixDrafter(3, 64, 0)
    size = drafter.memory_bytes
    written: dict[int, list[Running]] = {}  # by prompt
    running: dict[int, Running] = {}
    for number, (slot, tokens, then) in enumerate(history):
        if slot not in running:
            running[slot] = sequence(number, [slot % 2, 3], [])
            written.setdefault(slot % 2, []).append(running[slot])
            drafter.begin([running[slot]])
        running[slot].tokens += tokens[: 64 - len(running[slot].tokens)]
        if then == "f":
            drafter.follow(list(running.values()))
        elif then == "e":
            drafter.finish([running.pop(slot)])
        elif then == "g":
            draft = drafter.propose(list(running.values()), Strategy.parse(strategy))
            for row, (own, t) in enumerate(running.items()):
                for path in paths(draft, row):
                    assert any(_behind(t.tokens, path, other, other is t) for other in written[own % 2])
    assert drafter.memory_bytes == size


def _behind(tokens: list[int], path: list[int], other: Running, own: bool) -> bool:
    n = GRAMS[-1]
    history = other.tokens + path if own else other.tokens
    positions = range(n, len(other.tokens))
    return any(history[at - n : at] == tokens[-n:] and history[at : at + len(path)] == path for at in positions)
