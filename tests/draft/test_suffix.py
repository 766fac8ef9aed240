from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from paceline.draft.strategy import Strategy
from paceline.draft.suffix import SuffixDrafter
from paceline.rollout import Request


@dataclass
class Text:
    request: Request
    tokens: list[int] = field(default_factory=list)


def text(number: int, prompt: list[int], answer: list[int]) -> Text:
    return Text(Request(number, tuple(prompt)), prompt + answer)


SONG = [7, 3, 9, 4, 8, 2, 6, 5, 11, 13, 12, 10, 17, 15, 14]


def begin(drafter: SuffixDrafter, *texts: Text) -> None:
    drafter.begin(texts)


def test_goes_on_as_the_text_itself_did():
    drafter = SuffixDrafter(4, 256)
    t = text(1, [1, 2], SONG + SONG[:4])
    begin(drafter, t)
    draft = drafter.propose([t], Strategy.parse("suffix:6"))
    assert draft.tokens[0].tolist() == SONG[4:10] and draft.parents[0].tolist() == [0, 1, 2, 3, 4, 5]


def test_goes_on_as_siblings_and_earlier_answers_did_but_never_as_another_prompt():
    drafter = SuffixDrafter(4, 256)
    finished, running = text(1, [1, 2], SONG), text(2, [1, 2], [40, 41, 42, 43, 44])
    begin(drafter, finished, running)
    drafter.finish([finished])
    own, other = text(3, [1, 2], SONG[:5]), text(4, [1, 99], SONG[:5])
    sibling = text(5, [1, 2], [40, 41, 42])
    begin(drafter, own, other, sibling)
    draft = drafter.propose([own, other, sibling, running], Strategy.parse("suffix:3"))
    assert draft.tokens[0].tolist() == SONG[5:8]
    assert draft.tokens[1].tolist() == [-1, -1, -1]
    assert draft.tokens[3].tolist() == [-1, -1, -1]
    draft = drafter.propose([sibling], Strategy.parse("suffix:3"))
    assert draft.tokens[0].tolist() == [43, 44, -1]


def test_trees_hold_the_continuations_by_their_counts():
    drafter = SuffixDrafter(8, 256)
    past = [text(i, [1], [5, 6, 7, *end]) for i, end in enumerate([[20, 21], [20, 22], [30, 31]])]
    begin(drafter, *past)
    drafter.propose(past, Strategy.parse("suffix:2"))
    now = text(9, [1], [5, 6, 7])
    begin(drafter, now)
    draft = drafter.propose([now], Strategy.parse("suffix:2x3/5"))
    paths = set()
    for i, token in enumerate(draft.tokens[0].tolist()):
        if token >= 0:
            line, at = [token], int(draft.parents[0, i])
            while at:
                line.insert(0, int(draft.tokens[0, at - 1]))
                at = int(draft.parents[0, at - 1])
            paths.add(tuple(line))
    assert paths == {(20,), (20, 21), (20, 22), (30,), (30, 31)}
    assert draft.tokens[0, 0] == 20, "two of three go on with 20"


@pytest.mark.parametrize("budget", [2**16, 2**20])
def test_memory_is_bounded_and_old_answers_make_room(budget):
    drafter = SuffixDrafter(4, 128, budget)
    size = drafter.memory_bytes
    assert size <= 1.2 * budget + 4 * 8 * 128 * 4
    r = np.random.default_rng(0)
    for i in range(300):
        t = text(i, [1, 2], r.integers(3, 100, 60).tolist())
        begin(drafter, t)
        drafter.finish([t])
    assert drafter.memory_bytes == size
    latest = text(1000, [1, 2], t.tokens[2:20])
    begin(drafter, latest)
    assert drafter.propose([latest], Strategy.parse("suffix:4")).tokens[0].tolist() == t.tokens[20:24]
