"""Drivers, workers, rewards and actors are killed at any moment, and the run is resumed until it is done: nothing is
lost, doubled or changed, and nothing is left behind."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from paceline.process.guard import descendants

from .cluster.runs import SMALL
from .processes import gone, runs

WORDS = [
    *SMALL, "steps=12", "rollout.max_tokens=60", "checkpoint.every=2", "cluster.workers=2", "cluster.restarts=100000",
    "reward.workers=2", "spot.when=tail", "spot.max_interval=1", "model.threads=1",
]  # fmt: skip
SAME = ("critic/rewards/mean", "actor/pg_loss", "response_length/mean", "actor/grad_norm")
KINDS = {
    "worker": "paceline.cluster.local_worker",
    "reward": "paceline.tasks.reward_worker",
    "actor": "ray::Actor",
}
DEADLINE = 600.0  # seconds for one step of all this: turns a hang into a failure
SPARED = ("worker", "actor")
EARLY = 0.1  # share of the strikes at a driver that has no workers yet
TOGETHER = 4.0  # seconds in which a second worker is spared: two at once may take the state of the run with them


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def rows(run: Path) -> dict[int, dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    assert steps == list(range(1, len(steps) + 1)), f"a step is missing or there twice: {steps}"
    return {line["step"]: line for line in lines}


class Chaos:
    """A run and all that is done to it."""

    def __init__(self, run: Path, words: list[str], kills: int, environment: dict[str, str]):
        self.run = run
        self.words = words
        self.environment = environment
        self.dice = random.Random(kills)
        self.killed: Counter[str] = Counter()
        self.kills = kills
        self.quota = -(-kills // 3)
        """Kills of one kind after which others are struck."""
        self.seen: set[int] = set()

    def start(self) -> subprocess.Popen:
        resume = (self.run / "config.yaml").exists()
        words = ["--resume", str(self.run)] if resume else [*self.words, f"run_dir={self.run}"]
        self.log = open(self.run.with_suffix(".log"), "a")  # noqa: SIM115 (closed with the process)
        command = [sys.executable, "-m", "paceline", "train", *words]
        return subprocess.Popen(command, stdout=self.log, stderr=self.log, env=os.environ | self.environment)

    def kill_until_done(self) -> None:
        """Strike at random moments until there were enough kills; then let the run finish."""
        driver = self.start()
        last = time.monotonic()
        while True:
            left = self.kills - self.killed.total()
            try:
                code = driver.wait(self.dice.uniform(0.2, 3.0) if left > 0 else DEADLINE)
            except subprocess.TimeoutExpired:
                assert left > 0, "the run hangs"
                last = self.strike(driver, last)
                continue
            assert code in (0, 1, -signal.SIGKILL), (code, self.said())
            if code == 1:
                assert "--resume" in self.said() and "Traceback" not in self.said(), self.said()
            assert gone(self.seen), f"left behind: {[command_of(pid) for pid in self.seen if runs(pid)]}"
            if code == 0:
                if left <= 0:
                    return
                self.begin_again()
            driver = self.start()

    def strike(self, driver: subprocess.Popen, last: float) -> float:
        """Kill the driver, or one of its processes of a random kind -> when a worker was struck last."""
        below = descendants(driver.pid)
        self.seen |= set(below)
        targets = {kind: [pid for pid in below if name in command_of(pid)] for kind, name in KINDS.items()}
        started = any(targets[kind] for kind in SPARED)
        # While it starts, only now and then: on a slow machine it would never get any further.
        if (self.run / "config.yaml").exists() and (started or self.dice.random() < EARLY):
            targets["driver"] = [driver.pid]
        if time.monotonic() - last < TOGETHER:
            targets = {kind: pids for kind, pids in targets.items() if kind not in SPARED}
        # Where processes start slowly, those that start first would take all kills.
        kinds = [kind for kind, pids in targets.items() if pids and self.killed[kind] < self.quota]
        if not kinds:
            return last
        kind = self.dice.choice(kinds)
        try:
            os.kill(self.dice.choice(targets[kind]), signal.SIGKILL)
        except ProcessLookupError:
            return last
        if kind == "driver":
            driver.wait()
        self.killed[kind] += 1
        return time.monotonic() if kind in SPARED else last

    def begin_again(self) -> None:
        """The run was done before there were enough kills: check it, and make it once more."""
        self.check()
        self.run = self.run.with_name(self.run.name + "x")

    def said(self) -> str:
        return self.run.with_suffix(".log").read_text()[-4000:]

    expected: dict[int, dict]

    def check(self) -> None:
        after = rows(self.run)
        assert after.keys() == self.expected.keys()
        for step, row in after.items():
            for name in SAME:
                assert row[name] == pytest.approx(self.expected[step][name], abs=1e-6), (step, name)
        answers = [json.loads(line) for line in (self.run / "answers.jsonl").read_text().splitlines()]
        assert [row["step"] for row in answers] == list(self.expected)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, dict]:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    words = [*WORDS, "cluster.workers=1", "spot.when=off", "speculation.mode=plain", f"run_dir={run}"]
    subprocess.run([sys.executable, "-m", "paceline", "train", *words], check=True, stdout=subprocess.DEVNULL)
    return rows(run)


@pytest.mark.parametrize(
    ("backend", "kills"),
    [
        ("local", 6),
        pytest.param("local", 160, marks=pytest.mark.soak),
        pytest.param("ray", 40, marks=pytest.mark.soak),
    ],
)
def test_killed_at_any_moment_and_resumed(tmp_path, undisturbed, backend, kills, capsys):
    if backend == "ray":
        pytest.importorskip("ray")
    # Ray keeps sockets there, whose paths must be short.
    temporary = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp")) if backend == "ray" else tmp_path / "tmp"
    temporary.mkdir(exist_ok=True)
    shared = set(os.listdir("/dev/shm"))
    chaos = Chaos(tmp_path / "run", [*WORDS, f"cluster.backend={backend}"], kills, {"TMPDIR": str(temporary)})
    chaos.expected = undisturbed
    chaos.kill_until_done()
    chaos.check()
    with capsys.disabled():
        print(f"\n{kills} kills: {dict(chaos.killed)}")
    struck = {"driver", "reward", "worker" if backend == "local" else "actor"}
    assert min(chaos.killed[kind] for kind in struck) >= kills // 10, chaos.killed
    others = ("torchinductor_", "ray")  # torch's own cache, Ray's own logs
    left = [path.name for path in temporary.iterdir() if not path.name.startswith(others)]
    assert left == [], "something is left in the folder for temporary files"
    if kills > 100:  # where nothing else runs that could have left something there
        assert set(os.listdir("/dev/shm")) <= shared
    if backend == "ray":
        shutil.rmtree(temporary)
