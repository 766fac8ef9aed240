"""Threads wait passively on a CPU that others use, and that is decided before torch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paceline.process import waiting
from paceline.process.waiting import CpuUse, advice, choose_waiting, measure_use

CORE = "cpu{0} {1} 0 {2} {3} 0 0 0 0 0 0\n"


def stat(*idle: int, at: int) -> str:
    """/proc/stat after `at` ticks, of which each core was idle for so many."""
    return "cpu 1 2 3\n" + "".join(CORE.format(i, at - n, 0, n) for i, n in enumerate(idle)) + "intr 5\n"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Cores that are idle for these shares of the time, and what a container may use."""

    def make(*idle: float, quota: str | None = None) -> None:
        texts = iter([stat(*(0 for _ in idle), at=1000), stat(*(int(100 * share) for share in idle), at=1100)] * 4)
        file = tmp_path / "stat"

        class Stat:
            def read_text(self) -> str:
                return next(texts)

        monkeypatch.setattr(waiting, "STAT", Stat())
        monkeypatch.setattr(waiting, "QUOTAS", tmp_path)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(len(idle))))
        monkeypatch.setattr(waiting, "SAMPLE_S", 0.0)
        if quota:
            (tmp_path / "cpu.max").write_text(quota)
        assert not file.exists()

    before = {name: os.environ.pop(name) for name in waiting.GIVEN if name in os.environ}
    monkeypatch.setattr(waiting, "_chosen", [])
    yield make
    for name in waiting.GIVEN:
        os.environ.pop(name, None)
    os.environ.update(before)


def test_use_is_of_the_cores_that_are_ours(machine):
    machine(1.0, 0.25, 0.5)
    use = measure_use(0.0)
    assert use.cores == 3 and use.busy == pytest.approx(1.25) and use.shared
    assert use.describe() == "1.2 of 3 cores busy"


@pytest.mark.parametrize(
    ("use", "shared"),
    [
        (CpuUse(2, 0.1), False),
        (CpuUse(2, 0.9), True),
        (CpuUse(16, 0.5), True),
        (CpuUse(1, 1.0), False),
        (CpuUse(8, 0.0, quota=2.0), True),
        (CpuUse(8, 0.0, quota=8.0), False),
    ],
)
def test_when_a_cpu_is_shared(use, shared):
    assert use.shared is shared


def test_it_is_chosen_when_cores_are_busy_and_nobody_has_decided(machine, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for idle, quota, chosen in (
        ((0.1, 0.9), None, "1.0 of 2 cores busy"),
        ((1.0, 1.0), None, None),
        ((1.0, 1.0), "100000 100000", "0.0 of 2 cores busy, 1 allowed by the container"),
    ):
        os.environ.pop("OMP_WAIT_POLICY", None)
        waiting._chosen.clear()
        machine(*idle, quota=quota)
        choose_waiting()
        assert os.environ.get("OMP_WAIT_POLICY") == ("PASSIVE" if chosen else None)
        if chosen:
            assert (
                advice(2) == f"{chosen} at the start: threads wait for each other passively (OMP_WAIT_POLICY=PASSIVE)"
            )
    os.environ.pop("OMP_WAIT_POLICY", None)
    os.environ["KMP_BLOCKTIME"] = "200"
    choose_waiting()
    assert "OMP_WAIT_POLICY" not in os.environ, "the user has decided"


def test_too_late_is_said(machine, monkeypatch):
    machine(0.0, 0.0)
    assert "start Python with OMP_WAIT_POLICY=PASSIVE, or set model.threads=1" in advice(2)
    assert advice(1) is None, "one thread waits for nobody"
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert advice(2) is None


@pytest.mark.parametrize("how", ["paceline.Engine", "paceline.cli.main()"])
def test_before_torch_is_loaded_and_for_workers(how):
    """In a process of its own, with a CPU that looks busy."""
    code = (
        "import sys; sys.argv = ['paceline', 'generate']\n"
        "import os; os.environ.pop('OMP_WAIT_POLICY', None)\n"
        "from paceline.process import waiting\n"
        "import paceline, paceline.cli\n"
        "waiting.measure_use = lambda: waiting.CpuUse(2, 2.0)\n"
        "assert 'torch' not in sys.modules\n"
        f"try:\n    {how}\nexcept SystemExit:\n    pass\n"
        "print(os.environ['OMP_WAIT_POLICY'])\n"
    )
    clean = {key: value for key, value in os.environ.items() if key not in waiting.GIVEN}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean, timeout=300)
    assert done.stdout.strip().endswith("PASSIVE"), done.stderr
