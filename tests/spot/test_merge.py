"""Drafters that workers trained on their own become one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import pytest
import torch

from paceline.draft.eagle.model import DrafterShape, EagleModel
from paceline.draft.eagle.trainer import TrainSettings
from paceline.spot.buffer import SpotBuffer
from paceline.spot.evaluation import Evaluation
from paceline.spot.merge import contribution, merged
from paceline.spot.trainer import SpotTrainer

from ..draft.test_training import counting_policy
from .test_trainer import FAST, counted, rounds


def make_worker(seed: int, answers: int = 40, training: TrainSettings = FAST) -> SpotTrainer:
    """Workers begin with the same drafter and see answers of their own. By their clocks a step takes the time that it
    may, so that the sizes of steps do not depend on the machine."""
    drafter = EagleModel(counting_policy(), DrafterShape(64, 32)).init_weights(0, std=0.1)
    buffer = SpotBuffer(2**24)
    for sample in counted(drafter, answers, seed):
        buffer.put(sample)
    ticks = itertools.count()
    return SpotTrainer(drafter, buffer, training, seed=seed, clock=lambda: next(ticks) / 20)


def everything(worker: SpotTrainer) -> list[torch.Tensor]:
    """All tensors that a worker must not lose."""
    moments = [t for s in worker._optimizer.optimizer.state.values() for t in s.values()]
    published, training = worker.drafter.parameters(), worker._optimizer.copy.parameters()
    return [t.detach().clone() for t in (*published, *training, *worker.weights, *moments)]


def all_reduce(parts: Iterable[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """What a process group does, for workers in one process."""
    return [torch.stack(each).sum(0) for each in zip(*parts, strict=True)]


def evaluate_together(workers: list[SpotTrainer], candidate: list[torch.Tensor]) -> Evaluation:
    (sums,) = all_reduce([torch.tensor(w.evaluate(candidate).sums(), dtype=torch.float64)] for w in workers)
    return Evaluation.from_sums(sums.tolist())


def merge(workers: list[SpotTrainer]) -> Evaluation | None:
    """The whole of it, in the order in which workers do it."""
    candidate = merged(all_reduce(contribution(w) for w in workers))
    if candidate is None:
        for worker in workers:
            worker.adopt(None)
        return None
    evaluation = evaluate_together(workers, candidate)
    for worker in workers:
        worker.accept_or_drop(candidate, evaluation)
    return evaluation


def test_the_average_is_weighted_by_tokens_and_the_same_for_all():
    workers = [make_worker(1), make_worker(2), make_worker(3)]
    workers[0].train(rounds(30))
    workers[1].train(rounds(45))  # the third one had answers to write
    tokens = [w.tokens for w in workers]
    assert tokens[1] > tokens[0] > 0 == tokens[2]
    a, b = ([w.clone() for w in worker.weights] for worker in workers[:2])
    by_hand = [(x.double() * tokens[0] + y.double() * tokens[1]) / sum(tokens) for x, y in zip(a, b, strict=True)]
    assert merge(workers).better
    for worker in workers:
        assert worker.version == 1 and worker.tokens == 0
        for weights in (worker.weights, worker.drafter.parameters(), worker._optimizer.copy.parameters()):
            for got, expected in zip(weights, by_hand, strict=True):
                torch.testing.assert_close(got.detach(), expected.float(), rtol=0, atol=0)
    assert merge(workers) is None
    assert all(w.version == 1 for w in workers), "nobody trained, so there is nothing new"


def test_an_average_over_one_worker_is_that_worker_bit_for_bit():
    worker, idle = make_worker(1), make_worker(2)
    worker.train(rounds(5))
    kept = [w.clone() for w in worker.weights]
    assert all(bool((t == 0).all()) for t in contribution(idle))
    candidate = merged(all_reduce([contribution(idle), contribution(worker)]))
    assert candidate and all(torch.equal(x, y) for x, y in zip(candidate, kept, strict=True))
    assert merged(contribution(idle)) is None


def test_all_of_it_can_be_done_again_until_it_is_adopted():
    worker = make_worker(1)
    worker.train(rounds(20))
    before, tokens = everything(worker), worker.tokens
    first = merged(contribution(worker))
    evaluation = worker.evaluate(first)
    again = merged(contribution(worker))
    assert evaluation == worker.evaluate(again) and worker.tokens == tokens and worker.version == 0
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(before, everything(worker), strict=True))
    assert evaluation == worker.publish(), "what one does alone is the same"
    assert worker.version == 1 and torch.equal(worker.drafter.fc, first[0])


def test_a_worse_average_is_not_adopted_by_anybody():
    good, bad = make_worker(1), make_worker(2, training=TrainSettings(lr=3.0, runs=3, warmup=1))
    merge_first = [good, bad]
    good.train(rounds(60))
    assert merge(merge_first).better
    published = [p.clone() for p in good.drafter.parameters()]
    bad.train(rounds(10))
    evaluation = merge(merge_first)
    assert evaluation.after < evaluation.before
    for worker in merge_first:
        assert worker.version == 1 and worker.tokens == 0
        for weights in (worker.drafter.parameters(), worker.weights):
            assert all(torch.equal(x, y) for x, y in zip(weights, published, strict=True))


def test_what_is_not_finite_is_refused():
    worker, broken = make_worker(1), make_worker(2)
    for w in (worker, broken):
        w.train(rounds(4))
    broken.weights[0][0, 0] = math.nan
    candidate = merged(all_reduce([contribution(worker), contribution(broken)]))
    assert candidate and torch.equal(candidate[0], worker.weights[0]), "one that broke does not spoil the others' work"
    total = contribution(worker)
    total[0][0, 0] = math.inf
    assert merged(total) is None
    assert broken.publish() is None and broken.version == 0 and broken.tokens == 0
    assert bool(broken.weights[0].isfinite().all()), "it is back at the last version"
    assert not Evaluation(4.0, math.nan, 10).better


def test_evaluations_of_workers_add_up_to_one_over_all_their_answers():
    one, two = make_worker(1), make_worker(2, answers=90)
    one.train(rounds(20))
    candidate = merged(contribution(one))
    alone = two.evaluate(candidate)
    together = evaluate_together([one, two, make_worker(3, answers=0)], candidate)
    for sample in one.buffer.samples:
        two.buffer.put(sample)
    whole = two.evaluate(candidate)
    assert together == pytest.approx(whole) and whole.tokens > alone.tokens
    nothing = evaluate_together([make_worker(3, answers=0)], candidate)
    assert nothing == (0.0, 0.0, 0) and not nothing.better


def test_with_nothing_to_judge_by_training_goes_on():
    worker = make_worker(1)
    worker._is_held_out = lambda sample: False
    worker.train(rounds(3))
    kept, tokens = everything(worker), worker.tokens
    assert worker.publish() is None and worker.version == 0 and worker.tokens == tokens
    assert all(torch.equal(x, y) for x, y in zip(kept, everything(worker), strict=True))


def test_in_bfloat16_all_workers_draft_with_the_same_weights():
    policy, workers = counting_policy().to(torch.bfloat16), []
    for seed in (1, 2):
        drafter = EagleModel(policy, DrafterShape(64, 32)).init_weights(0, std=0.1)
        worker = SpotTrainer(drafter, SpotBuffer(2**20), FAST)
        torch.manual_seed(seed)
        worker.weights[0].add_(torch.randn_like(worker.weights[0]))  # as training would
        worker.tokens = 1000 * seed
        workers.append(worker)
    candidate = merged(all_reduce(contribution(w) for w in workers))
    for worker in workers:
        worker.adopt(candidate)
    for mine, other, trained in zip(
        workers[0].drafter.parameters(), workers[1].drafter.parameters(), workers[1].weights, strict=True
    ):
        assert mine.dtype == torch.bfloat16 and torch.equal(mine, other)
        assert trained.dtype == torch.float32 and torch.equal(trained.bfloat16(), other)
    assert not torch.equal(workers[0].weights[0], workers[0].drafter.fc.float()), "masters keep what is small"
