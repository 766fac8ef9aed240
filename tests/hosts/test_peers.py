"""Workers that meet: they say who is missing and who cannot be reached, and never wait longer than they may."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

from paceline.cluster.addresses import address_towards, interface_of, why_unreachable
from paceline.cluster.deadline import within
from paceline.cluster.peers import PeerLost, Peers
from paceline.cluster.rendezvous import Rendezvous, Store
from paceline.errors import UserError

HERE = "127.0.0.1"
LIMIT = 15.0

OTHER = """
import sys, torch
from paceline.cluster.peers import Peers
from paceline.cluster.rendezvous import Rendezvous
peers = Peers(Rendezvous("127.0.0.1", int(sys.argv[1]), 1, (0, 3), "gloo", float(sys.argv[2])), 3)
numbers = torch.ones(4)
peers.sum([numbers])
print(numbers.tolist(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def store():
    return Store(HERE, 0, LIMIT)


@pytest.fixture
def other(store):
    """Worker 3, in a process of its own: takes part once and then waits."""
    command = [sys.executable, "-c", OTHER, str(store.port), str(LIMIT * 4)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait(30)


def test_a_sum_and_then_a_death(store, other):
    peers = Peers(Rendezvous(HERE, store.port, 1, (0, 3), "gloo", LIMIT * 4), 0)
    numbers = torch.arange(4.0)
    peers.sum([numbers])
    assert numbers.tolist() == [1.0, 2.0, 3.0, 4.0]
    other.kill()
    other.wait(30)
    with pytest.raises(
        PeerLost, match=r"worker 0 at 127.0.0.1 cannot reach worker 3 at 127.0.0.1 \(nothing listens"
    ) as lost:
        peers.sum([numbers])
    assert lost.value.unreachable == (3,)
    with pytest.raises(PeerLost, match="broken"):
        peers.sum([numbers])
    peers.close()


def test_one_that_does_not_come(store):
    with pytest.raises(PeerLost, match="worker 3 did not come to the rendezvous"):
        Peers(Rendezvous(HERE, store.port, 1, (0, 3), "gloo", 1.0), 0)


def test_one_that_is_there_but_says_nothing(store, other):
    """It can be reached, so it is not blamed: the driver has to find out."""
    peers = Peers(Rendezvous(HERE, store.port, 1, (0, 3), "gloo", LIMIT * 4), 0)
    numbers = torch.ones(4)
    peers.sum([numbers])
    peers._limit /= 40
    with pytest.raises(PeerLost, match="Timed out") as lost:
        peers.sum([numbers])
    assert lost.value.unreachable == ()


def test_no_rendezvous_point():
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(PeerLost, match=f"worker 0 at 127.0.0.1 cannot reach the rendezvous point at 127.0.0.1:{port}"):
        Peers(Rendezvous(HERE, port, 1, (0, 3), "gloo", LIMIT), 0)


def test_a_rendezvous_point_that_does_not_answer():
    """PyTorch's stores then wait longer than they are told to."""
    with socket.create_server((HERE, 0)) as silent:
        rendezvous = Rendezvous(HERE, silent.getsockname()[1], 1, (0, 3), "gloo", 2.0)
        with pytest.raises(PeerLost):
            within(60, lambda: Peers(rendezvous, 0))


def test_the_environment_is_left_alone(store, other):
    before = dict(os.environ)
    Peers(Rendezvous(HERE, store.port, 1, (0, 3), "gloo", LIMIT * 4), 0).close()
    assert dict(os.environ) == before


def test_a_port_that_is_taken():
    with socket.create_server((HERE, 0)) as taken, pytest.raises(UserError, match=r"name a free one in cluster\.port"):
        Store(HERE, taken.getsockname()[1], LIMIT)


def test_addresses():
    assert address_towards("localhost", 9) in (HERE, "::1")
    assert why_unreachable((HERE, 1), 1.0) == "nothing listens there"
    if sys.platform == "linux":
        assert interface_of(HERE) == "lo"
    assert interface_of("192.0.2.1") is None


def test_a_deadline():
    assert within(30, lambda: 7) == 7
    with pytest.raises(KeyError):
        within(30, lambda: {}[0])
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        within(0.1, lambda: threading.Event().wait(60))
    assert time.monotonic() - began < 50
