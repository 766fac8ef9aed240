"""Beside somebody else's trainer: answers in order, a drafter that learns for its share of the time and no longer."""

from __future__ import annotations

import itertools

import pytest
import torch

from paceline.config import Config
from paceline.core import Request, SamplingParams
from paceline.draft.eagle.model import new_drafter
from paceline.errors import UserError
from paceline.integrations.sidecar import STATE, SideCar, read_state
from tests.conftest import tiny_model

TICK = 1 / 16


def make(share: float = 0.5) -> SideCar:
    """On a clock of its own, which moves only when it is looked at: a turn of training takes a tick."""
    model = tiny_model(seed=0, dtype=torch.float32)
    ticks = itertools.count()
    spot = {"share": share, "merge_share": 1.0, "step_ms": 5.0}
    config = Config.model_validate({"rollout": {"prompts": 16, "samples": 1}, "spot": spot})
    return SideCar(model, config, None, new_drafter(model, 32, 0), clock=lambda: next(ticks) * TICK)


def requests(first: int = 0, tokens: int = 40) -> list[Request]:
    sampling = SamplingParams(max_tokens=tokens)
    return [Request(first + i, tuple(range(2, 10 + i % 4)), sampling, 7) for i in range(16)]


def test_answers_come_in_order_and_prompts_are_computed_once():
    done, stats = make().answer(requests())
    assert [c.request.id for c in done] == list(range(16))
    assert stats.prefill_tokens == 8 + 9 + 10 + 11


def test_longer_texts_get_more_room_and_the_same_answers():
    companion = make(share=0.0001)
    first, _ = companion.answer(requests())
    rounds = companion.tuner.round
    engine = companion._engine
    long = Request(99, tuple(i % 100 + 2 for i in range(400)), SamplingParams(max_tokens=200), 7)
    companion.answer([long])
    assert companion._engine is not engine and companion.tuner.round > rounds
    again, _ = companion.answer(requests())
    assert [c.tokens for c in again] == [c.tokens for c in first]


def test_training_takes_its_share_and_pays_back_what_it_overdrew():
    companion = make(share=0.5)
    spent, passed = 0.0, 0.0
    for step in range(6):
        companion.answer(requests(16 * step))
        spent += companion.learn(elapsed=0.6)["drafter/seconds"]
        passed += 0.6
    assert 0.5 * passed - 4 * TICK <= spent <= 0.5 * passed + 4 * TICK


def test_the_drafter_becomes_better_and_is_used():
    companion = make(share=1.0)
    before = [p.clone() for p in companion.neural.parameters()]
    seen = []
    for step in range(2):
        companion.answer(requests(16 * step))
        seen.append(companion.learn(elapsed=20 * TICK))
    assert seen[-1]["drafter/version"] > 0
    assert any(not torch.equal(a, b) for a, b in zip(before, companion.neural.parameters(), strict=True))
    judged = [row for row in seen if row["drafter/published"]]
    assert any(row["drafter/expected_accept_after"] > row["drafter/expected_accept_before"] for row in judged)


def test_evaluation_teaches_nothing():
    companion = make()
    companion.answer(requests(), learn=False)
    assert companion.learn(elapsed=10.0)["drafter/steps"] == 0


def test_no_drafter_no_training():
    model = tiny_model(dtype=torch.float32)
    companion = SideCar(model, Config())
    done, _ = companion.answer(requests())
    assert len(done) == 16 and companion.learn(elapsed=10.0) == {}


def test_a_rollout_that_fails_leaves_nothing_behind():
    companion = make()
    companion.answer(requests())
    with pytest.raises(UserError, match="no room for an answer"):
        companion.answer([*requests(100), Request(0, (3,) * 600, SamplingParams(max_tokens=4))])
    done, _ = companion.answer(requests(100))
    assert len(done) == 16


def test_saved_and_restored(tmp_path):
    companion = make(share=1.0)
    companion.answer(requests())
    companion.learn(elapsed=20 * TICK)
    companion.save(tmp_path, {"more": 1})
    state = read_state(tmp_path)
    assert state["more"] == 1
    other = make(share=1.0)
    other.restore(tmp_path, state)
    assert (other.updates, other.versions.version) == (companion.updates, companion.versions.version)
    mine, theirs = companion.learning.trainer, other.learning.trainer
    assert all(torch.equal(a, b) for a, b in zip(mine.weights, theirs.weights, strict=True))
    assert mine._trainer.steps == theirs._trainer.steps
    other.answer(requests())
    assert other.tuner.round > companion.tuner.round, "what was known about strategies is known again"
    (tmp_path / STATE).write_text("{")
    with pytest.raises(UserError, match=r"not valid JSON.*remove"):
        read_state(tmp_path)
