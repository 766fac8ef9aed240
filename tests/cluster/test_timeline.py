"""What workers did when: who has nothing to decode trains, nobody who has does, and it ends with the last answer."""

from __future__ import annotations

import json

from paceline.observe.timeline import IDLE, ROLLOUT, TRAIN, UPDATE, read_timeline

from .runs import make

STEP_S = 0.05


def test_the_drafter_is_trained_in_idle_windows_only(tmp_path):
    words = [
        "cluster.workers=2",
        "spot.when=tail",
        "spot.max_interval=1",
        "rollout.max_tokens=160",
        "model.dtype=float32",
    ]
    trainer = make(tmp_path / "run", *words, "steps=4", "rollout.prompts=3", "rollout.samples=3")
    rows = trainer.train()
    decided = [json.loads(line) for line in (tmp_path / "run" / "decisions.jsonl").read_text().splitlines()]
    assert {d["order"] for d in decided} == {"assign", "train", "stop"} and all(d["reason"] for d in decided)
    assert sum(row["drafter/steps"] for row in rows) > 0 and sum(row["cluster/training_s"] for row in rows) > 0
    spans = read_timeline(tmp_path / "run" / "timeline.json")
    assert {s.worker for s in spans if s.name == UPDATE} == {0, 1}
    for step in range(1, 5):
        mine = [s for s in spans if s.step == step]
        decoding = [s for s in mine if s.args.get("rounds") and s.name not in (ROLLOUT, TRAIN)]
        assert {s.worker for s in decoding} == {0, 1}
        update = min(s.start for s in mine if s.name == UPDATE)
        for trained in (s for s in mine if s.name in (TRAIN, IDLE)):
            assert trained.end <= update + 1e-3, "before anything else begins"
            for other in decoding:
                if other.worker == trained.worker:
                    assert other.end <= trained.start + 2e-3 or other.start >= trained.end - 2e-3


def test_requests_that_wait_go_to_who_has_run_dry(tmp_path):
    words = ["cluster.workers=2", "rollout.max_batch=1", "speculation.mode=plain", "rollout.prompts=1"]
    trainer = make(tmp_path / "run", *words, "steps=1", "rollout.samples=12", "rollout.max_tokens=60")
    try:
        # It is expected that one completion is as long as all others together, so one worker gets nearly all of them.
        trainer.lengths.expect = lambda prompt: 1.0
        trainer._answers = lambda requests, _: trainer.cluster.rollout(
            1, requests, {r.id: 100.0 if r.id == 0 else 1.0 for r in requests}, _mode(), False
        )
        trainer.step()
        orders = [order for _, order in trainer.cluster.decisions]
        released = [order for order in orders if type(order).__name__ == "Release"]
        assert released and all("has run dry" in order.reason for order in released)
        assert set(trainer.cluster.completed_by.values()) == {0, 1}
        wrote = list(trainer.cluster.completed_by.values())
        assert min(wrote.count(0), wrote.count(1)) > 1, "the one with a single request took others"
    finally:
        trainer.close()


def _mode():
    from paceline.cluster.messages import RolloutMode

    return RolloutMode()
