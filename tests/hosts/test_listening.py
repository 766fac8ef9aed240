"""A run on one machine listens on loopback only: nobody else can talk to its workers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

from ..test_cli import QUICK
from .listening import family, is_loopback, listening

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc says who listens")


def test_what_listens_is_seen():
    with socket.create_server(("0.0.0.0", 0)) as everywhere, socket.create_server(("127.0.0.1", 0)) as here:
        found = listening(os.getpid())
        assert {f"0.0.0.0 {everywhere.getsockname()[1]}", f"127.0.0.1 {here.getsockname()[1]}"} <= found
    assert is_loopback("127.0.0.1 80") and is_loopback("::1 80") and is_loopback("::ffff:127.0.0.1 80")
    assert not any(is_loopback(f"{host} 80") for host in ("0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1"))


def test_a_local_run_listens_on_loopback_only(tmp_path):
    words = ["train", *QUICK, f"run_dir={tmp_path / 'run'}", "cluster.workers=2", "spot.when=tail"]
    found: dict[int, set[str]] = {}
    with open(tmp_path / "said", "wb") as said:
        run = subprocess.Popen([sys.executable, "-m", "paceline", *words], stdout=said, stderr=said)
    try:
        end = time.monotonic() + 300
        while run.poll() is None and time.monotonic() < end:
            for pid in family(run.pid):
                found[pid] = found.get(pid, set()) | listening(pid)
            try:
                run.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
    finally:
        run.kill()
    assert run.wait(60) == 0, (tmp_path / "said").read_text()
    assert found[run.pid], "the rendezvous point"
    assert sum(bool(addresses) for addresses in found.values()) >= 3, "the driver and two workers"
    outside = {address for addresses in found.values() for address in addresses if not is_loopback(address)}
    assert not outside
