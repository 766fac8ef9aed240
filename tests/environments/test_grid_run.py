"""A run on a power grid with a limited number of power flows as its environment."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("pandapower")

from ..cluster.runs import make
from ..tied import make_tied


def test_a_step_of_screening_with_a_tool(tmp_path):
    """By a model that knows nothing of it: every answer is worth what no screening is worth, and the run goes on."""
    model = make_tied(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    words = [
        f"model.path={model}", "task.name=grid:tool", "task.difficulty=easy", "environment.name=grid",
        "environment.options={flows: 2}", "environment.workers=1", "reward.functions=[{function: grid}]",
        "rollout.prompts=2", "rollout.max_tokens=30", "eval.task=grid:tool", "eval.task_settings={split: test}",
        "eval.prompts=3", "steps=1",
    ]  # fmt: skip
    trainer = make(tmp_path / "run", *words)
    try:
        prompt = trainer.prompts.group(0).sample
        metrics = trainer.step()
        result = trainer.after_step.evaluations.evaluator.run(1, RuntimeError)
    finally:
        trainer.close()
    assert "up to 2 outages computed" in prompt.prompt[-1]["content"] and prompt.columns["case"] == 14
    assert metrics["reward/grid"] == pytest.approx(-0.2) and metrics["acting/turns/mean"] == 1.0
    answers = json.loads((tmp_path / "run" / "answers.jsonl").read_text().splitlines()[0])
    assert len(answers["rewards"]) == 4 and len(result.groups) == 3
