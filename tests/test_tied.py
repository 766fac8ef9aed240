"""Every feature of the loop with a model as people have them: tied embeddings, stop tokens that only
generation_config.json names, prompts that are messages. The embedded model has none of these."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from paceline.commands.compare import run_comparison
from paceline.config import load_config
from paceline.draft.eagle.files import DRAFTER
from paceline.integrations.export import export_drafter, export_policy
from paceline.library.drafter import Drafter
from paceline.library.engine import Engine
from paceline.library.trainer import Trainer
from paceline.loop import train
from paceline.model import load_model
from paceline.model.tokenizer import load_tokenizer
from paceline.observe.metrics import read_lines
from paceline.run import Run

from .tied import EOS_IDS, make_tied

SAME = ("critic/rewards/mean", "response_length/mean", "actor/pg_loss", "actor/grad_norm", "prompt_length/mean")
REWARD = """
def short(completions, **columns):
    return [len(message["content"]) % 5 / 4 for (message,) in completions]
"""


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tied")
    make_tied(folder / "model")
    rows = [
        {"prompt": [{"role": "system", "content": "Sums."}, {"role": "user", "content": f"{i}+{i}=?"}], "answer": 2 * i}
        for i in range(11)
    ]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "mine.py").write_text(REWARD)
    return folder


@pytest.fixture
def run(tied, tmp_path):
    """Runs the loop -> (run directory, rows of metrics.jsonl)."""

    def start(*words: str, name: str = "run", resume: bool = False) -> tuple[Path, list[dict]]:
        folder = tmp_path / name
        if resume:
            train(Run.open(folder).config, folder)
        else:
            train(load_config(None, [*words_for(tied), f"run_dir={folder}", *words]))
        return folder, read_lines(folder / "metrics.jsonl")

    return start


def words_for(tied: Path) -> list[str]:
    return [
        f"model.path={tied / 'model'}", f"task.name={tied / 'data.jsonl'}", "model.dtype=float64", "model.threads=1",
        f"reward.functions=[{{function: '{tied}/mine.py:short'}}]", "reward.workers=0", "log.tensorboard=false",
        "rollout.prompts=3", "rollout.samples=4", "rollout.max_tokens=32", "steps=4", "checkpoint.every=2",
        "checkpoint.keep=9", "learn.lr=1e-3", "cluster.workers=1", "learn.importance_sampling_cap=null",
    ]  # fmt: skip


def numbers(rows: list[dict]) -> list[list[float]]:
    return [[row[name] for name in SAME] for row in rows]


def kill_after(folder: Path, step: int) -> None:
    """Leave the directory as a run that was killed after a step would have left it."""
    for checkpoint in (folder / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["learn.kl_coef=0.05"],
        ["learn.kl_coef=0.05", "learn.algorithm=reinforce_pp", "learn.epochs=2"],
        ["learn.dynamic_sampling=true", "learn.algorithm=dapo"],
        ["rollout.stop=['+', '7=']", "task.chat_template_kwargs={enable_thinking: false}"],
    ],
    ids=["plain", "kl", "kl in reward", "dynamic sampling", "stop strings"],
)
def test_a_resumed_run_gives_the_numbers_of_one_that_was_not_stopped(run, words):
    folder, whole = run(*words)
    assert all(row["actor/grad_norm"] > 0 for row in whole), "what teaches nothing would hide what is lost"
    if "learn.kl_coef=0.05" in words and len(words) == 1:
        assert whole[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-9) and whole[-1]["actor/kl_loss"] > 0
    kill_after(folder, 2)
    _, resumed = run(resume=True)
    assert numbers(resumed) == numbers(whole)


def test_a_run_goes_on_without_the_model_that_it_began_with(run, tied, tmp_path):
    own = shutil.copytree(tied / "model", tmp_path / "own")
    folder, whole = run(f"model.path={own}", "learn.kl_coef=0.05")
    kill_after(folder, 2)
    shutil.rmtree(own)
    assert numbers(run(resume=True)[1]) == numbers(whole)


def test_checkpoints_and_exports_are_complete_model_folders(run, tied, tmp_path):
    folder, _ = run("steps=2")
    checkpoint = folder / "checkpoints" / "step-000002"
    export_policy(str(folder), tmp_path / "policy")
    before = load_tokenizer(str(tied / "model"))
    messages = [{"role": "user", "content": "3+4"}]
    for place in (checkpoint, tmp_path / "policy"):
        assert "lm_head.weight" not in load_file(place / "model.safetensors")
        hf = AutoTokenizer.from_pretrained(place)
        assert hf.chat_template == before.hf.chat_template
        assert hf.get_vocab() == before.hf.get_vocab() and hf.all_special_tokens == before.hf.all_special_tokens
        settings = GenerationConfig.from_pretrained(place)
        assert settings.eos_token_id == EOS_IDS and settings.temperature == 0.7 and settings.pad_token_id == 0
        assert load_tokenizer(str(place)).eos_ids == before.eos_ids
        policy = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float64)
        assert policy.lm_head.weight is policy.model.embed_tokens.weight
        inputs = hf.apply_chat_template(messages, return_tensors="pt", add_generation_prompt=True, return_dict=True)
        wanted = policy.generate(**inputs, do_sample=False, max_new_tokens=24)[0, inputs["input_ids"].shape[1] :]
        ((mine,),) = Engine(place, dtype="float64").generate([messages], temperature=0, max_tokens=24)
        assert mine.tokens == wanted.tolist()


def test_speculation_gives_the_tokens_of_plain_decoding(run):
    draft = ["speculation.drafter=new", "speculation.strategies=[suffix:4, neural:3]", "spot.when=update"]
    _, adaptive = run(*draft, "speculation.explore=0.5", name="adaptive")
    _, plain = run("speculation.mode=plain", name="plain")
    assert sum(row["rollout/spec_rounds"] for row in adaptive) > 0
    assert numbers(adaptive) == numbers(plain)


def test_two_workers_give_the_numbers_of_one(run):
    words = ["learn.kl_coef=0.05", "speculation.drafter=new"]
    folder, two = run(*words, "cluster.workers=2", "spot.when=tail", name="two")
    _, one = run(*words, "spot.when=update", name="one")
    exact = ("critic/rewards/mean", "response_length/mean")
    for a, b in zip(two, one, strict=True):
        assert [a[name] for name in exact] == [b[name] for name in exact]
        assert a["actor/grad_norm"] == pytest.approx(b["actor/grad_norm"], rel=1e-6)
    kill_after(folder, 2)
    _, resumed = run(name="two", resume=True)
    assert [[row[name] for name in exact] for row in resumed] == [[row[name] for name in exact] for row in two]


def test_the_drafter_of_a_run_is_resumed_and_exported(run, tmp_path):
    folder, _ = run("speculation.drafter=new", "spot.when=update", "spot.share=1", "speculation.strategies=[neural:3]")
    checkpoint = folder / "checkpoints" / "step-000004"
    assert (checkpoint / DRAFTER / "config.json").is_file()
    for form in ("vllm", "speculators", "paceline"):
        written = export_drafter(str(folder), tmp_path / form, form, measure=2 if form == "paceline" else 0)
        config = json.loads((tmp_path / form / "config.json").read_text())
        assert written["format"] == form and config
    kill_after(folder, 2)
    assert len(run(resume=True)[1]) == 4


def test_a_drafter_is_trained_and_drafts_in_the_engine(tied, tmp_path):
    prompts = [[{"role": "user", "content": f"{i}+1"}] for i in range(4)]
    drafter = Drafter.train(tied / "model", prompts, seconds=0.3, samples=2, max_tokens=24, dtype="float64")
    assert drafter.fitted.steps > 0
    drafter.save(tmp_path / "drafter")
    with_it = Engine(tied / "model", drafter=tmp_path / "drafter", dtype="float64")
    without = Engine(tied / "model", drafter=None, dtype="float64", settings={"speculation.mode": "plain"})
    found = [e.generate(prompts, samples=4, seed=5, max_tokens=60) for e in (with_it, without)]
    assert [[a.tokens for a in group] for group in found[0]] == [[a.tokens for a in group] for group in found[1]]
    ends = {answer.tokens[-1] for group in found[0] for answer in group if answer.finish_reason == "stop"}
    assert ends == set(EOS_IDS), "either of the two stop tokens ends an answer"


def test_min_tokens_bans_every_stop_token(tied):
    engine = Engine(tied / "model", dtype="float64")
    (answers,) = engine.generate([[{"role": "user", "content": "1"}]], samples=16, min_tokens=24, max_tokens=40)
    assert min(len(answer.tokens) for answer in answers) >= 24
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    assert not any(set(answer.tokens[:23]) & set(EOS_IDS) for answer in answers)


def test_rows_from_python(tied, tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"{i}"}]} for i in range(5)]
    settings = dict(word.split("=", 1) for word in words_for(tied) if word.startswith(("rollout.", "cluster.")))
    settings |= {"model.threads": 1, "log.tensorboard": False, "learn.kl_coef": 0.05, "checkpoint.every": 1}
    seen = []

    def length(completions, **columns):
        seen.append(completions[0][0]["role"])
        return [len(message["content"]) for (message,) in completions]

    done = Trainer(tied / "model", rows, length, steps=2, run_dir=tmp_path / "run", settings=settings).train()
    shutil.rmtree(done.folder / "checkpoints" / "step-000002")
    again = Trainer.resume(done.folder, rows, length).train()
    assert again.rewards == done.rewards and set(seen) == {"assistant"}


def test_a_comparison_finds_the_same_tokens(tied, tmp_path, capsys):
    from rich.console import Console

    words = [*words_for(tied), f"run_dir={tmp_path / 'run'}", "steps=1"]
    run_comparison(load_config(None, words), Console(highlight=False, stderr=True), as_json=True)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["identical"] == found["responses"] == 12


def test_the_policy_is_tied_after_updates(run):
    folder, _ = run("steps=2", "learn.kl_coef=0.05", "learn.optimizer_dtype=bfloat16", "learn.minibatches=2")
    policy = load_model(str(folder / "checkpoints" / "step-000002"), "float64")
    assert policy.head.weight is policy.embed.weight
