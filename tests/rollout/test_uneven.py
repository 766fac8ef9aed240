"""What the engine tells the tuner of texts that guesses help and texts that they do not."""

from __future__ import annotations

from paceline.draft.crowd import FEW
from paceline.draft.strategy import Strategy
from paceline.rollout import EngineSettings, RolloutEngine

from ..conftest import tiny_model
from .drafters import Scripted
from .test_engine import make_requests

MODEL = tiny_model("llama")


class ForSome(Scripted):
    """Right for some requests, wrong for the others."""

    def propose(self, texts, strategy):
        draft = super().propose(texts, strategy)
        for row, text in enumerate(texts):
            if text.request.id % 4 == 0:
                draft.tokens[row] = (draft.tokens[row] + 1) % self.vocab
        return draft


def prospect_with(kind: type[Scripted], requests: int, rounds: int, most: int = 40):
    asked = make_requests(requests, shortest=60, stops=())
    plain = {c.request.id: c for c in RolloutEngine(MODEL, EngineSettings()).run(asked)}
    drafter = kind("right", plain, MODEL.config.vocab_size, right=True)
    engine = RolloutEngine(MODEL, EngineSettings(max_batch=most), None, [drafter], [Strategy.parse("right:3")])
    engine.choose = lambda n: Strategy.parse("right:3")
    engine.submit(asked)
    for _ in range(1 + rounds):
        engine.step()
    assert engine.unfinished == requests
    return engine._prospect()


def test_slow_texts_among_fast_ones_are_seen():
    assert prospect_with(ForSome, 36, 5).rates is None, "not yet"
    even, uneven = prospect_with(Scripted, 36, 12), prospect_with(ForSome, 36, 12)
    assert even.rates == [1.0] * 36 and not even.more
    assert uneven.rates == [0.0] * 9 + [1.0] * 27, "one of four texts"


def test_few_texts_are_not_looked_at_one_by_one():
    assert prospect_with(ForSome, FEW, 12).rates is None


def test_texts_that_wait_for_a_place_are_seen():
    assert prospect_with(Scripted, 9, 3, most=8).more


def test_the_tuner_hears_of_texts_that_end():
    asked = make_requests(6, shortest=5, stops=())
    engine, told = RolloutEngine(MODEL, EngineSettings()), []
    engine.tuner.ended = told.extend
    done = list(engine.run(asked))
    assert sorted(told) == sorted(len(c.tokens) for c in done) and len(told) == 6
