"""Runs that train adapters: resumed, by several workers, from an adapter; a tied model with several stop tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline import Engine
from paceline.config import load_config
from paceline.errors import UserError
from paceline.loop import TrainLoop
from paceline.model import load_model
from paceline.run import Run

from ..cluster.runs import Recorded, run, same_policy
from ..test_cli import here
from ..tied import make_tied
from .peft_pair import logits, theirs_logits
from .reward import DIGITS

LORA = ["learn.lora.rank=4", "learn.lr=1e-3", "rollout.max_tokens=24"]
TINY = [
    "rollout.prompts=2", "rollout.samples=4", "rollout.max_tokens=12", "rollout.min_tokens=12", "learn.lr=5e-3",
    "log.tensorboard=false", "checkpoint.every=1", "cluster.workers=1", "speculation.mode=plain", "task.name=countdown",
    "task.style=chat", "reward.workers=0", DIGITS,
]  # fmt: skip


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> Path:
    folder = make_tied(tmp_path_factory.mktemp("tied") / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    return folder


def train(folder: Path, model: Path, steps: int, *words: str) -> list[dict[str, float]]:
    config = load_config(None, [*TINY, f"model.path={model}", f"run_dir={folder}", f"steps={steps}", *words])
    started = Run.create(config)
    return TrainLoop(started.config, started).train()


def adapters(folder: Path, step: int) -> dict[str, Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step:06d}" / "adapter" / "adapter_model.safetensors")


def identical(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def resume(folder: Path, steps: int) -> list[dict[str, float]]:
    file = folder / "config.yaml"
    values = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(values | {"steps": steps}))
    again = Run.open(folder)
    return TrainLoop(again.config, again).train()


KEPT = ("critic/rewards/mean", "actor/pg_loss", "actor/grad_norm", "response_length/mean", "actor/entropy")


@pytest.mark.parametrize("words", [[], ["learn.kl_coef=0.1", "learn.epochs=2", "model.dtype=float64"]], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one(words, tied, tmp_path):
    """Bit by bit: the adapters, the merged weights, the numbers."""
    words = ["learn.lora.rank=4", *words]
    whole = train(tmp_path / "whole", tied, 3, *words)
    train(tmp_path / "parts", tied, 1, *words)
    parts = resume(tmp_path / "parts", 3)
    assert [[row[k] for k in KEPT] for row in parts] == [[row[k] for k in KEPT] for row in whole]
    assert all(row["actor/grad_norm"] > 0 for row in whole)
    assert identical(adapters(tmp_path / "parts", 3), adapters(tmp_path / "whole", 3))
    assert not identical(adapters(tmp_path / "whole", 2), adapters(tmp_path / "whole", 3))
    newest = [tmp_path / at / "checkpoints" / "step-000003" / "model.safetensors" for at in ("parts", "whole")]
    assert identical(*map(load_file, newest))
    state = load_file(tmp_path / "whole" / "checkpoints" / "step-000003" / "learner-0.safetensors")
    assert all(".lora_" in name or name in ("updates", "optimizer.steps") for name in state), "of adapters only"


def test_the_first_policy_has_no_divergence_from_the_reference(tied, tmp_path):
    rows = train(tmp_path / "run", tied, 2, "learn.lora.rank=4", "learn.kl_coef=0.1", "model.dtype=float64")
    assert rows[0]["actor/kl_loss"] == 0 < rows[1]["actor/kl_loss"]


def test_kl_to_the_base_is_that_of_a_frozen_copy(tied, tmp_path):
    """The same run with the base loaded a second time beside it, in float64."""
    from paceline.learn.learner import Learner

    words = ["learn.lora.rank=4", "learn.kl_coef=0.1", "model.dtype=float64"]
    train(tmp_path / "ours", tied, 2, *words)
    with pytest.MonkeyPatch.context() as patch:
        copy = load_model(str(tied), "float64")
        patch.setattr(Learner, "_reference_logprobs", lambda self, mine: [*self._logprobs(copy, mine)])
        train(tmp_path / "copy", tied, 2, *words)
    assert identical(adapters(tmp_path / "ours", 2), adapters(tmp_path / "copy", 2))


@pytest.mark.parametrize("more", [["speculation.mode=plain"], ["learn.kl_coef=0.05", "spot.when=tail"]], ids=str)
def test_two_workers_are_one(more, tmp_path):
    one = run(tmp_path / "one", 3, *LORA, *more, "spot.when=off")
    two = run(tmp_path / "two", 3, *LORA, *more, "cluster.workers=2")
    assert one[0] == two[0] and same_policy(one[1], two[1])
    assert same_policy(adapters(tmp_path / "one", 3), adapters(tmp_path / "two", 3))


def test_a_worker_that_comes_back_has_the_others_adapters(tmp_path):
    """A worker is killed between two steps, started again, and sent what it missed."""
    alone = run(tmp_path / "one", 3, *LORA, "speculation.mode=plain")
    config = [*LORA, "speculation.mode=plain", "steps=3", "cluster.workers=2"]
    from ..cluster.runs import make, policy

    trainer = make(tmp_path / "two", *config)
    try:
        trainer.step()
        trainer.cluster.transport.kill(1)
        trainer.step()
        trainer.step()
        assert trainer.cluster.lost == [1]
        assert trainer.answers == alone[0] and same_policy(policy(trainer), alone[1])
    finally:
        trainer.close()


def test_a_run_goes_on_with_another_number_of_workers(tmp_path):
    words = [*LORA, "speculation.mode=plain", "steps=3"]
    alone = run(tmp_path / "one", 3, *words)
    from ..cluster.runs import make, policy

    first = make(tmp_path / "run", *words, "cluster.workers=2")
    try:
        first.step()
        first.saver.save()
    finally:
        first.close()
    opened = Run.open(tmp_path / "run")
    config = opened.config.model_copy(update={"cluster": opened.config.cluster.model_copy(update={"workers": 1})})
    second = Recorded(config, opened)
    try:
        second.step()
        second.step()
        assert [*first.answers, *second.answers] == alone[0] and same_policy(policy(second), alone[1])
    finally:
        second.close()


@pytest.fixture(scope="module")
def trained(tied, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(folder, tied, 2, "learn.lora.rank=4", "learn.lora.targets=[q_proj,v_proj,down_proj]")
    return folder


def test_a_run_begins_with_an_adapter(trained, tied, tmp_path):
    """And its KL reference is what it began with, also after it was resumed without that adapter."""
    start = tmp_path / "start"
    shutil.copytree(trained / "checkpoints" / "step-000002" / "adapter", start)
    words = [f"learn.lora.path={start}", "learn.kl_coef=0.1", "learn.lr=1e-3"]
    whole = train(tmp_path / "whole", tied, 3, *words)
    assert whole[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-9) and whole[1]["actor/kl_loss"] > 0
    settings = yaml.safe_load((tmp_path / "whole" / "config.yaml").read_text())["learn"]["lora"]
    assert settings["rank"] == 4 and settings["alpha"] == 8
    assert settings["targets"] == ["q_proj", "v_proj", "down_proj"]
    train(tmp_path / "parts", tied, 1, *words)
    shutil.rmtree(start)
    resume(tmp_path / "parts", 3)
    assert identical(adapters(tmp_path / "parts", 3), adapters(tmp_path / "whole", 3))
    begun = load_file(trained / "checkpoints" / "step-000002" / "adapter" / "adapter_model.safetensors")
    moved = adapters(tmp_path / "whole", 2)
    assert moved.keys() == begun.keys()
    assert all((moved[name] - begun[name]).abs().max() < 0.01 for name in begun), "it went on from there"


def test_exports_load_everywhere(trained, tied, tmp_path, capsys):
    assert here("export", trained, tmp_path / "adapter", "--adapter", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["rank"] == 4 and said["base"] == str(tied) and said["step"] == 2
    assert here("export", trained, tmp_path / "merged", "--policy") == 0
    tokens = torch.randint(2, 80, (30,), generator=torch.Generator().manual_seed(0))
    base = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float32)
    with torch.no_grad():
        plain = theirs_logits(base, tokens)
        peft = theirs_logits(PeftModel.from_pretrained(base, tmp_path / "adapter"), tokens)
        merged = theirs_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32), tokens)
    torch.testing.assert_close(merged, peft, rtol=1e-5, atol=1e-5)
    assert (merged - plain).abs().max() > 1e-3
    ours = Engine(tmp_path / "merged", drafter=None)
    with_adapter = Engine(tied, adapter=tmp_path / "adapter", drafter=None)
    torch.testing.assert_close(logits(ours.model, tokens), peft, rtol=1e-5, atol=1e-5)
    assert all(map(torch.equal, ours.model.parameters(), with_adapter.model.parameters()))
    answers = [engine.generate(["1 + 2"], samples=3, max_tokens=20, seed=1) for engine in (ours, with_adapter)]
    assert [one.tokens for one in answers[0][0]] == [one.tokens for one in answers[1][0]]


def test_what_cannot_be_exported_is_said(trained, tied, tmp_path, capsys):
    assert here("export", tied, tmp_path / "out", "--adapter") == 2
    assert "has no adapter" in capsys.readouterr().err
    assert here("export", trained, tmp_path / "out", "--adapter", "--policy") == 2
    assert "name one of them" in capsys.readouterr().err


def test_another_base_is_refused(trained, tied, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    edit(folder, str(tied), str(make_tied(tmp_path / "other", seed=1)))
    with pytest.raises(UserError, match=r"belong to other weights than .*other has now; bring back the model"):
        resume(folder, 3)
    edit(folder, "other", "nowhere")
    with pytest.raises(UserError, match=r"a run with LoRA needs the model that it began with .*nowhere"):
        resume(folder, 3)


def test_another_rank_is_refused(trained, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    edit(folder, "rank: 4", "rank: 8")
    with pytest.raises(UserError, match=r"adapters are of rank 4 and alpha 8 for .* asks for of rank 8"):
        resume(folder, 3)


def edit(folder: Path, before: str, after: str) -> None:
    text = (folder / "config.yaml").read_text()
    assert before in text
    (folder / "config.yaml").write_text(text.replace(before, after))
