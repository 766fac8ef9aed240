"""The simulation against what can be worked out by hand, its laws, and a real run."""

from __future__ import annotations

import json
import random
from statistics import median

import pytest

from paceline.commands.simulate import parse_workers
from paceline.config import load_config
from paceline.errors import UserError
from paceline.loop import train
from paceline.report.rundata import read_run
from paceline.simulate.costs import BatchCurve, StepCosts, StepWork
from paceline.simulate.gpus import ratios
from paceline.simulate.idle import Coupling, gradients_in_tail, write_ahead
from paceline.simulate.measured import measure_run
from paceline.simulate.rollout import Moving, RolloutSimulation
from paceline.simulate.simulator import STAGES, Simulator, Techniques
from paceline.simulate.worker import SimRequest, SimWorker

from ..test_cli import here

PACE = BatchCurve.of([(1, 1.0), (2, 1.5), (4, 2.0)])
COSTS = StepCosts(PACE.scaled(2.0), PACE, prefill_s=0.0, gradient_token_s=0.1, update_s=1.0)


def requests(*lengths: float, first_s: float = 0.0) -> list[SimRequest]:
    return [SimRequest(i, float(n), first_s) for i, n in enumerate(lengths)]


def rollout(lengths: list[float], workers: int, **more) -> RolloutSimulation:
    options = {"group": 1, "curve": PACE, "slots": 64} | more
    return RolloutSimulation(requests(*lengths), workers=workers, **options)


def test_a_curve_goes_through_what_was_measured():
    assert PACE.at(1) == 1.0 and PACE.at(2) == 1.5 and PACE.at(4) == 2.0
    assert 1.5 < PACE.at(3) < 2.0
    assert PACE.at(0.5) == 1.0, "a smaller batch takes no less"
    assert PACE.at(8) == 4.0, "a full device takes twice as long for twice as many"


def test_one_worker_by_hand():
    """Two together for 10 tokens at 1.5 s, then the longer one for 20 more at 1 s."""
    found = rollout([10, 30], 1).run()
    assert found.ended == {0: 15.0, 1: 35.0} and found.seconds == 35.0 and not found.dry


def test_prefilling_stops_the_others():
    worker = SimWorker({r.id: r for r in requests(4, 4, first_s=3.0)}, PACE, slots=2)
    worker.assign([0], 0.0)
    assert worker.next_end == 3.0 + 4 * 1.0
    worker.assign([1], 5.0)  # the first has 2 tokens by now
    assert worker.finish_next() == (0, 5.0 + 3.0 + 2 * 1.5)


def test_those_that_wait_are_taken_by_who_has_run_dry():
    """One slot each: worker 0 gets the requests 0 and 2, worker 1 the others."""
    found = rollout([100, 1, 1, 1], 2, slots=1).run()
    assert found.seconds == 100.0, "worker 1 has decoded all the others meanwhile"
    assert found.dry == [(3.0, 100.0)]


def test_running_sequences_move_where_that_ends_the_rollout_sooner():
    lengths = [60, 60, 60, 60, 5, 5, 5, 5]
    alone = rollout(lengths, 2, group=4).run()
    moving = rollout(lengths, 2, group=4, moving=Moving(0.0, 0.0, 60)).run()
    assert moving.moved and moving.seconds < alone.seconds
    assert moving.dry_s < alone.dry_s
    dear = rollout(lengths, 2, group=4, moving=Moving(100.0, 0.0, 60)).run()
    assert not dear.moved and dear.seconds == alone.seconds


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("move", [False, True])
def test_every_request_ends_once_and_time_adds_up(seed: int, move: bool):
    dice = random.Random(seed)
    workers = dice.randint(1, 5)
    lengths = [float(dice.randint(1, 400)) for _ in range(4 * dice.randint(1, 12))]
    moving = Moving(0.001, 10.0, 400) if move else None
    found = rollout(lengths, workers, group=4, slots=dice.randint(1, 8), moving=moving).run()
    assert sorted(found.ended) == list(range(len(lengths)))
    assert found.seconds == max(found.ended.values())
    assert max(lengths) <= found.seconds + 1e-6, "no faster than the longest one alone"
    assert found.seconds <= sum(lengths) * PACE.at(1) + 1e-6 + sum(lengths), "no slower than one after the other"
    assert 0.0 <= found.dry_s <= (workers - 1) * found.seconds + 1e-6


def test_gradients_wait_for_their_groups_and_fit_into_the_idle_time():
    simulation = rollout([10, 10, 50, 50], 2, group=2)
    found = simulation.run()
    work = StepWork((10, 10, 50, 50), 2, update_tokens=120.0)
    done = gradients_in_tail(found, work, gradient_token_s=0.1)
    assert done == pytest.approx(6.0), "those of the first group, which is ready; the second ends the rollout"
    assert gradients_in_tail(found, work, gradient_token_s=10.0) == pytest.approx(found.dry_s), "as far as time allows"


def test_writing_ahead_by_hand():
    assert write_ahead(30.0, 1, [10, 100], PACE, 64) == ([10.0, 25.0], 30.0), "15 s for two, 15 for the longer one"
    assert write_ahead(30.0, 1, [10, 100], PACE, 1) == ([10.0, 0.0], 10.0), "one slot"
    written, spent = write_ahead(1e3, 3, [10, 100, 7, 3], PACE, 64)
    assert written == [10.0, 100.0, 7.0, 3.0]
    assert spent == pytest.approx(3 * 1.5 + 7 * 1.0 + 100.0 + 7.0), "with nothing left to write they are idle"
    assert write_ahead(0.0, 1, [10], PACE, 64) == ([0.0], 0.0)


