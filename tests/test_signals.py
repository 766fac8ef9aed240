"""SIGTERM, SIGHUP and Ctrl-C in every phase: a run is saved, says how to go on, and goes on to the same numbers."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline import Trainer as LibraryTrainer
from paceline import loop
from paceline.cluster.cluster import Cluster
from paceline.config import load_config
from paceline.errors import Stopped
from paceline.observe.live import LiveView
from paceline.observe.metrics import MetricsLog
from paceline.process.stopping import StoppedAtOnce
from paceline.run import Run
from paceline.tasks.reward_pool import RewardPool

from .digits import DIGITS
from .test_cli import QUICK, rows, wait_for
from .test_resume import SAME

WORDS = [
    "steps=3", "rollout.prompts=2", "rollout.samples=4", "rollout.max_tokens=24", "checkpoint.every=2",
    "log.tensorboard=false", "model.threads=1", "learn.lr=1e-4", "learn.algorithm=grpo", "task.difficulty=easy", DIGITS,
    # Drafts are verified by passes over several tokens, which round like single ones only in float64.
    "model.dtype=float64", "cluster.workers=1", "spot.when=update", "spot.max_interval=1",
]  # fmt: skip
SOAKED = [pytest.param("rollout", backend, marks=pytest.mark.soak) for backend in ("local", "ray")]
PHASES: dict[str, tuple[type, str]] = {
    "rollout": (LiveView, "rollout_started"),
    "rewards": (RewardPool, "collect"),
    "end of the rollout": (Cluster, "end"),
    "update": (Cluster, "update"),
    "drafter": (Cluster, "train_drafter"),
    "merge": (Cluster, "merge_drafters"),
    "answers": (Run, "write_answers"),
    "save": (Run, "save"),
    "log": (MetricsLog, "write"),
    "view": (LiveView, "step_done"),
}


MOMENTS = [
    pytest.param(phase, after, id=f"{phase} {'ends' if after else 'begins'}", marks=[pytest.mark.soak] * soak)
    for i, phase in enumerate(PHASES)
    for after, soak in ((i % 2 == 0, 0), (i % 2 == 1, 1))
]
"""Of each phase the beginning or the end; the other one in the long form."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A signal that nobody takes fails the test instead of ending all tests; whatever is set is put back."""

    def unexpected(number: int, frame: object) -> None:
        raise AssertionError(f"nobody took signal {number}")

    before = {number: signal.signal(number, unexpected) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        assert signal.getsignal(number) is unexpected, "a run puts handlers back"
        signal.signal(number, handler)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def strike(patch: pytest.MonkeyPatch, phase: str, number: int, at: int = 2, after: bool = False) -> list[int]:
    """Have this process sent a signal when a phase comes for the `at`th time, at its beginning or at its end."""
    owner, name = PHASES[phase]
    original, calls = getattr(owner, name), []

    def struck(self, *args, **options):
        if phase == "rewards" and not (options.get("block") or (args and args[0])):
            return []  # while answers are still being written: all verdicts are left for the end
        if phase == "rewards" and self.open < 8:
            return original(self, *args, **options)  # not the first that is collected in this step
        calls.append(1)
        if len(calls) == at and not after:
            os.kill(os.getpid(), number)
        result = original(self, *args, **options)
        while phase == "rewards" and not result:
            result = original(self, *args, **options)
        if len(calls) == at and after:
            os.kill(os.getpid(), number)
        return result

    patch.setattr(owner, name, struck)
    return calls


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[dict]:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    loop.train(load_config(None, [*WORDS, f"run_dir={run}"]))
    assert all(row["actor/grad_norm"] > 0 for row in rows(run)), "a step without a signal would hide what is lost"
    return rows(run)


@pytest.mark.parametrize(("phase", "after"), MOMENTS)
def test_sigterm_in_each_phase(phase, after, undisturbed, tmp_path):
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        calls = strike(patch, phase, signal.SIGTERM, 1 if phase == "save" else 2, after)
        with pytest.raises(Stopped) as stopped:
            loop.train(load_config(None, [*WORDS, f"run_dir={run}"]))
    assert calls and stopped.value.exit_code == 143
    said = re.fullmatch(r"stopped after step (\d+); resume with: paceline train --resume (.*)", str(stopped.value))
    assert said and said[2] == str(run)
    saved = Run.open(run).newest_checkpoint()
    assert saved is not None and saved.name == f"step-{int(said[1]):06d}"
    assert [row["step"] for row in rows(run)] == list(range(1, int(said[1]) + 1)), "what is saved is logged"
    loop.train(load_config(None), resume=run)
    assert [row["step"] for row in rows(run)] == [1, 2, 3]
    for row, same in zip(rows(run), undisturbed, strict=True):
        assert [row[name] for name in SAME] == pytest.approx([same[name] for name in SAME], abs=1e-9), row["step"]


@pytest.mark.parametrize(("phase", "backend"), [("update", "local"), *SOAKED])
def test_sigterm_with_several_workers(phase, backend, undisturbed, tmp_path):
    """Ray sets a handler of its own when it starts, which would end the driver unsaved."""
    if backend == "ray":
        pytest.importorskip("ray")
    words = ["cluster.workers=2", f"cluster.backend={backend}"]
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        strike(patch, phase, signal.SIGTERM)
        with pytest.raises(Stopped, match=f"after step {1 if phase == 'rollout' else 2}") as stopped:
            loop.train(load_config(None, [*WORDS, *words, f"run_dir={run}"]))
    assert stopped.value.exit_code == 143
    loop.train(load_config(None), resume=run)
    for row, same in zip(rows(run), undisturbed, strict=True):
        assert [row[name] for name in SAME] == pytest.approx([same[name] for name in SAME], abs=1e-6), row["step"]


def test_waiting_for_a_reward_is_not_waited_for(tmp_path):
    """A reward that takes longer than any scheduler's patience does not delay the stop."""
    reward, run, asked = tmp_path / "slow.py", tmp_path / "run", tmp_path / "asked"
    reward.write_text(
        f"import time, pathlib\ndef f(completions, **_):\n    pathlib.Path({str(asked)!r}).touch(); time.sleep(300)\n"
    )
    words = [*WORDS, f"reward.functions=[{{function: '{reward}:f'}}]", "reward.timeout_s=300", f"run_dir={run}"]

    def send() -> None:
        deadline = time.monotonic() + 120
        while not asked.exists():
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
        time.sleep(1.0)  # by then the last answer is written
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    began = time.monotonic()
    with pytest.raises(Stopped, match="stopped after step 0"):
        loop.train(load_config(None, words))
    assert time.monotonic() - began < 200, "it did not wait for the reward"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_while_loading_there_is_nothing_to_save(number, code, tmp_path, monkeypatch):
    original = Cluster.start

    def struck(self):
        os.kill(os.getpid(), number)
        return original(self)

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Cluster, "start", struck)
        with pytest.raises(Stopped, match="stopped while the run was being loaded; resume with: ") as stopped:
            loop.train(load_config(None, [*WORDS, "steps=1", f"run_dir={run}"]))
    assert stopped.value.exit_code == code
    assert Run.open(run).newest_checkpoint() is None
    loop.train(load_config(None), resume=run)
    assert [row["step"] for row in rows(run)] == [1]


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_stops_at_once(second, tmp_path, monkeypatch):
    original = Cluster.update

    def struck(self, *args):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), second)
        time.sleep(0.1)
        return original(self, *args)

    run = tmp_path / "run"
    monkeypatch.setattr(Cluster, "update", struck)
    with pytest.raises(StoppedAtOnce, match=f"without saving; .* paceline train --resume {run}") as stopped:
        loop.train(load_config(None, [*WORDS, f"run_dir={run}"]))
    assert stopped.value.exit_code == 128 + second
    assert Run.open(run).newest_checkpoint() is None


