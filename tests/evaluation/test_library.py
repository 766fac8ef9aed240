"""Evaluation from Python: rows and rewards as objects."""

from __future__ import annotations

from paceline import Trainer
from paceline.evaluation.records import read_records

SETTINGS = {
    "rollout.prompts": 2, "rollout.samples": 2, "rollout.max_tokens": 12, "eval.samples": 2, "eval.every": 1,
    "model.threads": 1, "cluster.workers": 1, "log.tensorboard": False, "speculation.mode": "plain",
}  # fmt: skip


def long(completions, extra=None, **_):
    """Tells rows of evaluation from those of training."""
    return [len(c) / 100 + (extra[0] if extra else 0) for c in completions]


def test_rows_and_a_function(tmp_path):
    rows = [{"prompt": f"Make {n} from 1 2 3.\n"} for n in (6, 5)]
    held_out = [{"prompt": f"Make {n} from 1 2 4.\n", "extra": 10} for n in (7, 8, 1)]
    run = tmp_path / "run"
    done = Trainer("embedded", rows, long, steps=1, run_dir=run, settings=SETTINGS, eval_data=held_out).train()
    assert len(done.metrics) == 1 and done.metrics[0]["critic/rewards/max"] < 10
    assert done.metrics[0]["val-core/eval/reward/mean@2"] >= 10
    records = read_records(run)
    assert [r.step for r in records] == [0, 1] and len(records[0].scores.prompts) == 3
    again = Trainer.resume(run, rows, long, eval_data=held_out).train()
    assert len(again.metrics) == 1 and [r.step for r in read_records(run)] == [0, 1], "nothing is made twice"