def test_a_run_that_writes_ahead_says_how_alike_its_policies_are(tmp_path):
    words = ["steps=4", "rollout.prompts=3", "rollout.samples=4", "rollout.max_tokens=160", "cluster.workers=2"]
    words += ["rollout.write_ahead=true", "spot.when=off", "log.tensorboard=false", "model.threads=1"]
    run, rows = train(load_config(None, [*words, f"run_dir={tmp_path / 'run'}"]))
    found = measure_run(read_run(run.folder))
    measured = [row["ahead/tokens_per_flip"] for row in rows[1:] if "ahead/tokens_per_flip" in row]
    assert measured and found.tokens_per_flip == pytest.approx(median(measured))
    assert found.dry > 0


def test_coupling_keeps_tokens_up_to_the_first_flip():
    coupling = Coupling(100.0)
    kept = [coupling.kept(1e9, request, 0) for request in range(4000)]
    assert sum(kept) / len(kept) == pytest.approx(100.0, rel=0.05)
    assert all(coupling.kept(5.0, request, 0) <= 5.0 for request in range(100))
    assert coupling.kept(50.0, 3, 1) == coupling.kept(50.0, 3, 1)


def heavy_tail(seed: int) -> list[StepWork]:
    dice = random.Random(seed)
    steps = []
    for _ in range(4):
        lengths = tuple(min(4000, max(8, round(dice.lognormvariate(4.5, 1.2)))) for _ in range(64))
        steps.append(StepWork(lengths, 8, 0.6 * sum(lengths)))
    return steps


def test_each_technique_helps_where_there_is_a_tail():
    simulator = Simulator(COSTS, slots=256, max_tokens=4000, coupling=Coupling(1500.0))
    found = [simulator.run(heavy_tail(0), 4, techniques) for techniques in STAGES.values()]
    assert [round(step.step_s, 6) for step in found] == sorted((round(s.step_s, 6) for s in found), reverse=True)
    assert found[1].step_s < found[0].step_s and found[-1].step_s < found[1].step_s
    assert found[1].idle == found[1].dry, "nothing is done in idle time"
    assert found[-1].idle < 0.1 * found[1].idle + 1e-9


def test_writing_ahead_alone_shortens_the_next_rollouts():
    simulator = Simulator(COSTS, slots=256, max_tokens=4000, coupling=Coupling(1500.0))
    before = simulator.run(heavy_tail(1), 4, Techniques())
    after = simulator.run(heavy_tail(1), 4, Techniques(ahead=True))
    assert after.rollout_s < before.rollout_s and 0.3 < after.kept <= 1.0
    uncoupled = Simulator(COSTS, 256, 4000, Coupling(1.0)).run(heavy_tail(1), 4, Techniques(ahead=True))
    assert uncoupled.kept < 0.05 and uncoupled.rollout_s >= before.rollout_s, "verifying what is not kept costs"


def test_one_worker_has_nothing_to_do_ahead():
    simulator = Simulator(COSTS, 256, 4000, Coupling(1500.0))
    plain, *others = (simulator.run(heavy_tail(2), 1, techniques) for techniques in list(STAGES.values())[1:])
    assert plain.dry == 0.0 and all(step == plain for step in others)


def test_another_gpu():
    assert ratios("H200", "h100") == pytest.approx((3.35 / 4.8, 1.0))
    faster = COSTS.on(2.0, 4.0)
    assert faster.adaptive.at(2) == 0.75 and faster.gradient_token_s == 0.025
    with pytest.raises(UserError, match="--gpu H9000 is not among the GPUs that are known: A100"):
        ratios("H200", "H9000")


@pytest.mark.parametrize("text", ["0", "x", "1,", "9999", "-1", "1;2"])
def test_bad_numbers_of_workers(text: str):
    with pytest.raises(UserError, match="is not a list of numbers from 1 to 4096"):
        parse_workers(text)
    assert parse_workers("1, 2,8") == [1, 2, 8]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "trained"
    words = ["steps=3", "rollout.prompts=4", "rollout.samples=4", "rollout.max_tokens=120", "cluster.workers=2"]
    words += ["log.tensorboard=false", "model.threads=1", f"run_dir={folder}"]
    train(load_config(None, words))
    return folder


def test_a_real_run_is_measured(trained):
    run = read_run(trained)
    found = measure_run(run)
    assert found.workers == 2 and len(found.steps) == 2 and found.max_tokens == 120
    assert sum(found.steps[0].lengths) == sum(run.answers[1]["lengths"]) and found.steps[0].group == 4
    assert found.costs.adaptive.at(4) > 0 and found.costs.gradient_token_s > 0
    assert found.rollout_s < found.step_s and 0 <= found.dry < 1


def test_the_command_says_what_it_found(trained, capsys):
    assert here("simulate", str(trained), "--workers", "1,2,4", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["workers"] for row in rows] == [1] * 2 + [2] * 5 + [4] * 5
    assert all(row["step_s"] > 0 and row["times_plain"] > 0 for row in rows)
    assert here("simulate", str(trained), "--workers", "2") == 0
    table = capsys.readouterr().out
    assert "as measured" in table and "+ writing ahead" in table and "Assumed:" in table


def test_the_command_says_what_it_lacks(trained, tmp_path, capsys):
    for words, sentence in [
        ([trained, "--gpu", "H100"], "say with --measured-on on which one it was made"),
        ([trained, "--workers", "many"], "--workers many is not a list of numbers"),
        ([tmp_path], "is not a run directory"),
    ]:
        assert here("simulate", *map(str, words)) == 2
        assert sentence in capsys.readouterr().err
