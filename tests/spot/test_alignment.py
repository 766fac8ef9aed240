"""Features beside the right tokens, from the rollout through the buffer and training back into the rollout.

The policy is one whose next token is known: a function of the last two, which it has learned. A drafter that is trained
on the right features drafts nearly everything right; one that is trained with features of one position further
on or back does not, however well it seems to do in training.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.nn.functional as F

from paceline.core import Request, SamplingParams
from paceline.draft.eagle.drafter import EagleDrafter
from paceline.draft.eagle.loss import read_sequences
from paceline.draft.eagle.model import DrafterShape, EagleModel
from paceline.draft.eagle.trainer import TrainSettings
from paceline.draft.strategy import Strategy
from paceline.model.attention import PackedAttention
from paceline.model.decoder import Decoder
from paceline.rollout import EngineSettings, RolloutEngine
from paceline.spot.buffer import SpotBuffer
from paceline.spot.samples import FeatureSample
from paceline.spot.trainer import SpotSettings, SpotTrainer

from ..conftest import tiny_model
from .test_trainer import rounds

SYMBOLS, PROMPT, DEPTH = 7, 4, 3
ANSWER = 1 + 4 * (1 + DEPTH)  # one token of the prefill and four verifications that accept all draft tokens


def next_symbol(before: int, last: int) -> int:
    return (3 * before + 2 * last + 1) % SYMBOLS


def follow(prompt: tuple[int, ...]) -> list[int]:
    sequence = list(prompt)
    while len(sequence) < PROMPT + ANSWER:
        sequence.append(next_symbol(*sequence[-2:]))
    return sequence


def make_prompts(count: int, seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(SYMBOLS) for _ in range(PROMPT)) for _ in range(count)]


@pytest.fixture(scope="module")
def policy() -> Decoder:
    return taught()


def taught(**changes: object) -> Decoder:
    """A policy that has learned the rule."""
    model = tiny_model(dtype=torch.float32, vocab_size=16, **changes).init_weights(0, std=0.08).requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(300):
        sequences = [follow(prompt) for prompt in make_prompts(32, seed=1000 + step)]
        tokens = torch.tensor(sequences).view(-1)
        attention = PackedAttention([len(sequence) for sequence in sequences], model.device)
        position = attention.positions()
        hidden, _ = model(tokens, position, attention)
        known = (position >= PROMPT - 1) & (position < PROMPT + ANSWER - 1)
        loss = F.cross_entropy(model.logits(hidden)[known], tokens.roll(-1)[known])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.requires_grad_(False)


def answer(policy: Decoder, prompts: list[tuple[int, ...]], drafter: EagleModel | None = None):
    """Completions of the policy with their prompts, and the accept length."""
    strategy = Strategy.parse(f"neural:{DEPTH}")
    drafting = ([EagleDrafter(drafter)], [strategy]) if drafter else ((), None)
    engine = RolloutEngine(policy, EngineSettings(max_batch=32), None, *drafting)
    if drafter:
        engine.choose = lambda _: strategy
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER)
    done = engine.run(Request(i, p, sampling) for i, p in enumerate(prompts))
    return [[*c.request.prompt, *c.tokens] for c in done], engine.stats.accept_length


def trained(policy: Decoder, shift: int) -> EagleModel:
    """A drafter that SpotTrainer has trained and published, on features that lie `shift` positions too far on."""
    drafter = EagleModel(policy, DrafterShape(96, 32)).init_weights(0, std=0.1)
    buffer = SpotBuffer(2**24)
    for sequence in answer(policy, make_prompts(160, seed=1))[0]:
        sequences = read_sequences(drafter, [(sequence, PROMPT)])
        buffer.put(FeatureSample(sequences.tokens.int(), PROMPT, sequences.features.roll(shift, 0), sequences.hidden))
    # A clock by which steps take just the time that they may, so that they stay as large as they are.
    ticks = itertools.count()
    settings = SpotSettings(step_s=1 / 32)
    training = TrainSettings(lr=4e-3, runs=DEPTH, warmup=5)
    spot = SpotTrainer(drafter, buffer, training, settings, clock=lambda: next(ticks) / 32)
    spot.train(rounds(250))
    evaluation = spot.publish()
    assert evaluation is not None and evaluation.after > 0.85 * (1 + DEPTH), "in training, all of them seem to do well"
    return drafter


@pytest.mark.parametrize("shift", [0, 1, -1])
def test_only_the_right_features_lead_to_the_right_draft_tokens(policy, shift):
    sequences, accept_length = answer(policy, make_prompts(32, seed=2), trained(policy, shift))
    right = [t[i] == next_symbol(*t[i - 2 : i]) for t in sequences for i in range(PROMPT, len(t))]
    assert sum(right) > 0.97 * len(right), "the policy knows its rule"
    if shift == 0:
        assert accept_length > 0.93 * (1 + DEPTH)
    else:
        assert accept_length < 0.75 * (1 + DEPTH)
