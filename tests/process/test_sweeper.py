"""What a library started for a process ends with it, though its processes are orphans and have overwritten their
environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from ..processes import gone, runs

# Starts, like Ray, a middle process with a child that sets its own title (here: replaces its environment by another
# program's) and one that does not; prints their numbers once the child has done so.
LIBRARY = """
import os, subprocess, sys, time
from paceline.process.sweeper import Sweeper

sweeper = Sweeper()
middle = '''
import os, subprocess, sys
bare = subprocess.Popen(["sleep", "600"], env={})
plain = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(os.getpid(), bare.pid, plain.pid, flush=True)
bare.wait()
'''
with sweeper.marking():
    marked = subprocess.Popen([sys.executable, "-c", middle], stdout=subprocess.PIPE, text=True)
other = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(sweeper._process.pid, other.pid, marked.stdout.readline().strip(), flush=True)
time.sleep(2.0)  # until it was looked at
print("known", flush=True)
if sys.argv[1] == "close":
    sys.stdin.readline()  # until the test has seen that all of them run
    sweeper.close()
    print("closed", flush=True)
time.sleep(600)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are followed through /proc")


@pytest.mark.parametrize("how", ["killed", "middle first", "close"])
def test_what_was_started_under_the_mark_ends_and_nothing_else(how):
    code = textwrap.dedent(LIBRARY)
    driver = subprocess.Popen(
        [sys.executable, "-c", code, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdin is not None and driver.stdout is not None
    sweeper, other, middle, bare, plain = map(int, driver.stdout.readline().split())
    try:
        assert driver.stdout.readline().strip() == "known"
        started = {"sweeper": sweeper, "other": other, "middle": middle, "bare": bare, "plain": plain}
        assert [name for name, pid in started.items() if not runs(pid)] == []
        if how == "middle first":  # as the raylet does, at once with its driver
            os.kill(middle, signal.SIGKILL)
            assert runs(bare) and runs(plain), "nobody ends them but the sweeper"
        if how == "close":
            driver.stdin.write("\n")
            driver.stdin.flush()
            assert driver.stdout.readline().strip() == "closed"
        else:
            driver.kill()
            driver.wait()
        assert gone([middle, bare, plain, sweeper])
        time.sleep(0.2)
        assert runs(other), "it was started without the mark"
    finally:
        driver.kill()
        driver.wait()
        for pid in (other, middle, bare, plain):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
