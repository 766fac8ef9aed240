"""--resume RUN key=value: what may change does, what may not says why; and a run needs nothing beside its directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from paceline.config import load_config, setting_names
from paceline.errors import UserError
from paceline.learn.schedule import learning_rate
from paceline.library.trainer import Trainer
from paceline.loop import train
from paceline.observe.metrics import short_names
from paceline.run import Run
from paceline.run.changes import FIXED, read_changes

from .test_cli import here, rows
from .tied import EOS_IDS, make_tied

QUICK = [
    "steps=2", "rollout.prompts=2", "rollout.samples=2", "rollout.max_tokens=12", "checkpoint.every=1", "seed=3",
    "log.tensorboard=false", "model.threads=1", "cluster.workers=1", "reward.workers=0", "learn.lr=1e-4",
    "speculation.mode=plain",
]  # fmt: skip
REWARD = "def letters(completions, **_):\n    return [float(len(set(c)) % {}) for c in completions]\n"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with a model, data and a reward, as a user names them: by relative paths."""
    work = tmp_path / "work"
    make_tied(work / "model")
    (work / "data.jsonl").write_text("".join(json.dumps({"prompt": f"{i} + 1 ="}) + "\n" for i in range(8)))
    (work / "mine.py").write_text(REWARD.format(5))
    monkeypatch.chdir(work)
    return work


OWN = ["model.path=model", "task.name=data.jsonl", "reward.functions=[{function: 'mine.py:letters'}]"]


def saved(run: Path) -> dict:
    return yaml.safe_load((run / "config.yaml").read_text())


def test_what_may_change_does(folder, capsys):
    assert here("train", *QUICK, *OWN, "run_dir=run") == 0
    words = ["steps=4", "learn.lr=3e-5", "reward.timeout_s=7", "checkpoint.keep=3", "rollout.prompts=3"]
    assert here("train", "--resume", "run", *words) == 0
    said = capsys.readouterr().out
    assert "from step 3 on: steps 2 -> 4, reward.timeout_s 30.0 -> 7.0, rollout.prompts 2 -> 3" in said
    metrics = rows(folder / "run")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    assert [row["actor/lr"] for row in metrics] == [1e-4, 1e-4, 3e-5, 3e-5]
    assert saved(folder / "run")["checkpoint"]["keep"] == 3
    assert len(list((folder / "run" / "checkpoints").iterdir())) == 3
    ((step, changed),) = read_changes(folder / "run")
    assert step == 2 and changed["learn.lr"] == (1e-4, 3e-5) and len(changed) == 5
    assert here("train", "--resume", "run") == 0, "and stays"
    assert "all 4 steps are done; for more: paceline train --resume run steps=8" in capsys.readouterr().out
    assert len(read_changes(folder / "run")) == 1


def test_the_steps_of_a_schedule_follow(folder):
    assert here("train", *QUICK, *OWN, "run_dir=run", "learn.lr_scheduler=linear") == 0
    assert here("train", "--resume", "run", "steps=3") == 0
    assert rows(folder / "run")[-1]["actor/lr"] == pytest.approx(learning_rate(2, 3, 1e-4, 0, "linear", 0.0))


REFUSED = {
    "seed=4": "'seed' cannot change in a run that is resumed: its prompts",
    "task.name=other.jsonl": "'task.name' cannot change in a run that is resumed: its checkpoint holds a place",
    "task.shuffle=false": "'task.shuffle' cannot change",
    "model.path=elsewhere": "its policy is in its checkpoints",
    "model.dtype=float64": "precision",
    "rollout.samples=4": "keys of the sampling noise",
    "learn.kl_coef=0.1": "frozen copy of its first policy",
    "learn.master_weights=false": "optimizer's state",
    "learn={lr: 1}": "'learn' in the command line is a section; change its settings one by one, as learn.NAME=value",
    "learn.lrr=1": "did you mean 'learn.lr'",
    "steps=1": "'steps' = 1 does not work: the run has made 2 steps already",
    "rollout.top_p=2": "'rollout.top_p' = 2",
    "mine.yaml": "no recipe: leave out mine.yaml",
}


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("done") / "run"
    train(load_config(None, [*QUICK, f"run_dir={run}"]))
    return run