def test_a_terminal_that_goes_is_told_more_than_once(tmp_path, monkeypatch):
    """By the kernel and by the shell: that is not somebody who insists."""
    calls = strike(monkeypatch, "update", signal.SIGHUP, 1)
    strike(monkeypatch, "merge", signal.SIGHUP, 1)
    with pytest.raises(Stopped, match="stopped after step 1") as stopped:
        loop.train(load_config(None, [*WORDS, f"run_dir={tmp_path / 'run'}"]))
    assert stopped.value.exit_code == 129 and len(calls) == 1


def test_nohup_is_respected(tmp_path, monkeypatch):
    strike(monkeypatch, "rollout", signal.SIGHUP, 1)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        loop.train(load_config(None, [*WORDS, "steps=1", f"run_dir={tmp_path / 'run'}"]))
    finally:
        signal.signal(signal.SIGHUP, before)


def in_thread(act: Callable[[], object]) -> BaseException | None:
    caught: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as err:  # noqa: BLE001 (it is handed on)
            caught.append(err)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(300)
    assert not thread.is_alive(), "it did not end"
    return caught[0] if caught else None


def small(words: list[str]) -> dict:
    pairs = (word.partition("=") for word in words if not word.startswith(("steps", "reward")))
    values = {key: int(value) if value.isdigit() else value for key, _, value in pairs}
    return values | {"log.tensorboard": False, "learn.lr": 1e-4}


def test_off_the_main_thread(tmp_path):
    trainer = LibraryTrainer(steps=2, run_dir=tmp_path / "run", settings=small(WORDS))
    assert in_thread(trainer.train) is None
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]


