"""Drafters that make all draft tokens in one pass: they propose what they were trained to, and change no token."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.draft.eagle.drafter import EagleDrafter
from paceline.draft.eagle.files import load_drafter, save_drafter
from paceline.draft.eagle.loss import expected_accept_length, read_sequences, unroll
from paceline.draft.eagle.model import EagleModel, copy_of, new_drafter
from paceline.draft.eagle.trainer import EagleTrainer, TrainSettings
from paceline.draft.strategy import PLAIN, Strategy
from paceline.errors import UserError
from paceline.model.decoder import Decoder
from paceline.rollout import EngineSettings, RolloutEngine

from ..conftest import tiny_model
from ..rollout.test_engine import assert_same, make_requests
from .test_training import counting_policy

MODEL = tiny_model("llama")
STRATEGIES = [PLAIN, *map(Strategy.parse, ("neural:1", "neural:5", "neural:4x3/8", "neural:6~", "neural:7@3"))]


def block_of(policy: Decoder, sequential: bool, window: int = 64) -> EagleModel:
    drafter = new_drafter(policy, window, 0, None, 5, sequential)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.3)
    return drafter


def rollout(drafter: EagleModel, requests, choose):
    settings = EngineSettings(max_batch=16, page_size=16)
    engine = RolloutEngine(drafter.policy, settings, None, [EagleDrafter(drafter)], STRATEGIES)
    engine.choose = choose
    return {c.request.id: c for c in engine.run(requests)}, engine


@pytest.mark.parametrize("sequential", [False, True])
def test_it_changes_no_token(sequential):
    requests = make_requests(20, seed=4, groups=6)
    drafter = block_of(MODEL, sequential)
    plain, _ = rollout(drafter, requests, lambda batch: PLAIN)
    dice = random.Random(0)
    drafted, engine = rollout(drafter, requests, lambda batch: dice.choice(STRATEGIES))
    assert_same(drafted, plain)
    assert engine.stats.drafted_sequences > 0


@pytest.mark.parametrize("sequential", [False, True])
def test_it_proposes_what_training_saw(sequential, monkeypatch):
    """Run k of training stands for draft token k + 1: the same inputs, keys and positions."""
    drafter = block_of(
        MODEL, sequential, window=512
    )  # all of the sequence: behind a window's edge they differ a little
    depth = 5
    proposed: list[tuple[list[int], list[int], list[list[int]]]] = []
    original = EagleDrafter.propose_on_device

    def listen(self, batch, strategy, noise):
        draft = original(self, batch, strategy, noise)
        rows = self.rows.view(0, batch)
        proposed.append((rows.slot.tolist(), rows.context.tolist(), draft.tokens.tolist()))
        return draft

    monkeypatch.setattr(EagleDrafter, "propose_on_device", listen)
    requests = make_requests(1, seed=4, groups=1, temperature=0.0, shortest=40)
    strategy = Strategy.parse(f"neural:{depth}")
    done, _ = rollout(drafter, requests, lambda batch: strategy)
    completion = done[requests[0].id]
    tokens = [*requests[0].prompt, *completion.tokens]
    sequences = read_sequences(drafter, [(tokens, len(requests[0].prompt))])
    rows = torch.arange(len(tokens))
    runs = [logits.argmax(-1) for _, logits in unroll(drafter, sequences, depth, rows)]
    compared = 0
    for _, contexts, drafts in proposed:
        for k in range(depth):
            position = contexts[0] + k
            told = tokens[contexts[0] + 1 : position + 1] == drafts[0][:k]  # what a sequential one was told is there
            if position < len(tokens) and (told or not sequential):
                assert int(runs[k][position]) == drafts[0][k]
                compared += 1
    assert compared > 20


@pytest.mark.parametrize("sequential", [False, True])
def test_it_learns_to_count_and_its_draft_tokens_are_accepted(sequential):
    policy = counting_policy()
    drafter = new_drafter(policy, 32, 0, None, 5, sequential)
    dice = random.Random(0)
    starts = [dice.randrange(48) for _ in range(12)]
    answers = [([(start + i) % 48 for i in range(30)], 4) for start in starts]
    trainer = EagleTrainer(drafter, TrainSettings(lr=5e-3, runs=3, grow=True, warmup=1))
    sequences = read_sequences(drafter, answers)
    before = expected_accept_length(drafter, sequences, 3)
    for _ in range(90):
        trainer.step(sequences)
    trainer.publish()
    assert trainer.runs == 3, "it has come to as many draft tokens in a row as asked"
    assert before < 1.5 and expected_accept_length(drafter, sequences, 3) > 3


def test_it_is_saved_and_loaded_and_named_if_it_is_damaged(tmp_path: Path):
    drafter = block_of(MODEL, True)
    save_drafter(drafter, tmp_path)
    found = load_drafter(tmp_path, MODEL)
    assert found.shape == drafter.shape
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), drafter.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(copy_of(found).parameters(), drafter.parameters(), strict=True))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["ptd_token_id"] == MODEL.config.vocab_size - 1, "where serving engines look for it"
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["mask_hidden"].shape == (1, 3 * MODEL.config.hidden_size)
    save_file({name: t for name, t in tensors.items() if name != "mask_hidden"}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="lacks the tensor mask_hidden"):
        load_drafter(tmp_path, MODEL)
    (tmp_path / "config.json").write_text(json.dumps(config | {"ptd_token_id": 10**6}))
    with pytest.raises(UserError, match="ptd_token_id 1000000"):
        load_drafter(tmp_path, MODEL)