@pytest.mark.parametrize("word", REFUSED)
def test_what_may_not_says_why_and_changes_nothing(word, done, capsys):
    before = {file: file.read_bytes() for file in done.iterdir() if file.is_file() and file.name != ".lock"}
    assert here("train", "--resume", done, word) == 2
    said = capsys.readouterr().err
    assert REFUSED[word] in said and said.count("\n") == 1
    assert before == {file: file.read_bytes() for file in before}
    assert not (done / "changes.jsonl").exists()


def test_the_table_is_of_settings_that_exist():
    names = setting_names()
    assert all(any(name == key or name.startswith(f"{key}.") for name in names) for key in FIXED)
    assert all(len(why.split()) > 4 for why in FIXED.values())


def test_a_drafter_of_its_own_stays(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints" / "step-000001" / "drafter").mkdir(parents=True)
    config = load_config(None, [f"run_dir={tmp_path / 'other'}"])
    (run / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    (run / "checkpoints" / "step-000001" / "state.json").write_text("{}")
    with pytest.raises(UserError, match="trained a drafter of its own"):
        Run.open(run, [("speculation.drafter", "none")])
    assert Run.open(run, [("speculation.suffix", False)]).config.speculation.suffix is False


def test_a_value_that_was_decided_can_be_given(done):
    """The same number, named by the user, is no longer open to be decided anew."""
    run = Run.open(done, [("rollout.page_size", Run.open(done).config.rollout.page_size)])
    assert Run.open(done).given().rollout.page_size is None
    assert run.given().rollout.page_size == 256 and not run.changes
    assert Run.open(done, [("rollout.kv_memory_gb", None)]).given().rollout.kv_memory_gb is None


def test_from_python(folder):
    settings = {word.partition("=")[0]: yaml.safe_load(word.partition("=")[2]) for word in QUICK[1:]}
    settings["learn.lr"] = 1e-4
    trainer = Trainer("model", "data.jsonl", "mine.py:letters", steps=1, run_dir="run", settings=settings)
    trainer.train()
    done = Trainer.resume("run", settings={"steps": 2, "learn.lr": 2e-5}).train()
    assert [row["actor/lr"] for row in done.metrics] == [1e-4, 2e-5]
    with pytest.raises(UserError, match=r"'sed' in Trainer.resume|unknown setting 'sed'"):
        Trainer.resume("run", settings={"sed": 2})


def test_data_that_was_given_in_python_is_given_there_again(tmp_path, capsys):
    settings = {word.partition("=")[0]: yaml.safe_load(word.partition("=")[2]) for word in QUICK[1:]} | {
        "learn.lr": 1e-4
    }
    rows = [{"prompt": "1 + 1 ="}]
    Trainer(
        "embedded",
        rows,
        lambda completions: [1.0] * len(completions),
        steps=1,
        run_dir=tmp_path / "run",
        settings=settings,
    ).train()
    assert here("train", "--resume", tmp_path / "run", "steps=2") == 2
    assert f"resume it there, with Trainer.resume('{tmp_path / 'run'}', data, reward)" in capsys.readouterr().err


# What a run is made from


def test_a_run_is_resumed_from_anywhere_and_without_its_model(folder, tmp_path, monkeypatch, capsys):
    assert here("train", *QUICK, *OWN, "run_dir=run", "speculation.mode=adaptive") == 0
    settings = saved(folder / "run")
    assert settings["task"]["name"] == str(folder / "data.jsonl")
    assert settings["reward"]["functions"][0]["function"] == f"{folder / 'mine.py'}:letters"
    assert "reward/mine.py:letters" in rows(folder / "run")[0], "metrics are not named by folders"
    shutil.rmtree(folder / "model")
    (folder / "mine.py").unlink()
    monkeypatch.chdir(tmp_path)
    assert here("train", "--resume", "work/run", "steps=3") == 0
    assert "mine.py has gone; the run's copy is used" in capsys.readouterr().out
    metrics = rows(folder / "run")
    assert len(metrics) == 3 and "reward/mine.py:letters" in metrics[2]
    shutil.move(folder / "run", tmp_path / "moved")
    assert here("train", "--resume", "moved", "steps=4") == 0
    assert len(rows(tmp_path / "moved")) == 4


def test_it_is_the_same_run_wherever_it_is_resumed(folder, tmp_path, monkeypatch):
    """To the same numbers as one that was never stopped: the checkpoint has all of the model."""
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": EOS_IDS}))
    assert here("train", *QUICK, *OWN, "run_dir=whole", "steps=3", "model.dtype=float64") == 0
    assert here("train", *QUICK, *OWN, "run_dir=run", "model.dtype=float64") == 0
    shutil.rmtree(folder / "model")
    monkeypatch.chdir(tmp_path)
    assert here("train", "--resume", "work/run", "steps=3") == 0
    same = ("critic/rewards/mean", "actor/grad_norm", "response_length/mean")
    both = [[row[name] for name in same] for row in (rows(folder / "whole")[2], rows(folder / "run")[2])]
    assert both[0] == pytest.approx(both[1], rel=1e-9)


def test_a_drafter_that_was_not_the_runs_own_may_be_gone(folder, embedded):
    shutil.copytree(embedded, "reasoner")
    words = [*QUICK, "model.path=reasoner", "task.difficulty=easy", "run_dir=run", "speculation.mode=adaptive"]
    assert here("train", *words) == 0
    assert saved(folder / "run")["speculation"]["drafter"].endswith("reasoner/drafter")
    shutil.rmtree("reasoner")
    assert here("train", "--resume", "run", "steps=3") == 0
    assert saved(folder / "run")["speculation"]["drafter"] == "none"


def test_a_reward_that_has_changed_is_told(folder, capsys):
    assert here("train", *QUICK, *OWN, "run_dir=run") == 0
    (folder / "mine.py").write_text(REWARD.format(3))
    capsys.readouterr()
    assert here("train", "--resume", "run", "steps=3") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"the reward file {folder / 'mine.py'} has changed since the run used it" in said
    ((step, changed),) = read_changes(folder / "run")
    assert step == 2 and str(folder / "mine.py") in changed
    copies = sorted(path.read_text() for path in (folder / "run" / "sources").rglob("mine.py"))
    assert copies == sorted([REWARD.format(5), REWARD.format(3)]), "both versions are kept"
    assert here("train", "--resume", "run", "steps=4") == 0
    assert "has changed since" not in capsys.readouterr().out, "it is told once"


def test_data_that_has_changed_is_refused(folder, capsys):
    assert here("train", *QUICK, *OWN, "run_dir=run") == 0
    (folder / "data.jsonl").write_text('{"prompt": "another"}\n')
    assert here("train", "--resume", "run", "steps=3") == 2
    said = capsys.readouterr().err
    assert f"{folder / 'data.jsonl'} has changed since the run began" in said and said.count("\n") == 1
    assert saved(folder / "run")["steps"] == 2, "what was not begun is not written"
    (folder / "data.jsonl").unlink()
    assert here("train", "--resume", "run", "steps=3") == 2
    assert "no data set at" in capsys.readouterr().err


def test_a_module_beside_the_run_is_a_file(folder, tmp_path, monkeypatch):
    words = [*QUICK, *OWN[:2], "reward.functions=[{function: 'mine:letters'}]", "run_dir=run"]
    assert here("train", *words) == 0
    monkeypatch.chdir(tmp_path)
    assert here("train", "--resume", "work/run", "steps=3") == 0


@pytest.mark.parametrize("text", ["[]", '{"x": {"sha256": "../../etc", "copied": true}}', '{"x": 1}', "{"])
def test_damaged_sources(text, folder, capsys):
    assert here("train", *QUICK, *OWN, "run_dir=run") == 0
    (folder / "run" / "sources.json").write_text(text)
    assert here("train", "--resume", "run", "steps=3") == 2
    said = capsys.readouterr().err
    assert "sources.json" in said and said.count("\n") == 1


def test_names_of_rewards_in_metrics():
    assert short_names(["/a/b.py:f", "math"]) == ["b.py:f", "math"]
    assert short_names(["/a/b.py:f", "/c/b.py:f"]) == ["/a/b.py:f", "/c/b.py:f"]


def test_a_start_that_fails_leaves_nothing(folder):
    (folder / "run").mkdir()
    (folder / "run" / "mine.txt").write_text("kept")
    (folder / "broken.py").write_text("raise ValueError('no')\n")
    words = [*QUICK, *OWN[:2], "reward.functions=[{function: 'broken.py:f'}]", "reward.workers=1", "run_dir=run"]
    assert here("train", *words) == 2
    assert [path.name for path in (folder / "run").iterdir() if path.name != ".lock"] == ["mine.txt"]