def test_stop_from_another_thread(tmp_path, monkeypatch):
    """In a notebook, or inside an actor: where no signal arrives."""
    run = tmp_path / "run"
    trainer = LibraryTrainer(steps=100000, run_dir=run, settings=small(WORDS))
    original = LiveView.step_done

    def done(self, step, metrics):
        original(self, step, metrics)
        if step == 2:
            threading.Thread(target=trainer.stop).start()

    monkeypatch.setattr(LiveView, "step_done", done)
    stopped = in_thread(trainer.train)
    assert isinstance(stopped, Stopped) and "stopped after step" in str(stopped)
    newest = Run.open(run).newest_checkpoint()
    assert newest is not None and newest.name == f"step-{rows(run)[-1]['step']:06d}"
    with pytest.raises(Stopped):  # asked before it began
        again = LibraryTrainer.resume(run)
        again.stop()
        again.train()


def launch(*words: str, code: str = "", **options) -> subprocess.Popen:
    """The command, with SIGHUP as a login has it, and with something done before."""
    start = (
        f"import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n{code}\nfrom paceline.cli import main; main()"
    )
    return subprocess.Popen([sys.executable, "-c", start, "train", *words], text=True, **options)


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_exit_code_and_sentence(number, code, tmp_path):
    run = tmp_path / "run"
    process = launch(*QUICK, "steps=100000", f"run_dir={run}", **PIPES)
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(rows(run)) >= 1, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert re.fullmatch(rf"paceline: stopped after step \d+; resume with: paceline train --resume {run}\n", err)


def test_twice_is_one_line_and_no_traceback(tmp_path):
    run = tmp_path / "run"
    slow = (
        "import time; from paceline.cluster.cluster import Cluster\n"
        f"def update(*args):\n    open({str(tmp_path / 'there')!r}, 'w').close(); time.sleep(300)\n"
        "Cluster.update = update"
    )
    process = launch(*QUICK, f"run_dir={run}", code=slow, **PIPES)
    wait_for((tmp_path / "there").exists, process)
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert process.poll() is None, "the first one waits for the update"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and err.count("\n") == 1 and "stopped at once, without saving" in err


def test_a_terminal_that_is_closed(tmp_path):
    """Both streams fail from then on; the run is saved all the same, and its exit code says why it ended."""
    run = tmp_path / "run"
    parent, child = pty.openpty()
    process = launch(*QUICK, "steps=100000", f"run_dir={run}", stdout=child, stderr=child, stdin=child,
                     start_new_session=True)  # fmt: skip
    os.close(child)
    wait_for_output(parent, run, process)
    os.close(parent)  # it has no controlling terminal, so it is told nothing yet: writing fails
    seen = len(rows(run))
    wait_for(lambda: len(rows(run)) >= seen + 2, process)
    process.send_signal(signal.SIGHUP)
    assert process.wait(120) == 129
    newest = Run.open(run).newest_checkpoint()
    assert newest is not None and newest.name == f"step-{rows(run)[-1]['step']:06d}"


def wait_for_output(parent: int, run: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while not ((run / "metrics.jsonl").exists() and rows(run)):
        assert process.poll() is None and time.monotonic() < deadline
        os.read(parent, 65536)


def test_a_reader_that_goes_does_not_end_the_run(tmp_path):
    """`paceline train | head -1`."""
    run = tmp_path / "run"
    process = launch(*QUICK, f"run_dir={run}", **PIPES)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4] and not err


def workers_of(pid: int) -> set[int]:
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = re.search(r"\nPPid:\s*(\d+)", (folder / "status").read_text())
            except OSError:
                continue
            if parent and int(parent[1]) == pid:
                found.add(int(folder.name))
    return found


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_no_orphans_when_stopped_while_workers_load(tmp_path):
    run = tmp_path / "run"
    process = launch(*QUICK, "cluster.workers=2", f"run_dir={run}", **PIPES)
    children: set[int] = set()

    def started() -> bool:
        children.update(workers_of(process.pid))
        return len(children) >= 3  # two workers and a reward process

    wait_for(started, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert err == f"paceline: stopped while the run was being loaded; resume with: paceline train --resume {run}\n"
    deadline = time.monotonic() + 30
    while any(map(alive, children)):
        assert time.monotonic() < deadline, "a process was left"
        time.sleep(0.05)


def test_processes_that_a_run_has_started_leave_it_to_the_driver():
    """Slurm and systemd send SIGTERM to every process of a job. Programs that such a process starts can be ended."""
    code = (
        "import subprocess, sys, time; from paceline.process.stopping import leave_to_driver; leave_to_driver()\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(60)'])\n"
        "time.sleep(0.1); child.terminate(); print('ended', child.wait(), flush=True); print(sys.stdin.readline())"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("ended"):
        assert line, "it ended early"
    assert line == f"ended {-signal.SIGTERM}\n"
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        process.send_signal(number)
    assert process.communicate("still there", timeout=60)[0].strip() == "still there"
    assert process.returncode == 0
