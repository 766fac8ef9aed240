"""Ray over several hosts: whatever becomes of names, hosts and links, a run gives the same tokens and the same policy
as one worker alone, or stops with one sentence and goes on from what it has saved.

One case by its name: pytest -m soak tests/hosts -k for_a_while
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from paceline.run import Run

from ..cluster.runs import SMALL, run, same_policy
from .hosts import Hosts, Names, make_hosts, start_ray, wait_for, why_not

pytest.importorskip("ray")
_REASON = why_not()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))

STEPS = 3
LIMIT = 20.0  # seconds, cluster.timeout_s
SLACK = 40.0  # seconds for saving, closing, and a machine with other things to do
WHOLE = 400.0  # seconds after which a run that has not ended hangs
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(tmp_path_factory.mktemp("alone") / "run", STEPS, "speculation.mode=plain")


class Drive:
    """A run whose driver is on host a."""

    def __init__(self, hosts: Hosts, folder: Path, address: str, workers: int, steps: int, pause: int):
        self.hosts, self.folder, self.run = hosts, folder, folder / "run"
        words = [w for w in SMALL if not w.startswith(("cluster.workers", "checkpoint.every"))]
        words += [f"run_dir={self.run}", f"steps={steps}", f"cluster.workers={workers}", "cluster.backend=ray"]
        words += [f"cluster.address={address}", f"cluster.timeout_s={LIMIT}", "checkpoint.every=1"]
        self.output = folder / "said"
        self.job = self._start(pause, *words)

    def _start(self, pause: int, *words: str):
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "tests.hosts.drive", self.folder, str(pause), "train", *words]
        return self.hosts["a"].start(*command, output=self.output, env=self.hosts.env | {"PYTHONPATH": path})

    @property
    def said(self) -> str:
        return self.output.read_text()

    def at_pause(self) -> None:
        """All hosts have written answers of the step, and its update is next."""
        there = self.folder / "paused"
        wait_for(lambda: there.exists() or self.job.poll() is not None, WHOLE, "the run has not come to its pause")
        assert there.exists(), self.said

    def go(self) -> float:
        (self.folder / "go").touch()
        return time.monotonic()

    def wait(self) -> int:
        wait_for(lambda: self.job.poll() is not None, WHOLE, f"the run hangs; it said:\n{self.said[-3000:]}\n")
        return self.job.returncode

    def resume(self) -> int:
        self.output.write_text("")
        self.job = self._start(0, "--resume", str(self.run))
        return self.wait()

    def places(self) -> dict[str, str]:
        return json.loads((self.folder / "places.json").read_text())

    def check_same(self, alone) -> None:
        rows = [json.loads(line) for line in (self.folder / "answers.jsonl").read_text().splitlines()]
        steps: dict[int, dict[int, list[int]]] = {}
        for step, answers in rows:
            answers = {int(i): tokens for i, tokens in answers.items()}
            assert steps.setdefault(step, answers) == answers, "a step that is done again after --resume is the same"
        count = len(steps)
        assert [steps[i] for i in range(count)] == alone[0][:count]
        newest = Run.open(self.run).newest_checkpoint()
        assert newest is not None and newest.name == f"step-{STEPS:06d}" and count == STEPS
        assert same_policy(load_file(newest / "model.safetensors"), alone[1])

    def check_clean_stop(self, began: float) -> None:
        """Exit code 1, a sentence, within three time limits."""
        assert time.monotonic() - began < 3 * LIMIT + SLACK, self.said
        assert self.job.returncode == 1, self.said
        assert "Traceback" not in self.said, self.said
        assert "paceline: " in self.said and "--resume" in self.said, self.said
        assert Run.open(self.run).newest_checkpoint() is not None

    def actors(self) -> list[int]:
        """Processes of workers on any host, as numbered outside."""
        return [pid for host in self.hosts for pid in host.find("ray::Actor")]


@contextmanager
def driving(
    folder: Path, names: Names, hosts: int = 3, workers: int = 3, steps: int = STEPS, pause: int = 0
) -> Iterator[Drive]:
    with make_hosts(folder, names, hosts) as made:
        yield Drive(made, folder, start_ray(made), workers, steps, pause)


def test_two_hosts_with_the_names_of_debian(tmp_path):
    """Their own names lead to 127.0.1.1, at which nobody else can reach them."""
    one = run(tmp_path / "alone", 1, "speculation.mode=plain")
    with driving(tmp_path, "debian", hosts=2, workers=2, steps=1) as drive:
        assert drive.wait() == 0, drive.said
        assert set(drive.places().values()) == {"host-a (10.77.0.1)", "host-b (10.77.0.2)"}
        answers = json.loads((tmp_path / "answers.jsonl").read_text())[1]
        assert {int(i): tokens for i, tokens in answers.items()} == one[0][0]
        newest = Run.open(drive.run).newest_checkpoint()
        assert newest is not None and same_policy(load_file(newest / "model.safetensors"), one[1])


@pytest.mark.soak
@pytest.mark.parametrize("names", ["resolve", "debian", "none"])
def test_undisturbed(alone, tmp_path, names):
    with driving(tmp_path, names) as drive:
        assert drive.wait() == 0, drive.said
        assert sorted(drive.places().values()) == [f"host-{x} (10.77.0.{i})" for i, x in enumerate("abc", 1)]
        drive.check_same(alone)


def disturbed(alone, folder: Path, disturb: Callable[[Drive], object], restore: Callable[[Drive], object]) -> None:
    """Something happens before the update of the second step, and is over when the run is resumed, if it has to be."""
    with driving(folder, "debian", pause=2) as drive:
        drive.at_pause()
        disturb(drive)
        began = drive.go()
        if drive.wait() != 0:
            drive.check_clean_stop(began)
            restore(drive)
            assert drive.resume() == 0, drive.said
        drive.check_same(alone)


@pytest.mark.soak
def test_a_host_is_killed(alone, tmp_path):
    disturbed(alone, tmp_path, lambda d: d.hosts.kill("c"), lambda d: None)


@pytest.mark.soak
def test_a_link_goes_down_for_good(alone, tmp_path):
    disturbed(alone, tmp_path, lambda d: d.hosts.down("c"), lambda d: None)


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [3.0, 12.0, 30.0])
def test_a_link_goes_down_for_a_while(alone, tmp_path, seconds):
    with driving(tmp_path, "debian", pause=2) as drive:
        drive.at_pause()
        drive.hosts.down("c")
        began = drive.go()
        time.sleep(seconds)
        drive.hosts.up("c")
        if drive.wait() != 0:
            drive.check_clean_stop(began)
            assert drive.resume() == 0, drive.said
        drive.check_same(alone)


@pytest.mark.soak
def test_two_workers_cannot_see_each_other(alone, tmp_path):
    disturbed(alone, tmp_path, lambda d: d.hosts.cut("b", "c"), lambda d: d.hosts.restore())


@pytest.mark.soak
def test_two_workers_cannot_see_each_other_from_the_start(alone, tmp_path):
    with make_hosts(tmp_path, "resolve") as hosts:
        address = start_ray(hosts)
        hosts.cut("b", "c")
        drive = Drive(hosts, tmp_path, address, 3, STEPS, 0)
        began = time.monotonic()
        if drive.wait() != 0:
            assert time.monotonic() - began < 3 * LIMIT + SLACK, drive.said
            assert "Traceback" not in drive.said and "cannot reach worker" in drive.said, drive.said
        else:
            drive.check_same(alone)


@pytest.mark.soak
def test_the_head_of_the_cluster_is_killed(tmp_path):
    """Workers still answer for a while, so a run that is nearly done ends well; this one is not."""
    with driving(tmp_path, "resolve", steps=1000, pause=2) as drive:
        drive.at_pause()
        for pid in drive.hosts["a"].find("gcs_server"):
            os.kill(pid, signal.SIGKILL)
        began = drive.go()
        assert drive.wait() == 1, drive.said
        drive.check_clean_stop(began)
        assert "the Ray cluster at 10.77.0.1:6379 is gone" in drive.said
        wait_for(lambda: not drive.actors(), 10, "actors outlive the driver")


@pytest.mark.soak
def test_actors_end_with_the_driver(tmp_path):
    with driving(tmp_path, "resolve", pause=2) as drive:
        drive.at_pause()
        assert len(drive.actors()) == 3
        for pid in drive.hosts["a"].find("tests.hosts.drive"):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not drive.actors(), 30, "actors outlive the driver")
