"""What the policy did not write carries no gradient and no log-probability: it is seen, but not learned from."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from paceline.config import build_config
from paceline.core import Trajectory, moved, outside
from paceline.draft.eagle.loss import before_completions
from paceline.errors import UserError
from paceline.learn.advantages import by_turn, dr_grpo, grpo, per_answer
from paceline.learn.algorithms import resolve
from paceline.learn.learner import Learner
from paceline.learn.logprobs import token_logprobs
from paceline.learn.packing import pack
from paceline.learn.update_batch import token_advantages
from paceline.spot.samples import FeatureSample, lay_out

from ..conftest import tiny_model
from .test_learner import ALGORITHMS, assert_same, config, gradients

MODEL = tiny_model("qwen3", tie_word_embeddings=True)


def conversations(count: int = 8, seed: int = 0) -> list[Trajectory]:
    dice = random.Random(seed)
    out = []
    for i in range(count):
        prompt = tuple(dice.randrange(2, 128) for _ in range(5 + i // 4))
        tokens: list[int] = []
        observed = []
        for turn in range(dice.randint(1, 4)):
            if turn:
                first = len(tokens)
                tokens += [dice.randrange(2, 128) for _ in range(dice.choice([0, 1, 9]))]
                observed.append((first, len(tokens)))
            tokens += [dice.randrange(2, 128) for _ in range(dice.randint(1, 8))]
        out.append(Trajectory(prompt, tokens, [0.0] * len(tokens), dice.random(), tuple(observed)))
    batch = pack(out, list(range(count)), MODEL.device, torch.float64)
    logp, _ = token_logprobs(MODEL, batch, 1.0)
    for trajectory, part in zip(out, logp.split([t.num_tokens for t in out]), strict=True):
        for index, value in zip(trajectory.written, part.tolist(), strict=True):
            trajectory.logprobs[index] = value
    return out


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_log_probabilities_of_observations_are_never_read(algorithm):
    """Anything at all in their place changes no gradient and no metric."""
    settings = config(algorithm=algorithm, kl_coef=0.1, epochs=2)
    given = conversations()
    spoilt = [
        replace(t, logprobs=[p if i in set(t.written) else float("nan") for i, p in enumerate(t.logprobs)])
        for t in given
    ]
    assert any(t.observed for t in given)
    assert_same(gradients(MODEL, settings, given), gradients(MODEL, settings, spoilt))


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo", "rloo"])
def test_no_gradient_comes_from_an_observation(algorithm):
    """Observations at the end of an answer are followed by nothing that the policy wrote: other ones, or none at all,
    change no gradient, though they change the loss of a learner that would learn from them."""
    settings = config(algorithm=algorithm, max_grad_norm=1e9, overlong_buffer=0)
    given = conversations()

    def with_end(tokens: list[int]) -> list[Trajectory]:
        return [
            replace(
                t,
                tokens=t.tokens + tokens,
                logprobs=t.logprobs + [0.0] * len(tokens),
                observed=(*t.observed, (len(t.tokens), len(t.tokens) + len(tokens))),
            )
            for t in given
        ]

    without = gradients(MODEL, settings, given)
    assert_same(gradients(MODEL, settings, with_end([7, 8, 9])), without)
    assert_same(gradients(MODEL, settings, with_end([90, 3])), without)
    assert any(g.abs().max() > 1e-3 for g in without.values())


def test_but_the_policy_sees_them():
    given = conversations()
    others = []
    for t in given:
        tokens = list(t.tokens)
        for first, last in t.observed:
            tokens[first:last] = [(token + 1) % 128 for token in tokens[first:last]]
        others.append(replace(t, tokens=tokens))
    changed = gradients(MODEL, config(), others)
    assert any(
        (a - b).abs().max() > 1e-6
        for a, b in zip(gradients(MODEL, config(), given).values(), changed.values(), strict=False)
    )


def test_the_gradient_by_hand():
    """The sum over the tokens that the policy wrote, each with the answer's advantage: 1 / (answers * written)."""
    model = tiny_model("qwen3", tie_word_embeddings=True)
    given = conversations()
    got = gradients(model, config(max_grad_norm=1e9), given)
    rewards = torch.tensor([t.reward for t in given], dtype=torch.float64).view(2, 4)
    advantage = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    model.requires_grad_(True)
    loss = torch.zeros((), dtype=torch.float64)
    for a, t in zip(advantage, given, strict=True):
        whole = Trajectory(t.prompt, t.tokens, t.logprobs, t.reward)
        logp, _ = token_logprobs(model, pack([whole], [0], model.device, torch.float64), 1.0)
        logp = logp[t.written]
        loss = loss - a * torch.exp(logp - logp.detach()).mean() / len(given)
    loss.backward()
    assert_same(got, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def test_what_is_counted():
    given = conversations()
    learner = Learner(tiny_model(), config())
    batch = learner.make_batch([t.facts for t in given], 0, [])
    assert batch.num_tokens == [t.num_tokens for t in given] == [len(t.written) for t in given]
    assert batch.lengths == [len(t.prompt) + len(t.tokens) for t in given]


def test_credit_by_turn():
    """By hand: two answers of a group have a second turn, only one a third; what came before a turn is no credit of
    it."""
    rewards = torch.tensor([[1.0, 2.0, 0.0]], dtype=torch.float64)
    turns = [((2, 0.5), (1, 0.5)), ((1, 0.0), (3, 0.5), (2, 1.0)), ((4, 0.0),)]
    first, second, third = by_turn(rewards, turns, per_answer(dr_grpo))
    # The returns of the first turns are 1, 2 and 0; of the second ones 0.5 and 2; the third one is alone.
    assert first.tolist() == [0.0, 0.0, -0.75]
    assert second.tolist() == [1.0, 0.75, 0.75, 0.75, 0.0, 0.0]
    assert third.tolist() == [-1.0] * 4


def test_credit_by_turn_in_a_batch():
    given = [replace(t, turn_rewards=tuple(0.1 * i for i in range(len(t.observed) + 1))) for t in conversations()]
    values = {"rollout": {"samples": 4}, "environment": {"name": "a:b", "credit": "turn"}}
    settings = resolve(build_config(values, "test"))
    batch = Learner(MODEL, settings).make_batch([t.facts for t in given], 0, [])
    assert [len(a) for a in batch.advantages] == [t.num_tokens for t in given]
    assert any(len(set(a.tolist())) > 1 for a in batch.advantages), "turns differ"
    same = token_advantages(
        torch.tensor([t.reward for t in given], dtype=torch.float64), batch.num_tokens, [], settings
    )
    for t, by, whole in zip(given, batch.advantages, same, strict=True):
        if len(t.turns) == 1 and all(len(o.turns) == 1 for o in given):
            assert by.tolist() == whole.tolist()
    one = by_turn(torch.tensor([[1.0, 3.0]]), [((2, 0.0),), ((1, 0.0),)], per_answer(grpo))
    assert one[0][0] == -one[1][0] and len(one[0]) == 2
    with pytest.raises(UserError, match=r"environment\.credit=turn"):
        resolve(build_config(values | {"learn": {"algorithm": "reinforce_pp"}}, "test"))


def test_the_drafter_learns_from_what_the_policy_wrote():
    """Position p teaches the token behind it, if the policy drew that."""
    learn = before_completions([10, 6], [3, 2], [((5, 7),), ()])
    assert learn.nonzero()[:, 0].tolist() == [2, 3, 6, 7, 8, 11, 12, 13, 14]
    sample = FeatureSample(torch.arange(10).int(), 3, torch.zeros(10, 1), torch.zeros(10, 1), observed=((5, 7), (8, 9)))
    whole = lay_out([sample]).learn
    for first in range(8):
        piece = sample.part(first, 10, max(0, 3 - first))
        expected = whole[first:].clone()
        got = lay_out([piece]).learn
        assert got[1:].tolist() == expected[1:].tolist()


def test_spans():
    assert outside(((2, 4), (4, 4), (6, 7)), 9) == [0, 1, 4, 5, 7, 8] and outside((), 2) == [0, 1]
    assert moved(((2, 4), (6, 9)), -3, 4) == ((0, 1), (3, 4)) and moved(((0, 2),), 5, 100) == ((5, 7),)
