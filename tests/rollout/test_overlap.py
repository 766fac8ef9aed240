"""A round that begins before the last one was read changes nothing, and nothing is left of it when sequences end, pause
or are dropped meanwhile. On a CPU passes are over at once, but the order of things is that of a GPU."""

from __future__ import annotations

import random

import pytest

from paceline.draft.eagle.drafter import EagleDrafter
from paceline.draft.eagle.model import DrafterShape, EagleModel
from paceline.draft.strategy import PLAIN, Strategy
from paceline.draft.suffix.drafter import SuffixDrafter
from paceline.rollout import EngineSettings, RolloutEngine

from ..conftest import tiny_model
from .test_engine import make_requests

MODEL = tiny_model().double()
STRATEGIES = [PLAIN, *(Strategy.parse(s) for s in ("neural:2", "neural:5", "neural:4x3/8", "suffix:3"))]


def make(overlap: bool | None, choose=None, **settings) -> RolloutEngine:
    settings = {"max_batch": 6} | settings
    drafter = EagleDrafter(EagleModel(MODEL, DrafterShape(64, 16)).init_weights(1))
    suffix = SuffixDrafter(settings["max_batch"], MODEL.config.max_positions)
    engine = RolloutEngine(MODEL, EngineSettings(overlap=overlap, **settings), None, [drafter, suffix], STRATEGIES)
    if choose is not None:
        engine.choose = choose
    return engine


class PretendedGraphs:
    """What a pool of graphs does, without a GPU: work that is new runs once to warm up, and then again."""

    memory_bytes = 0

    def __init__(self) -> None:
        self.known: set[object] = set()

    @property
    def captured(self) -> int:
        return len(self.known)

    def run(self, key, work, changed):
        if key not in self.known:
            self.known.add(key)
            before = changed.clone()
            work()
            changed.copy_(before)
        return work()


def at_random(seed: int, mostly: Strategy | None = None):
    dice = random.Random(seed)
    return lambda batch: mostly if mostly is not None and dice.random() < 0.8 else dice.choice(STRATEGIES)


def answers(engine: RolloutEngine, requests) -> dict[int, tuple]:
    return {c.request.id: (c.tokens, c.logprobs, c.finish_reason) for c in engine.run(requests)}


def same(got: dict[int, tuple], expected: dict[int, tuple]) -> None:
    assert got.keys() == expected.keys()
    for id, (tokens, logprobs, reason) in expected.items():
        assert got[id][0] == tokens and got[id][2] == reason
        assert got[id][1] == pytest.approx(logprobs, abs=1e-9)


def count_ahead(engine: RolloutEngine) -> list[str]:
    """The strategies of rounds that begin ahead."""
    seen: list[str] = []
    launch = engine.rounds.launch_ahead

    def counted(current):
        following = launch(current)
        if following is not None:
            seen.append(str(following.strategy))
        return following

    engine.rounds.launch_ahead = counted
    return seen


def is_clean(engine: RolloutEngine) -> None:
    """No round is in flight, and pages and slots are all back."""
    assert engine.rounds.in_flight is None and not engine.outputs.ended_rows and not engine.scheduler.running
    assert engine.pool.free == engine.pool.usable and len(engine.scheduler._slots) == engine.settings.max_batch


@pytest.mark.parametrize("mostly", [None, *STRATEGIES[:4]], ids=str)
@pytest.mark.parametrize(("seed", "graphs"), [(1, False), (2, False), (3, True)])
def test_every_token_is_the_same(mostly, seed, graphs):
    requests = make_requests(40, seed=seed, groups=9, shortest=20, longest=80, min_tokens=7)
    expected = answers(make(False, lambda batch: PLAIN), requests)
    engine = make(True, at_random(seed, mostly))
    if graphs:  # which come in a few sizes, so that some rows are nobody's
        engine.runner.graphs = PretendedGraphs()
    ahead = count_ahead(engine)
    same(answers(engine, requests), expected)
    is_clean(engine)
    assert len(ahead) > (5 if mostly is None else 20), "or nothing was tested"
    assert not any(name.startswith("suffix") for name in ahead), "the host drafts those"


def test_the_tuner_is_in_charge():
    requests = make_requests(30, groups=6, shortest=60, longest=90, stops=())
    engine = make(True)
    ahead = count_ahead(engine)
    same(answers(engine, requests), answers(make(False), requests))
    is_clean(engine)
    assert ahead


def test_few_pages():
    """Rounds ahead take no page that another one needs."""
    requests = make_requests(24, shortest=40, longest=90, stops=())
    expected = answers(make(False, lambda batch: PLAIN), requests)
    for pages in (14, 20, 30):
        engine = make(True, at_random(pages, STRATEGIES[2]), pages=pages, page_size=16)
        same(answers(engine, requests), expected)
        is_clean(engine)


@pytest.mark.parametrize("strategy", STRATEGIES[:4], ids=str)
def test_paused_in_mid_flight(strategy):
    requests = make_requests(12, shortest=30, longest=70)
    expected = answers(make(False, lambda batch: PLAIN), requests)
    engine, dice, done = make(True, lambda batch: strategy), random.Random(5), {}
    engine.submit(requests)
    flew = 0
    while engine.unfinished:
        for c in engine.step():
            done[c.request.id] = (c.tokens, c.logprobs, c.finish_reason)
        if dice.random() < 0.15:
            flew += engine.rounds.in_flight is not None
            engine.pause()
            assert engine.rounds.in_flight is None and not engine.scheduler.running
    same(done, expected)
    is_clean(engine)
    assert flew > 3


def test_dropped_in_mid_flight_and_used_again():
    engine = make(True, at_random(3, STRATEGIES[2]))
    engine.submit(make_requests(12, seed=9, shortest=40))
    for _ in range(9):
        engine.step()
    assert engine.rounds.in_flight is not None
    engine.clear()
    is_clean(engine)
    requests = make_requests(12, seed=4)
    same(answers(engine, requests), answers(make(False, lambda batch: PLAIN), requests))


def test_new_requests_do_not_wait_for_long():
    """While there is room for one that waits, no round begins ahead."""
    engine = make(True, lambda batch: STRATEGIES[1])
    first, *others = make_requests(4, shortest=60, stops=())
    engine.submit([first])
    for _ in range(6):
        engine.step()
    assert engine.rounds.in_flight is not None
    engine.submit(others)
    for _ in range(3):
        engine.step()
    assert len(engine.scheduler.running) == 4


def test_what_is_counted_is_what_was_written():
    requests = make_requests(20, longest=70)
    engine = make(True, at_random(7, STRATEGIES[1]))
    rounds = []
    engine.record = rounds.append
    done = answers(engine, requests)
    written = sum(len(tokens) for tokens, *_ in done.values())
    assert sum(r.tokens for r in rounds) == written == engine.stats.decoded_tokens
    assert all(r.seconds > 0 for r in rounds)
    ends = [r.at + r.seconds for r in rounds]
    assert all(later.at >= end - 1e-6 for later, end in zip(rounds[1:], ends, strict=False)), "rounds do not overlap"
