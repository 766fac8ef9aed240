"""What the engine tells the tuner of texts that guesses help and texts that they do not."""

from __future__ import annotations

import pytest

from paceline.draft.strategy import Strategy
from paceline.rollout import Engine, EngineSettings

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


def prospect_with(kind: type[Scripted], requests: int, rounds: int):
    asked = make_requests(requests, shortest=60, stops=())
    plain = {c.request.id: c for c in Engine(MODEL, EngineSettings()).run(asked)}
    drafter = kind("right", plain, MODEL.config.vocab_size, right=True)
    engine = Engine(MODEL, EngineSettings(max_batch=8), None, [drafter], [Strategy.parse("right:3")])
    engine.choose = lambda n: Strategy.parse("right:3")
    engine.submit(asked)
    for _ in range(1 + rounds):
        engine.step()
    assert engine.unfinished == requests
    return engine._prospect()


def test_slow_texts_among_fast_ones_are_seen():
    assert prospect_with(ForSome, 8, 5).evenness is None, "not yet"
    even, uneven = prospect_with(Scripted, 8, 12), prospect_with(ForSome, 8, 12)
    assert even.evenness == 1.0 and not even.more
    # A token of 3.25 on average; after twelve checks, which count as ten, four fourteenths are taken for chance.
    assert uneven.evenness == pytest.approx((10 / 3.25 + 4) / 14, abs=0.01)


def test_texts_that_wait_for_a_place_are_seen():
    assert prospect_with(Scripted, 9, 3).more
