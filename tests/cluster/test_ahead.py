"""Writing ahead changes no token and no weight: with any number of workers, through evaluations, dynamic sampling and
losses; and how far it goes follows from what was measured."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace

import pytest

from paceline.cluster.ahead import Ahead, AheadCosts, how_far, how_many
from paceline.cluster.messages import Activity, RolloutOutcome
from paceline.config import load_config
from paceline.core import Group, Request, SamplingParams
from paceline.loop import TrainLoop
from paceline.observe.clock import Clock
from paceline.observe.timeline import AHEAD, read_timeline
from paceline.rollout.stats import EngineStats
from paceline.run import Run
from paceline.spot.trainer import TrainingStats

from .runs import SMALL, make, policy, run, same_policy
from .test_kills import Killer, check, kill

TAIL = ["rollout.write_ahead=true", "rollout.max_tokens=160", "rollout.prompts=3", "learn.lr=1e-3", "spot.when=off"]
"""Long completions, few of them, and large updates: idle time, and flips."""
EVALUATED = ["eval.task=countdown", "eval.task_settings={difficulty: easy}", "eval.prompts=3", "eval.max_tokens=20",
             "eval.every=1"]  # fmt: skip
FILTERED = ["rollout.min_tokens=40", "rollout.top_p=0.9", "rollout.stop=['7 ']"]
PLAIN = ["rollout.samples=3", "rollout.max_batch=2", "speculation.mode=plain"]
EVERYTHING = [
    pytest.param([*EVALUATED, *FILTERED], id="speculating"),
    pytest.param(PLAIN, id="plain"),
    pytest.param([], id="alone", marks=pytest.mark.soak),
    pytest.param(EVALUATED, id="evaluated", marks=pytest.mark.soak),
    pytest.param(["learn.lora.rank=4"], id="lora", marks=pytest.mark.soak),
    pytest.param(FILTERED, id="filtered", marks=pytest.mark.soak),
]


def steps(folder, count: int, *words: str):
    """-> the answers, the policy, and the metrics of each step."""
    trainer = make(folder, f"steps={count}", *words)
    try:
        metrics = [trainer.step() for _ in range(count)]
        return trainer.answers, policy(trainer), metrics
    finally:
        trainer.close()


@pytest.mark.parametrize("words", EVERYTHING)
def test_the_same_tokens_and_the_same_policy(tmp_path, words):
    answers, learned, metrics = steps(tmp_path / "two", 3, *TAIL, "cluster.workers=2", *words)
    alone = run(tmp_path / "one", 3, *TAIL, *words)
    assert answers == alone[0] and same_policy(learned, alone[1])
    verified = sum(row.get("ahead/verified_tokens", 0) for row in metrics)
    assert verified > 0 and sum(row["cluster/ahead_s"] for row in metrics) > 0
    assert metrics[-1]["ahead/written_tokens"] == 0, "nothing comes after the last step"
    assert all(0 < row["ahead/accepted_share"] <= 1 for row in metrics if "ahead/accepted_share" in row)
    assert any(span.name == AHEAD for span in read_timeline(tmp_path / "two" / "timeline.json"))


@pytest.mark.soak
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("backend", ["local", "ray"])
def test_the_same_at_length(tmp_path, workers, backend):
    words = [f"cluster.workers={workers}", f"cluster.backend={backend}"]
    answers, learned, metrics = steps(tmp_path / "several", 12, *TAIL, *words)
    alone = run(tmp_path / "one", 12, *TAIL, "speculation.mode=plain")
    assert answers == alone[0] and same_policy(learned, alone[1])
    assert sum(row.get("ahead/verified_tokens", 0) for row in metrics) > 0


class Replacing(TrainLoop):
    """Keeps all completions, those of groups that were replaced too."""

    completed: list[tuple[int, list[int]]]

    def _rollout(self, indices: range, clock: Clock) -> list[Group]:
        groups = super()._rollout(indices, clock)
        done = [(i, c.tokens) for group in groups for i, c in group.completions.items()]
        self.completed = [*getattr(self, "completed", []), *done]
        return groups


def test_groups_that_are_replaced_within_a_step(tmp_path):
    """With dynamic sampling, what was written ahead may be used in the same step, by the same policy."""
    found = {}
    for workers in (2, 1):
        words = [*SMALL, *TAIL, f"run_dir={tmp_path / str(workers)}", f"cluster.workers={workers}", "steps=4"]
        opened = Run.create(load_config(None, [*words, "learn.dynamic_sampling=true", "reward.functions=[]"]))
        trainer = Replacing(opened.config, opened)
        try:
            for _ in range(3):
                trainer.step()
            found[workers] = sorted(trainer.completed), policy(trainer)
        finally:
            trainer.close()
        assert len(trainer.completed) > 3 * 3 * 2, "some groups were replaced"
    assert found[2][0] == found[1][0] and same_policy(found[2][1], found[1][1])


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.soak)])
def test_killed_at_random_moments(tmp_path, kills):
    """A third of the times while an idle worker writes ahead."""
    trainer = make(tmp_path / "run", "cluster.workers=3", "cluster.restarts=1000", "steps=1000", *TAIL)
    check(trainer, Killer(trainer, kill(trainer), kills), kills, tmp_path, *TAIL)
    decided = [json.loads(line) for line in (tmp_path / "run" / "decisions.jsonl").read_text().splitlines()]
    assert any(d["order"] == "writeahead" and d["requests"] for d in decided)


# How far


KNOWN = AheadCosts(
    accepted=30_000, flips=30, decoded=1000, decode_s=1.0, prefilled=10_000, prefill_s=2.0, idle_s=5.0, tail_s=5.0
)


def test_a_draft_ends_where_verifying_its_next_token_is_no_cheaper_than_decoding_it():
    far = how_far(KNOWN)
    survives = lambda n: (1 - 1 / KNOWN.tokens_per_flip) ** n  # noqa: E731
    assert KNOWN.ratio == pytest.approx(5) and KNOWN.tokens_per_flip == 1000
    assert survives(far + 2) * KNOWN.ratio < 1 < survives(far - 2) * KNOWN.ratio
    assert how_far(replace(KNOWN, flips=3000)) < far / 50, "little is worth writing where much flips"
    assert how_far(replace(KNOWN, prefill_s=20.0)) == 0, "nothing where verifying costs as much as decoding"
    assert KNOWN.accepted_of(1e9) == pytest.approx(1000) and KNOWN.accepted_of(1) == pytest.approx(1, rel=1e-2)


def test_no_more_are_begun_than_the_idle_time_is_enough_for():
    assert how_many(KNOWN, prompt=100) == pytest.approx(5000 / 50)
    assert how_many(replace(KNOWN, idle_s=0.0), prompt=100) == 0
    assert how_many(AheadCosts(), prompt=100) == float("inf"), "nothing is known yet"


def a_request(i: int, **sampling) -> Request:
    return Request(i, (1, 2, 3), SamplingParams(**{"max_tokens": 4000, "stop_token_ids": (9,)} | sampling))


def test_the_longest_expected_are_begun_first_and_not_too_far():
    ahead = Ahead(8192)
    ahead.costs = replace(KNOWN, idle_s=0.05)  # 50 tokens
    coming = [(a_request(i, min_tokens=3999), float(i // 2)) for i in range(6)]
    chosen = ahead.choose(coming)
    assert [r.id for r in chosen] == [4, 5, 2]
    assert {(r.sampling.max_tokens, r.sampling.min_tokens) for r in chosen} == {(how_far(KNOWN), how_far(KNOWN))}
    ahead.costs = replace(KNOWN, flips=1e6)
    assert ahead.choose(coming) == {}


def outcome(step: int, written: dict[int, list[int]], **stats) -> RolloutOutcome:
    tokens = {i: array("i", t) for i, t in written.items()}
    spent = [Activity("ahead", 0.0, 2.0), Activity("idle", 2.0, 3.0)]
    return RolloutOutcome(0, step, spent, [], 0.0, EngineStats(**stats), TrainingStats(), 0.0, 0.0, tokens)


def test_what_was_written_is_kept_until_its_turn_and_measured_then():
    ahead = Ahead(8192)
    first, second = [a_request(0)], [a_request(1), a_request(2)]
    ahead.take(1, first, [outcome(1, {1: [5, 6], 2: [5, 9]})])
    assert ahead.known([*first, *second]).keys() == {1, 2}
    left = ahead.left([*second, a_request(3)], {1: 50.0, 2: 50.0, 3: 50.0})
    assert left[3] == 50 and left[2] < left[1] < 50, "one is complete, one begun"
    ahead.take(2, second, [outcome(2, {}, ahead_tokens=4, ahead_accepted=3, ahead_flips=1, decoded_tokens=7)])
    assert not ahead.known(second) and ahead.costs.idle_s == 3 and ahead.costs.decoded == 4
    assert (ahead.costs.accepted, ahead.costs.flips) == (3, 1)


def test_what_the_same_policy_has_written_tells_nothing_of_flips():
    ahead = Ahead(8192)
    ahead.take(1, [a_request(0)], [outcome(1, {1: [5, 6]})])
    ahead.take(1, [a_request(1)], [outcome(1, {}, ahead_tokens=2, ahead_accepted=2)])
    assert ahead.costs.accepted == 0
