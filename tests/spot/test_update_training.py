"""Training the drafter after the update, in a real run."""

from __future__ import annotations

import functools
import itertools
import json

import pytest
import torch

from paceline.config import load_config
from paceline.draft.eagle.files import load_drafter
from paceline.draft.eagle.loss import read_sequences
from paceline.draft.eagle.model import EagleModel
from paceline.errors import UserError
from paceline.loop import TrainLoop, train
from paceline.observe.step_text import line_of
from paceline.run import Run
from paceline.spot.learning import DrafterLearning
from paceline.spot.rollout_time import RolloutTime
from paceline.spot.samples import lay_out
from paceline.spot.versions import Versions

from .test_trainer import rounds

WORDS = [
    "steps=5", "rollout.prompts=4", "rollout.samples=4", "rollout.max_tokens=80", "task.difficulty=easy",
    "log.tensorboard=false", "checkpoint.every=5", "speculation.drafter=new", "spot.when=update", "spot.share=0.6",
    "spot.merge_share=1", "cluster.workers=1",
]  # fmt: skip


@pytest.fixture
def own_clock(monkeypatch):
    """A machine that makes as many drafter steps in every update, each in the time that it may take, and a version
    after each: how much is trained and how often it is merged depends on the clock otherwise."""
    ticks = itertools.count()
    clock = lambda: next(ticks) / 20  # noqa: E731

    def train_for(self, seconds):
        assert seconds > 0
        self.trainer._clock = clock
        self.stats += self.trainer.train(rounds(40))

    monkeypatch.setattr(DrafterLearning, "train_for", train_for)
    monkeypatch.setattr(Versions, "__init__", functools.partialmethod(Versions.__init__, clock=clock))


@pytest.mark.usefixtures("own_clock")
@pytest.mark.parametrize("drafted", ["all tokens", "some"])
def test_a_drafter_that_begins_untrained_learns_and_goes_on_after_a_resume(tmp_path, monkeypatch, drafted):
    if drafted == "some":
        monkeypatch.setattr("paceline.draft.eagle.vocabulary.LARGE_VOCAB", 100)
        monkeypatch.setattr("paceline.draft.eagle.vocabulary.DRAFT_VOCAB", 100)
    config = load_config(None, [*WORDS, f"run_dir={tmp_path / 'run'}"])
    run, rows = train(config)
    evaluated = [row for row in rows if "drafter/expected_accept_after" in row]
    expected = [row["drafter/expected_accept_after"] for row in evaluated]
    assert len(evaluated) == 5 and expected[-1] > 1.1 * expected[0], expected
    versions = [row["drafter/version"] for row in rows]
    assert versions == sorted(versions) and versions[-1] >= 3
    for row in evaluated:
        assert row["drafter/steps"] > 0 and row["timing_s/train_drafter"] > 0
        better = row["drafter/expected_accept_after"] >= row["drafter/expected_accept_before"]
        assert row["drafter/published"] == better
    spans = [json.loads(line.rstrip().rstrip(",")) for line in (run.folder / "timeline.json").open() if "{" in line]
    assert sum(s.get("name") == "train drafter" for s in spans) == sum(row["drafter/steps"] > 0 for row in rows)

    newest = run.newest_checkpoint()
    assert newest and (newest / "drafter" / "config.json").is_file(), "beside the policy, where `auto` finds it"
    resumed = TrainLoop(run.config, Run.open(run.folder))
    assert resumed.progress.drafter_version == versions[-1]
    worker = resumed.cluster.transport.worker
    trained = load_drafter(newest / "drafter", worker.model)
    assert torch.equal(worker.drafter.model.fc, trained.fc)
    assert (trained.vocab is None) == (drafted == "all tokens")
    untrained = EagleModel(worker.model, trained.shape).init_weights(config.seed)
    resumed.close()
    assert not torch.equal(trained.fc, untrained.fc)


