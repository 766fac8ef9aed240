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
    sidecar = make(share=0.0001)
    first, _ = sidecar.answer(requests())
    rounds = sidecar.tuner.round
    engine = sidecar._engine
    long = Request(99, tuple(i % 100 + 2 for i in range(400)), SamplingParams(max_tokens=200), 7)
    sidecar.answer([long])
    assert sidecar._engine is not engine and sidecar.tuner.round > rounds
    again, _ = sidecar.answer(requests())
    assert [c.tokens for c in again] == [c.tokens for c in first]


def test_training_takes_its_share_and_pays_back_what_it_overdrew():
    sidecar = make(share=0.5)
    spent, passed = 0.0, 0.0
    for step in range(6):
        sidecar.answer(requests(16 * step))
        spent += sidecar.learn(elapsed=0.6)["drafter/seconds"]
        passed += 0.6
    assert 0.5 * passed - 4 * TICK <= spent <= 0.5 * passed + 4 * TICK


def test_the_drafter_becomes_better_and_is_used():
    sidecar = make(share=1.0)
    before = [p.clone() for p in sidecar.neural.parameters()]
    seen = []
    for step in range(2):
        sidecar.answer(requests(16 * step))
        seen.append(sidecar.learn(elapsed=20 * TICK))
    assert seen[-1]["drafter/version"] > 0
    assert any(not torch.equal(a, b) for a, b in zip(before, sidecar.neural.parameters(), strict=True))
    judged = [row for row in seen if row["drafter/published"]]
    assert any(row["drafter/expected_accept_after"] > row["drafter/expected_accept_before"] for row in judged)


def test_evaluation_teaches_nothing():
    sidecar = make()
    sidecar.answer(requests(), learn=False)
    assert sidecar.learn(elapsed=10.0)["drafter/steps"] == 0


def test_no_drafter_no_training():
    model = tiny_model(dtype=torch.float32)
    sidecar = SideCar(model, Config())
    done, _ = sidecar.answer(requests())
    assert len(done) == 16 and sidecar.learn(elapsed=10.0) == {}


def test_a_rollout_that_fails_leaves_nothing_behind():
    sidecar = make()
    sidecar.answer(requests())
    with pytest.raises(UserError, match="no room for an answer"):
        sidecar.answer([*requests(100), Request(0, (3,) * 600, SamplingParams(max_tokens=4))])
    done, _ = sidecar.answer(requests(100))
    assert len(done) == 16


def test_saved_and_restored(tmp_path):
    sidecar = make(share=1.0)
    sidecar.answer(requests())
    sidecar.learn(elapsed=20 * TICK)
    sidecar.save(tmp_path, {"more": 1})
    state = read_state(tmp_path)
    assert state["more"] == 1
    other = make(share=1.0)
    other.restore(tmp_path, state)
    assert (other.updates, other.versions.version) == (sidecar.updates, sidecar.versions.version)
    mine, theirs = sidecar.learning.trainer, other.learning.trainer
    assert all(torch.equal(a, b) for a, b in zip(mine.weights, theirs.weights, strict=True))
    assert mine._optimizer.steps == theirs._optimizer.steps
    other.answer(requests())
    assert other.tuner.round > sidecar.tuner.round, "what was known about strategies is known again"
    (tmp_path / STATE).write_text("{")
    with pytest.raises(UserError, match=r"not valid JSON.*remove"):
        read_state(tmp_path)
