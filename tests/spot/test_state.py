"""Training of the drafter goes on after a resume as if nothing had happened."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.draft.eagle.files import load_drafter, save_drafter
from paceline.draft.eagle.loss import read_sequences
from paceline.draft.eagle.model import DrafterShape, EagleModel
from paceline.draft.eagle.trainer import EagleTrainer, TrainSettings
from paceline.errors import UserError
from paceline.spot.buffer import SpotBuffer
from paceline.spot.state import load_training, save_training
from paceline.spot.trainer import SpotTrainer

from ..draft.test_training import counting_policy
from .test_trainer import counted, rounds

SLOW = TrainSettings(lr=2e-3, runs=3, warmup=20)


def ticking():
    """A clock by which every step takes the same time, so that sizes of steps are the same every time."""
    ticks = itertools.count()
    return lambda: next(ticks) / 32


def make_spot(drafter: EagleModel, seed: int = 5) -> SpotTrainer:
    return SpotTrainer(drafter, SpotBuffer(2**24), SLOW, seed=seed, clock=ticking())


def fill(spot: SpotTrainer, step: int) -> None:
    spot.buffer.next_step()
    for sample in counted(spot.drafter, 40, seed=step):
        spot.buffer.put(sample)


def through_files(spot: SpotTrainer, folder):
    """Saved and read again."""
    tensors, values = spot.state()
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "spot.safetensors")
    (folder / "spot.json").write_text(json.dumps(values, allow_nan=False))
    return load_file(folder / "spot.safetensors"), json.loads((folder / "spot.json").read_text())


@pytest.mark.parametrize("published", [True, False])
def test_the_same_weights_with_and_without_an_interruption(tmp_path, published):
    drafter = EagleModel(counting_policy(), DrafterShape(64, 32)).init_weights(0, std=0.1)
    spot = make_spot(drafter)
    fill(spot, 1)
    spot.train(rounds(7))
    if published:
        assert spot.publish().better
        spot.train(rounds(2))
    save_drafter(drafter, tmp_path / "drafter")
    tensors, values = through_files(spot, tmp_path)

    again = make_spot(load_drafter(tmp_path / "drafter", counting_policy()), seed=99)
    again.load(tensors, values)
    assert again.version == spot.version == published and again.tokens == spot.tokens > 0
    assert again.buffer.seen == 40
    for each in (spot, again):
        each.buffer.begin_again()  # which is not saved
        fill(each, 2)
        each.train(rounds(9))
        each.publish()
        each.train(rounds(3))
    assert spot.state()[1] == again.state()[1]
    for name, tensor in spot.state()[0].items():
        assert torch.equal(tensor, again.state()[0][name]), name
    for mine, other in zip(spot.drafter.parameters(), again.drafter.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_before_the_first_step_there_is_a_state_too(tmp_path):
    drafter = EagleModel(counting_policy(), DrafterShape(64, 32)).init_weights(0, std=0.1)
    spot, again = make_spot(drafter), make_spot(drafter)
    again.load(*through_files(spot, tmp_path))
    for each in (spot, again):
        fill(each, 1)
        each.train(rounds(3))
    assert all(torch.equal(x, y) for x, y in zip(spot.weights, again.weights, strict=True))


def test_loading_forgets_what_was_trained_before():
    drafter = EagleModel(counting_policy(), DrafterShape(64, 32)).init_weights(0, std=0.1)
    fresh, used = EagleTrainer(drafter, SLOW), EagleTrainer(drafter, SLOW)
    sequences = read_sequences(drafter, [([(i % 48) for i in range(40)], 4)])
    used.step(sequences)
    used.load(*fresh.state())
    fresh.step(sequences)
    used.step(sequences)
    assert all(torch.equal(x, y) for x, y in zip(fresh.masters, used.masters, strict=True))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda v: v.update(size=0.0), "'size'"),
        (lambda v: v.update(size=1e9), "'size'"),
        (lambda v: v.update(tokens="many"), "'tokens'"),
        (lambda v: v.pop("age"), "no 'age'"),
        (lambda v: v["dice"][1].__setitem__(0, 2**70), "'dice"),
        (lambda v: v["trainer"].clear(), r"no 'trainer\.steps'"),
    ],
)
def test_damaged_values_are_refused_with_a_sentence(tmp_path, change, says):
    drafter = EagleModel(counting_policy(), DrafterShape(64, 32)).init_weights(0)
    save_training(make_spot(drafter), tmp_path)
    load_training(make_spot(drafter), tmp_path)
    values = json.loads((tmp_path / "training.json").read_text())
    change(values)
    (tmp_path / "training.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=rf"{says}.*to begin anew"):
        load_training(make_spot(drafter), tmp_path)


@pytest.mark.parametrize("damage", ["not finite", "another shape", "not JSON"])
def test_damaged_training_is_refused_with_a_sentence(tmp_path, damage):
    drafter = EagleModel(counting_policy(), DrafterShape(64, 32)).init_weights(0)
    spot = make_spot(drafter)
    fill(spot, 1)
    spot.train(rounds(1))
    save_training(spot, tmp_path)
    tensors = load_file(tmp_path / "training.safetensors")
    if damage == "not finite":
        tensors["master.fc"][0, 0] = float("nan")
    elif damage == "another shape":
        tensors["exp_avg.fc"] = tensors["exp_avg.fc"][:, :-1].contiguous()
    else:
        (tmp_path / "training.json").write_text("{")
    save_file(tensors, tmp_path / "training.safetensors")
    with pytest.raises(UserError, match="to begin anew"):
        load_training(make_spot(drafter), tmp_path)


def test_the_state_of_another_drafter_is_refused():
    drafter = EagleModel(counting_policy(), DrafterShape(64, 32)).init_weights(0)
    wider = EagleModel(counting_policy(), DrafterShape(96, 32)).init_weights(0)
    with pytest.raises(ValueError, match=r"layer\.gate_up has shape"):
        make_spot(drafter).load(*make_spot(wider).state())
