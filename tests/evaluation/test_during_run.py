"""Evaluation inside a run: when, with which dice, what it leaves, and that training goes as if there was none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.config import load_config
from paceline.errors import UserError
from paceline.evaluation.evaluator import Evaluator
from paceline.evaluation.records import read_records
from paceline.loop import TrainLoop, train
from paceline.observe.metrics import read_lines
from paceline.run import Run
from paceline.run.best import read_best

from ..cluster.runs import SMALL, Recorded, policy, same_policy
from ..digits import DIGITS
from ..test_cli import here
from ..tied import make_tied

EVAL = [
    "eval.task=countdown", "eval.task_settings={difficulty: easy}", "eval.every=2", "eval.prompts=5", "eval.samples=3",
    "eval.greedy=true", "eval.max_tokens=30", "model.threads=1",
]  # fmt: skip


def make(folder: Path, *words: str) -> Recorded:
    run = Run.create(load_config(None, [*SMALL, f"run_dir={folder}", *words]))
    return Recorded(run.config, run)


def whole(folder: Path, *words: str) -> list[dict]:
    return train(load_config(None, [*SMALL, f"run_dir={folder}", *words]))[1]


@pytest.mark.parametrize("workers", [1, 2])
def test_training_is_as_without_evaluation(tmp_path, workers):
    """Tokens, rewards and policy in float64; with two workers the drafter learns in the tail."""
    runs = {}
    for name, words in (("without", ["model.threads=1"]), ("with", [*EVAL, "eval.every=1"])):
        trainer = make(tmp_path / name, "steps=3", f"cluster.workers={workers}", *words)
        try:
            with trainer.stopping.listening():
                trainer._train()
            runs[name] = trainer.answers, policy(trainer)
        finally:
            trainer.close()
    assert runs["with"][0] == runs["without"][0]
    assert same_policy(runs["with"][1], runs["without"][1])
    rows = {name: read_lines(tmp_path / name / "metrics.jsonl") for name in runs}
    for a, b in zip(rows["with"], rows["without"], strict=True):
        for name in ("critic/rewards/mean", "response_length/mean"):
            assert a[name] == b[name]
    assert [r.step for r in read_records(tmp_path / "with")] == [0, 1, 2, 3]


def test_when_and_what_is_left(tmp_path, capsys):
    run = tmp_path / "run"
    words = [*SMALL, *EVAL, "steps=5", "eval.every=2", "checkpoint.every=1", "checkpoint.keep=1", "log.samples=2"]
    assert here("train", *words, f"run_dir={run}") == 0
    said = capsys.readouterr().out
    assert [r.step for r in read_records(run)] == [0, 2, 4, 5]
    assert said.count("\neval ") == 4 and said.count(" since step 0") == 3
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    evaluated = [row["step"] for row in rows if "val-core/countdown/reward/mean@3" in row]
    assert evaluated == [0, 2, 4, 5] and [row["step"] for row in rows if "timing_s/testing" in row] == [2, 4, 5]
    assert [row["step"] for row in read_lines(run / "metrics.jsonl")] == [1, 2, 3, 4, 5], "step 0 is no step"
    for row in (row for row in rows if row["step"] in evaluated):
        (record,) = [r for r in read_records(run) if r.step == row["step"]]
        assert row["val-core/countdown/reward/mean@3"] == record.scores.value("mean")
        assert row["val-core/countdown/greedy/mean@1"] == record.scores.value("greedy")
        assert {len(p.rewards) for p in record.scores.prompts} == {3} and len(record.scores.prompts) == 5
    samples = [json.loads(line) for line in (run / "evaluation_samples.jsonl").read_text().splitlines()]
    assert [s["step"] for s in samples] == [0, 0, 2, 2, 4, 4, 5, 5] and all(s["answer"] for s in samples)
    best = read_best(run)
    values = {r.step: r.scores.value("mean") for r in read_records(run)}
    assert best.value == max(values.values()) and values[best.step] == best.value
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    expected = {"step-000005"} | ({Path(best.checkpoint).name} if best.checkpoint else set())
    assert set(kept) == expected, "the newest, and the best"


class Told(TrainLoop):
    """Its evaluations come to what it is told."""

    values: dict[int, float]

    def _train(self) -> None:
        evaluator = self.after_step.evaluations.evaluator
        assert evaluator is not None
        plain = evaluator.run

        def run(step, fail):
            result = plain(step, fail)
            for prompt in result.scores.prompts:
                prompt.rewards[:] = [self.values[step]] * len(prompt.rewards)
            return result

        evaluator.run = run
        super()._train()


def test_the_best_checkpoint_is_kept_and_found(tmp_path):
    words = [*SMALL, *EVAL, "steps=6", "eval.every=1", "eval.greedy=false", "checkpoint.every=2", "checkpoint.keep=1"]
    run = Run.create(load_config(None, [*words, f"run_dir={tmp_path / 'run'}"]))
    trainer = Told(run.config, run)
    trainer.values = {0: 0.1, 1: 0.2, 2: 0.2, 3: 0.9, 4: 0.5, 5: 0.9, 6: 0.3}
    trainer.train()
    best = read_best(run.folder)
    assert (best.step, best.checkpoint, best.value) == (3, "checkpoints/step-000003", pytest.approx(0.9))
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step-000003", "step-000006"]
    assert (run.folder / best.checkpoint / "model.safetensors").is_file()
    again = TrainLoop(run.config, Run.open(run.folder))
    again.close()
    assert read_best(run.folder) == best, "resuming finds the same one"


def test_dice_do_not_depend_on_the_step_the_seed_or_the_number_of_samples(tmp_path):
    """With the policy unchanged, all evaluations are the same, and more samples begin with the same ones."""
    still = [*SMALL, *EVAL, "steps=2", "eval.every=1", "learn.lr=1e-30", f"reward.functions=[{DIGITS[18:-1]}]"]
    rewards = {}
    for name, words in (("a", []), ("b", ["seed=5"]), ("c", ["eval.samples=4", "eval.greedy=false"])):
        whole(tmp_path / name, *still, *words)
        records = read_records(tmp_path / name)
        assert len({json.dumps([p.rewards for p in r.scores.prompts]) for r in records}) == 1, "the same at every step"
        rewards[name] = [p.rewards for p in records[0].scores.prompts]
    assert rewards["a"] == rewards["b"] == [row[:3] for row in rewards["c"]]
    assert len({reward for row in rewards["c"] for reward in row}) > 5, "the reward tells answers apart"
    whole(tmp_path / "d", *still, "eval.seed=1")
    assert [p.rewards for p in read_records(tmp_path / "d")[0].scores.prompts] != rewards["a"]


def test_a_run_killed_in_an_evaluation_resumes_to_the_same_numbers(tmp_path):
    words = [*SMALL, *EVAL, "steps=4", "checkpoint.every=1", "speculation.mode=plain"]
    whole(tmp_path / "undisturbed", *words)
    run = tmp_path / "killed"
    die = "lambda self, step, fail: os._exit(9) if step == 2 else run(self, step, fail)"
    code = (
        "import os, sys; from paceline.evaluation.evaluator import Evaluator; run = Evaluator.run; "
        f"Evaluator.run = {die}; from paceline.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "train", *words, f"run_dir={run}"]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ)
    assert killed.returncode == 9, killed.stderr
    assert [r.step for r in read_records(run)] == [0]
    assert here("train", "--resume", run) == 0
    assert_same_evaluations(run, tmp_path / "undisturbed")


def assert_same_evaluations(run: Path, other: Path) -> None:
    pairs = list(zip(read_records(run), read_records(other), strict=True))
    assert pairs and all(a.step == b.step and a.scores == b.scores for a, b in pairs)
    rows = [[json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in (run, other)]
    for a, b in zip(*rows, strict=True):
        assert a["step"] == b["step"]
        for name in (name for name in b if name.startswith(("val-", "critic/"))):
            assert a[name] == pytest.approx(b[name], abs=1e-9), (a["step"], name)
    assert read_best(run) == read_best(other)


@pytest.mark.parametrize("step", [0, 2])
def test_a_run_stopped_in_an_evaluation_makes_it_first_on_resuming(tmp_path, step, monkeypatch):
    words = [*SMALL, *EVAL, "steps=4", "speculation.mode=plain"]
    whole(tmp_path / "undisturbed", *words)
    run = tmp_path / "stopped"
    plain = Evaluator.run

    def stop(self, at, fail):
        if at == step:
            self.stopping.ask()
        return plain(self, at, fail)

    monkeypatch.setattr(Evaluator, "run", stop)
    assert here("train", *words, f"run_dir={run}") == 130
    monkeypatch.setattr(Evaluator, "run", plain)
    assert step not in [r.step for r in read_records(run)]
    assert here("train", "--resume", run) == 0
    assert_same_evaluations(run, tmp_path / "undisturbed")


def test_a_reward_that_fails_in_an_evaluation_stops_the_run_saved(tmp_path, capsys):
    reward = tmp_path / "mine.py"
    reward.write_text("def f(completions, **_): raise ValueError('oops')\n")
    words = [*SMALL, *EVAL, "steps=2", f"run_dir={tmp_path / 'run'}", "eval.before_training=false"]
    failing = f"eval.functions=[{{function: '{reward}:f'}}]"
    assert here("train", *words, failing) == 1
    said = capsys.readouterr().err
    assert "raised ValueError: oops" in said and " on sample" in said and "of the evaluation on countdown" in said
    assert said.count("\n") == 1 and (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()
    words[-2] = f"run_dir={tmp_path / 'counted'}"
    assert here("train", *words, failing, "reward.on_error=value", "reward.error_value=-2") == 0
    assert read_records(tmp_path / "counted")[-1].scores.value("mean") == -2


def test_drafters_do_not_learn_from_evaluations(tmp_path, monkeypatch):
    from paceline.spot.learning import DrafterLearning

    seen = []
    plain = DrafterLearning.finished
    monkeypatch.setattr(
        DrafterLearning,
        "finished",
        lambda self, prompt, *rest: (seen.append(tuple(prompt)), plain(self, prompt, *rest)),
    )
    words = [*EVAL, "steps=1", "spot.when=update", "speculation.drafter=new"]
    trainer = make(tmp_path / "run", *words)
    try:
        evaluator = trainer.after_step.evaluations.evaluator
        evaluator.run(0, UserError)
        assert not seen
        trainer.step()
        evaluated = {group.prompt for group in evaluator.eval_set.groups}
        assert seen and not evaluated & set(seen)
    finally:
        trainer.close()


def test_a_tied_model_with_messages_and_a_data_set(tmp_path):
    """Rows of two data sets; the row that leaves no room for an answer is left out and told."""
    make_tied(tmp_path / "model")
    (tmp_path / "mine.py").write_text(
        "def f(completions, **_): return [len(c[-1]['content']) / 10 for c in completions]\n"
    )
    rows = [{"prompt": [{"role": "user", "content": f"{i}+{i}="}], "data_source": f"s{i % 2}"} for i in range(6)]
    rows.append({"prompt": [{"role": "user", "content": "1" * 600}], "data_source": "s0"})
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows[:6]))
    notes = []

    class Heard(TrainLoop):
        def __init__(self, *args, **more):
            from paceline.observe.live import LiveView

            view = LiveView(args[0], quiet=True)
            view.note = notes.append
            super().__init__(*args, view=view, **more)

    words = [
        "model.threads=1",
        f"model.path={tmp_path / 'model'}",
        f"task.name={tmp_path / 'train.jsonl'}", "steps=1", "rollout.prompts=2",
        "rollout.samples=2", "rollout.max_tokens=20", f"eval.task={tmp_path / 'test.jsonl'}", "eval.samples=4",
        "eval.k=[1, 3]", "eval.best=pass@3", "eval.pass_reward=0.01", "log.tensorboard=false", "cluster.workers=1",
        f"reward.functions=[{{function: '{tmp_path / 'mine.py'}:f'}}]", f"run_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    run = Run.create(load_config(None, words))
    Heard(run.config, run).train()
    assert any("leaves out 1 of 7 prompts" in note and "of " in note for note in notes)
    record = read_records(run.folder)[-1]
    assert [p.data for p in record.scores.prompts].count("s0") == 3 and record.scores.data == ["s0", "s1"]
    row = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"val-core/s0/pass@3", "val-core/s1/pass@3", "val-core/s0/reward/mean@4"} <= row.keys()
    assert read_best(run.folder).metric == "pass@3"


BAD = {
    "unknown task": (["eval.task=nothing"], "'nothing' is not a task"),
    "unknown task setting": (["eval.task_settings={splitt: test}"], "did you mean 'task.split'"),
    "another name": (["eval.task_settings={name: gym:x}"], "give its name as eval.task"),
    "k beyond samples": (["eval.k=[8]"], "needs at least as many samples, but samples=3"),
    "greedy samples": (["eval.temperature=0"], "all 3 samples would be the same"),
    "unknown best": (["eval.best=pass@9"], "there are: mean, pass@1"),
    "no reward": (["eval.task={tmp}/rows.jsonl", "reward.functions=[]"], "brings no reward of its own"),
    "greedy rollout": (["rollout.temperature=0"], "set eval.temperature above 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_one_sentence(case, tmp_path, capsys):
    words, problem = BAD[case]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n')
    words = [w.format(tmp=tmp_path) if "{tmp}" in w else w for w in words]
    assert here("train", *SMALL, *EVAL, *words, f"run_dir={tmp_path / 'run'}") == 2
    said = capsys.readouterr().err
    assert problem in said and said.count("\n") == 1, said
    assert not (tmp_path / "run").exists(), "nothing is left behind"
