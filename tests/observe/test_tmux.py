"""The terminal, as a person has it: a run in tmux, held in each phase, and what the pane shows then."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

TMUX = shutil.which("tmux")
pytestmark = pytest.mark.skipif(TMUX is None, reason="no tmux on this machine")
DEADLINE = 300.0  # seconds: turns a hang into a failure
WORDS = (
    "steps=3 rollout.prompts=2 rollout.samples=4 rollout.max_tokens=40 checkpoint.every=1 log.tensorboard=false "
    "model.threads=1 cluster.workers=1 speculation.mode=plain run_dir=run"
)

# The command, but each phase of the second step waits, once it has begun, until the test has looked.
HELD = """
import sys, time
from pathlib import Path
from paceline.cli import main
from paceline.cluster.cluster import Cluster
from paceline.observe.live import LiveView
from paceline.run import Run

def hold(owner, name, phase, when=lambda self, *args: True):
    original, asked = getattr(owner, name), []

    def held(self, *args, **options):
        if when(self, *args) and not asked and (phase == "rollout" or Path("seen-rollout").exists()):
            asked.append(1)
            Path("in-" + phase).touch()
            end = time.monotonic() + 120
            while not Path("seen-" + phase).exists() and time.monotonic() < end:
                time.sleep(0.05)
        return original(self, *args, **options)

    setattr(owner, name, held)

hold(LiveView, "rollout_progress", "rollout", lambda self, *counts: self.step == 1)
hold(Cluster, "update", "update")
hold(Run, "save", "saving")
sys.argv = ["paceline", "train", *sys.argv[1:]]
main()
"""


class Pane:
    def __init__(self, folder: Path, width: int, height: int):
        self.socket = f"paceline-{folder.parent.name}-{folder.name}"
        self.folder = folder
        (folder / "held.py").write_text(HELD)
        run = f"{shlex.quote(sys.executable)} held.py {WORDS}"
        command = f"trap : INT; cd {shlex.quote(str(folder))} && {run}; echo exit $?; cat"
        self.tmux(
            "new-session", "-d", "-x", str(width), "-y", str(height), "-s", "run", f"sh -c {shlex.quote(command)}"
        )

    def tmux(self, *words: str) -> str:
        done = subprocess.run(
            [str(TMUX), "-L", self.socket, "-f", "/dev/null", *words], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def text(self, joined: bool = False) -> str:
        """All lines, those that have scrolled away too; `joined` puts together what the terminal has wrapped."""
        return self.tmux("capture-pane", "-p", "-t", "run", "-S", "-", *(["-J"] if joined else []))

    def wait_for(self, words: str) -> str:
        end = time.monotonic() + DEADLINE
        while words not in (text := self.text()):
            assert time.monotonic() < end, f"no {words!r} in\n{text}"
            time.sleep(0.05)
        return text

    def reached(self, phase: str) -> None:
        end = time.monotonic() + DEADLINE
        while not (self.folder / f"in-{phase}").exists():
            assert time.monotonic() < end and "exit " not in self.text(), self.text()
            time.sleep(0.05)

    def close(self) -> None:
        subprocess.run([str(TMUX), "-L", self.socket, "kill-server"], capture_output=True, timeout=60)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
def test_lines_stay_nothing_is_wrapped_and_the_phase_is_right(tmp_path, width, height):
    (folder := tmp_path / f"pane{width}").mkdir()
    pane = Pane(folder, width, height)
    try:
        pane.wait_for("loading")
        for phase, shown in (
            ("rollout", "step 2/3  rollout  "),
            ("update", "step 2/3  update  "),
            ("saving", "saving  "),
        ):
            pane.reached(phase)
            text = pane.wait_for(shown)
            lines = text.splitlines()
            assert sum(line.startswith("step 1/3  reward") for line in lines) == 1, "the line of the first step stays"
            present = [line for line in lines if line.startswith("step 2/3") and "reward" not in line]
            assert len(present) == 1 and shown in present[0], "one phase at a time"
            if phase == "rollout":
                assert "/8 answers" in present[0]
            (folder / f"seen-{phase}").touch()
        text = pane.wait_for("exit 0")
        lines = [line for line in text.splitlines() if line]
        assert [line[:16] for line in lines if line.startswith("step ")] == [f"step {i}/3  reward" for i in (1, 2, 3)]
        assert not any("━" in line or "loading" in line for line in lines), "what changes is gone at the end"
        assert any(line.split() == ["report", "run/report.html"] for line in lines)
        assert all(len(line) <= width for line in lines)
        whole = [line.rstrip() for line in pane.text(joined=True).splitlines()]
        assert whole == [line.rstrip() for line in pane.text().splitlines()], "the terminal had nothing to wrap"
    finally:
        pane.close()


def test_ctrl_c_leaves_the_table_the_report_and_how_to_go_on(tmp_path):
    (folder := tmp_path / "stop").mkdir()
    pane = Pane(folder, 80, 24)
    try:
        pane.reached("rollout")
        pane.tmux("send-keys", "-t", "run", "C-c")
        (folder / "seen-rollout").touch()
        (folder / "seen-saving").touch()
        text = pane.wait_for("exit ")
        lines = [line for line in text.splitlines() if line]
        assert lines[-1] == "exit 130"
        assert "paceline train --resume run" in lines, "a line of its own, to be copied"
        order = [
            next(i for i, line in enumerate(lines) if line.startswith(word))
            for word in ("steps ", "report ", "paceline: ")
        ]
        assert order == sorted(order) and (folder / "run" / "report.html").is_file()
    finally:
        pane.close()
