"""The report's headline: a rollout with plain decoding, played through from the run's own rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.observe.strategy_totals import bucket_of
from paceline.observe.timeline import ROLLOUT, Timeline
from paceline.report.page import write_report
from paceline.report.rundata import read_run
from paceline.report.wall_clock import describe_wall_clock, measure_wall_clock, plain_rollout_s

COSTS = {1: 0.010, 2: 0.010, 3: 0.012, 4: 0.012, 6: 0.016, 8: 0.016}
"""Seconds of a plain round by batch size."""
OVERHEAD = 0.05  # seconds of a rollout in which nothing is decoded
DEPTH = 4  # tokens of a speculative round for each sequence
SLOWER = 1.5  # a speculative round, than a plain one
REST = 0.3  # seconds of a step that are the same in both


def plain_by_hand(lengths: list[int]) -> float:
    """Round by round, the first token of each with its prompt."""
    return sum(COSTS[bucket_of(sum(n > done for n in lengths))] for done in range(1, max(lengths)))


def made(folder: Path, steps: list[list[list[int]]], speeds: list[float], plain_rounds: int = 2) -> Path:
    """A run whose every round took what it costs, from lengths of answers by step and worker. In each step a few plain
    rounds are run at each batch size, and the others are speculative."""
    folder.mkdir()
    (folder / "config.yaml").write_text("steps: 9\nlog: {tensorboard: false}\n")
    timeline = Timeline(folder / "timeline.json")
    for number, (by_worker, speed) in enumerate(zip(steps, speeds, strict=True), 1):
        spent = []
        for worker, lengths in enumerate(by_worker):
            strategies: dict[str, dict[str, list[float]]] = {"plain": {}, "neural:3": {}}
            seconds = 0.0
            for size, cost in COSTS.items():
                if size > len(lengths):
                    continue
                rounds = sum(bucket_of(sum(n > done for n in lengths)) == size for done in range(1, max(lengths)))
                counts = {"plain": (plain_rounds, 1.0), "neural:3": (-(-rounds // DEPTH), SLOWER)}
                for name, (count, factor) in counts.items():
                    took = count * cost * factor * speed
                    seconds += took
                    if count:
                        strategies[name][str(size)] = [count, took, took / count, count * DEPTH, count]
            timeline.span(worker, ROLLOUT, 100.0 * number, seconds, number, strategies=strategies, peak=8, tail_s=0.0)
            spent.append(seconds)
        gen = max(spent) + OVERHEAD
        flat = [n for lengths in by_worker for n in lengths]
        workers = [worker for worker, lengths in enumerate(by_worker) for _ in lengths]
        row = {"step": number, "timing_s/gen": gen, "timing_s/step": gen + REST, "timing_s/update_actor": REST}
        row |= {"critic/rewards/mean": 0.5, "rollout/spec_rounds": 9.0, "rollout/rounds": 20.0, "rollout/tok_s": 100.0}
        with open(folder / "metrics.jsonl", "a") as out:
            out.write(json.dumps(row) + "\n")
        with open(folder / "answers.jsonl", "a") as out:
            out.write(
                json.dumps({"step": number, "lengths": flat, "rewards": [0.5] * len(flat), "workers": workers}) + "\n"
            )
    timeline.close()
    return folder


def test_a_rollout_is_played_through_with_its_batches():
    lengths = [3, 5, 5, 40, 100]
    assert plain_rollout_s(lengths, COSTS, limit=99) == pytest.approx(plain_by_hand(lengths), rel=0.05)
    exact = dict.fromkeys((1, 2), 0.01)
    assert plain_rollout_s([11, 21, 31], exact, limit=2) == pytest.approx(0.01 * (20 + 20)), "the third one waits"
    assert plain_rollout_s([1, 1], exact, limit=9) == 0, "all of it came with the prompts"
    assert plain_rollout_s([11], {2: 0.01, 4: 0.03}, limit=9) == pytest.approx(0.1), "as at the nearest"
    assert plain_rollout_s([11] * 3, {2: 0.01, 4: 0.03}, limit=9) == pytest.approx(0.2), "between two"


@pytest.mark.parametrize("speeds", [[1.0, 1.0, 1.0], [1.0, 2.5, 0.6]], ids=["steady", "a machine that others use"])
def test_the_headline_is_what_a_plain_run_would_have_taken(tmp_path, speeds):
    steps = [[[30, 40, 44, 200], [25, 90]], [[20, 20, 21, 380], [60, 70]], [[33, 35, 36, 300], [10, 20]]]
    run = read_run(made(tmp_path / "run", steps, speeds))
    found = measure_wall_clock(run)
    truth = []
    for by_worker, speed, row in zip(steps, speeds, run.metrics, strict=True):
        plain = max(map(plain_by_hand, by_worker)) * speed + OVERHEAD
        truth.append((plain / row["timing_s/gen"], (plain + REST) / (row["timing_s/gen"] + REST)))
    assert found.rollout == pytest.approx(sorted(r for r, _ in truth)[1], rel=0.05)
    assert found.step == pytest.approx(sorted(s for _, s in truth)[1], rel=0.05)
    assert found.plain_rounds == 3 * 2 * (4 + 2)
    page = write_report(tmp_path / "run")[0].read_text()
    words = f"rollout about {found.rollout:.1f}x, step {found.step:.1f}x faster than plain"
    assert f'id="verdict">{words}<' in page


def test_what_cannot_be_told(tmp_path):
    run = read_run(made(tmp_path / "run", [[[30, 40]]], [1.0], plain_rounds=0))
    assert measure_wall_clock(run) is None, "no plain round to compare with"
    from paceline.report.savings import measure_savings

    assert describe_wall_clock(run, measure_savings(run)) == ""
    few = read_run(made(tmp_path / "few", [[[30, 40]]], [1.0]))
    assert "judging by only 4 plain rounds" in describe_wall_clock(few, measure_savings(few))