def test_the_learner_shows_what_the_policy_thought_before_the_update(tmp_path):
    config = load_config(None, [*WORDS, "rollout.prompts=2", f"run_dir={tmp_path / 'run'}", "model.dtype=float64"])
    trainer = TrainLoop(config, Run.create(config))
    try:
        seen = {}
        worker = trainer.cluster.transport.worker
        spot, gradients = worker.drafter.learning, worker.gradients

        def note(update, share, trajectories, scores):
            for a in trajectories.values():
                tokens = [*a.prompt, *a.tokens]
                seen[tuple(tokens)] = read_sequences(spot.trainer.drafter, [(tokens, len(a.prompt))])
            return gradients(update, share, trajectories, scores)

        worker.gradients = note
        trainer.step()
        assert len(seen) == len(spot.buffer.samples) == 8
        for sample in spot.buffer.samples:
            sequences = lay_out([sample])
            wanted = seen[tuple(sample.tokens.tolist())]
            for name in ("tokens", "positions", "features", "hidden", "learn"):
                torch.testing.assert_close(getattr(sequences, name), getattr(wanted, name))
    finally:
        trainer.close()


@pytest.mark.parametrize("words", [["speculation.drafter=none"], ["speculation.mode=plain"]])
def test_there_must_be_a_drafter_to_train(tmp_path, words):
    config = load_config(None, [*WORDS, *words, f"run_dir={tmp_path / 'run'}"])
    with pytest.raises(UserError, match=r"speculation\.drafter=new"):
        train(config)


def test_training_backs_off_and_a_resumed_run_remembers_it(tmp_path):
    config = load_config(None, [*WORDS, "spot.share=0.1", f"run_dir={tmp_path / 'run'}"])
    trainer = TrainLoop(config, Run.create(config))
    try:
        trainer.drafting.versions.backoff.every = 2
        trained = [trainer.step()["drafter/steps"] > 0 for _ in range(3)]
        trainer.saver.save()
    finally:
        trainer.close()
    assert trained == [True, False, True]
    resumed = TrainLoop(config, Run.open(tmp_path / "run"))
    resumed.close()
    assert resumed.drafting.versions.backoff.state() == trainer.drafting.versions.backoff.state()


INVESTING = [word for word in WORDS if not word.startswith(("steps", "spot"))]


def test_training_is_invested_where_it_is_expected_to_pay_back_and_not_in_the_last_step(tmp_path, monkeypatch):
    """What is expected is a matter of clocks, so this machine saves half of a long rollout with any better drafter."""
    asked = []

    def train_for(self, seconds):
        asked.append(seconds)
        self.stats += self.trainer.train(rounds(6))

    monkeypatch.setattr(DrafterLearning, "train_for", train_for)
    monkeypatch.setattr("paceline.spot.schedule.MAX_STRETCHES", 2)
    monkeypatch.setattr(RolloutTime, "seconds", lambda self, accept_length: 1000 / accept_length)
    words = [*INVESTING, "spot.invest=true", "steps=3", "checkpoint.every=2", f"run_dir={tmp_path / 'run'}"]
    run, rows = train(load_config(None, words))
    invested = [row["drafter/invested_s"] for row in rows]
    assert invested[0] > 0 and invested[1] > 0
    assert invested[2] == 0, "no step is left in which it could pay back"
    assert sum(invested) == pytest.approx(sum(asked)) and 2 <= len(asked) <= 4
    for row in rows[:2]:
        assert row["drafter/invest_saves_s"] > row["drafter/invest_plan_s"] >= row["drafter/invested_s"] / 2
        assert row["timing_s/train_drafter"] > 0 and "drafter/expected_accept_after" in row
        assert "invested in the drafter" in line_of(1, 3, row)
    newest = run.newest_checkpoint()
    assert newest is not None
    state = json.loads((newest / "state.json").read_text())["investment"]
    assert state["invested_s"] == pytest.approx(sum(invested))
    resumed = TrainLoop(run.config, Run.open(run.folder))
    curve = resumed.drafting.curve
    resumed.close()
    assert resumed.config.spot.when == "update", "what the settings leave open"
    assert curve is not None and curve.state() == state


def test_nothing_is_invested_unasked(tmp_path):
    for words, expected in (([], False), (["spot.invest=true", "spot.when=update"], True)):
        folder = tmp_path / str(expected)
        config = load_config(None, [*INVESTING, *words, f"run_dir={folder}"])
        loop = TrainLoop(config, Run.create(config))
        loop.close()
        assert (loop.drafting.curve is not None) == expected
