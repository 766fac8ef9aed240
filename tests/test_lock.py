"""One process at a time on a run directory; death lets go of it, and children do not keep it."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.config import load_config
from paceline.errors import UserError
from paceline.files.lock import LOCK, RunLock
from paceline.loop import TrainLoop, train
from paceline.run import Run

from .test_cli import QUICK, here, rows, wait_for


def snapshot(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file()}


@pytest.fixture
def live(tmp_path):
    """A run that another process is at, and stands still."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "paceline", "train", *QUICK, "steps=100000", f"run_dir={run}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: (run / "metrics.jsonl").exists() and len(rows(run)) >= 3, process)
        process.send_signal(signal.SIGSTOP)
        yield run, process
    finally:
        process.kill()
        process.communicate()


def test_a_second_process_says_so_and_changes_nothing(live, capsys):
    run, process = live
    time.sleep(0.2)
    before = snapshot(run)
    for words in (["--resume", str(run)], [*QUICK, f"run_dir={run}"]):
        assert here("train", *words) == 2
        said = capsys.readouterr().err
        assert f"{run} is in use by process {process.pid} on {os.uname().nodename}" in said and said.count("\n") == 1
        assert snapshot(run) == before
    assert here("compare", *QUICK, f"run_dir={run}") == 2
    assert "is in use by" in capsys.readouterr().err and snapshot(run) == before
    assert here("report", run, "--out", run.parent / "page.html") == 0, "looking is free"
    assert here("export", run, run.parent / "policy", "--policy") == 0
    process.kill()
    process.wait()
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("steps: 100000", f"steps: {len(rows(run)) + 1}"))
    assert here("train", "--resume", run) == 0, "death has let go of it"
    steps = [row["step"] for row in rows(run)]
    assert steps == list(range(1, len(steps) + 1))


def test_a_trainer_in_the_same_process(tmp_path):
    config = load_config(None, [*QUICK, "steps=2", f"run_dir={tmp_path / 'run'}"])
    run = Run.create(config)
    with pytest.raises(UserError, match=f"is in use by process {os.getpid()}"):
        TrainLoop(run.config, Run.open(run.folder))
    trainer = TrainLoop(run.config, run)
    with pytest.raises(UserError, match="is in use by"):
        train(config, resume=run.folder)
    trainer.train()
    train(config, resume=run.folder)
    assert [row["step"] for row in rows(run.folder)] == [1, 2]


def test_what_fails_to_start_lets_go(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(UserError, match="CUDA devices"):
        train(load_config(None, [*QUICK, "model.device=cuda:7", f"run_dir={run}"]))
    assert not run.exists()
    train(load_config(None, [*QUICK, "steps=1", f"run_dir={run}"]))


def test_what_fails_to_start_removes_nothing_of_others(tmp_path):
    run = tmp_path / "mine"
    run.mkdir()
    (run / "notes.txt").write_text("keep me")
    with pytest.raises(UserError, match="CUDA devices"):
        train(load_config(None, [*QUICK, "model.device=cuda:7", f"run_dir={run}"]))
    assert snapshot(run) == {"notes.txt": b"keep me"}
    taken = Run.create(load_config(None, [f"run_dir={tmp_path / 'taken'}"]))
    taken.unlock()
    other = RunLock(taken.folder)
    taken.discard()
    assert (taken.folder / "config.yaml").exists(), "another has it now"
    other.release()
    taken.discard()
    assert not taken.folder.exists()


def test_two_that_begin_in_the_same_second(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "now")
    runs = [Run.create(load_config(None)) for _ in range(3)]
    assert [run.folder.name for run in runs] == ["countdown-now", "countdown-now-2", "countdown-now-3"]


def test_children_do_not_keep_it(tmp_path):
    """Neither programs that are started, nor processes that are forked and outlive their parent."""
    lock = RunLock(tmp_path)
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
    forked = os.fork()
    if not forked:
        time.sleep(60)
        os._exit(0)
    try:
        time.sleep(0.5)
        lock.release()
        RunLock(tmp_path).release()
    finally:
        started.kill()
        started.wait()
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)


def test_a_child_that_ends_does_not_let_go(tmp_path):
    lock = RunLock(tmp_path)
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(UserError, match="is in use by"):
        RunLock(tmp_path)
    lock.release()


def test_a_disk_without_locks(tmp_path, monkeypatch, capsys):
    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert here("train", *QUICK, "steps=1", f"run_dir={tmp_path / 'run'}") == 0
    assert "has no locks (No locks available)" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_lock_that_is_not_a_file(tmp_path, kind):
    run = Run.create(load_config(None, [f"run_dir={tmp_path / 'run'}"]))
    run.unlock()
    (run.folder / LOCK).unlink()
    other = tmp_path / "other"
    other.write_text("keep me")
    make = {"link": lambda f: f.symlink_to(other), "pipe": os.mkfifo, "folder": os.mkdir}
    make[kind](run.folder / LOCK)
    with pytest.raises(UserError, match=r"\.lock"):
        run.lock()
    assert other.read_text() == "keep me"


def test_a_directory_that_is_removed_and_made_again(tmp_path):
    """Whoever locked the old directory's file holds nothing."""
    old = Run.create(load_config(None, [f"run_dir={tmp_path / 'run'}"]))
    (old.folder / LOCK).unlink()
    new = RunLock(old.folder)
    with pytest.raises(UserError, match="is in use by"):
        RunLock(old.folder)
    new.release()
