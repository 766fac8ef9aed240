"""Runs to look at: a real one, and made-up ones with what a real one does not have yet."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path

import pytest
import yaml

from paceline.config import load_config
from paceline.loop import TrainLoop, train
from paceline.observe.rounds import RoundLog
from paceline.observe.timeline import Timeline
from paceline.rollout.stats import RoundRecord
from paceline.run import Run

QUICK = [
    "steps=4", "rollout.prompts=3", "rollout.samples=8", "rollout.max_tokens=90", "checkpoint.every=2",
    "log.tensorboard=false", "model.threads=1", "cluster.workers=1",
]  # fmt: skip


@pytest.fixture(scope="session")
def real_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "real"
    train(load_config(None, [*QUICK, f"run_dir={folder}"]))
    return folder


class Struck(TrainLoop):
    """Loses worker 1 in the rollout of the second step; the fourth begins when it is there again."""

    def step(self) -> dict[str, float]:
        if self.progress.step == 3:
            end = time.monotonic() + 120
            while len(self.cluster.liveness.living) < 2 and time.monotonic() < end:
                self.cluster.liveness.listen(0.05)
        return super().step()

    def _answers(self, requests, expected):
        for n, completions in enumerate(super()._answers(requests, expected)):
            if self.progress.step == 1 and n == 1:
                os.kill(self.cluster.transport.pid(1), signal.SIGKILL)
            yield completions


@pytest.fixture(scope="session")
def struck_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "struck"
    words = [*QUICK, "steps=5", "cluster.workers=2", "spot.max_interval=1", f"run_dir={folder}"]
    run = Run.create(load_config(None, words))
    Struck(run.config, run).train()
    return folder


def made_run(
    folder: Path,
    steps: int,
    workers: int = 4,
    speculate: bool = True,
    planned: int | None = None,
    lost: int | None = None,
) -> Path:
    """Workers that finish one after the other; those that wait train the drafter, of which every third step has a new
    version. In step `lost`, if there is one, worker 1 is lost for good."""
    folder.mkdir(parents=True)
    settings = {"steps": planned or steps, "rollout": {"samples": 5}, "cluster": {"workers": workers}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    timeline = Timeline(folder / "timeline.json")
    now = timeline._zero + 0.1
    for step in range(1, steps + 1):
        row = {
            "step": step,
            "critic/rewards/mean": math.nan if step == 2 else 0.5 + 0.4 * math.sin(step / 9),
            "response_length/mean": 100.0 + step,
            "response_length/p50": 80.0,
            "response_length/p99": 400.0 + 3 * step,
            "rollout/spec_accept_length": 4 - 2 / step,
            "rollout/spec_rounds": 38.0 * workers if speculate else 0.0,
            "rollout/rounds": 40.0 * workers,
            "rollout/tok_s": 1000.0,
            "timing_s/gen": 4.0 if workers > 1 else 1.0,
            "timing_s/step": 6.0,
            "drafter/version": float(step // 3),
            "drafter/published": float(step % 3 == 0),
            "cluster/lost": float(step == lost),
        }
        lengths = [40 + (n * n) // 12 for n in range(90)]
        answers = {"step": step, "lengths": lengths, "rewards": [0.0] * 90, "workers": [0] * 90}
        for name, line in (("metrics.jsonl", row), ("answers.jsonl", answers)):
            with open(folder / name, "a") as out:
                out.write(json.dumps(line) + "\n")
        for worker in range(workers):
            if worker == 1 and lost and step >= lost:
                continue
            decode(timeline, worker, step, now, (worker + 1.0) * (4.0 / workers if workers > 1 else 1.0), speculate)
            waits = 4.0 - (worker + 1.0) * 4.0 / workers
            if waits > 0 and workers > 1:
                timeline.span(worker, "train drafter", now + 4.0 - waits, waits * 0.75, step)
                timeline.span(worker, "idle", now + 4.0 - waits * 0.25, waits * 0.25, step)
            timeline.span(worker, "reward", now + 4.0, 0.2, step)
            timeline.span(worker, "update", now + 4.2, 1.7, step)
        now += 6.0
    return folder


def decode(timeline: Timeline, worker: int, step: int, start: float, seconds: float, speculate: bool = True) -> None:
    """Forty rounds in `seconds`, the batch shrinking from 32 to 1, two of the rounds plain."""
    log = RoundLog(timeline.add, worker)
    log.step, log._zero = step, start
    each = seconds / 40
    for i in range(40):
        batch = max(1, 32 - i)
        strategy = "neural:5" if speculate and i not in (0, 20) else "plain"
        log(RoundRecord(i * each, each, batch, strategy, batch if strategy == "plain" else 3 * batch))
    log.end()
