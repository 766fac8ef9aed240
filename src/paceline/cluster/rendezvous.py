"""How workers find each other: the driver keeps a small store, which outlives every worker; each worker writes its
address there, checks that it reaches all others, and connects.

Everything listens at one address only. The store is at the driver's; a worker is at the one from which it reaches the
store. A host's own name is never asked: on many it leads to a loopback address, or nowhere.
"""

from __future__ import annotations

import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from paceline.cluster.addresses import Address, address_towards, interface_of, listen_at, why_unreachable
from paceline.errors import UserError

PEER_PROBE_S = 3.5  # seconds in which a reachable peer accepts a connection, even if the first two packets are lost
CONNECT_SHARE = 5  # gloo waits for a connection this many times its timeout
WAITING_CONNECTIONS = 128  # probes that a process may leave unanswered: the system accepts them by itself

_GLOO: Any = dist.ProcessGroupGloo  # PyTorch's type hints leave out most of it


class Unreachable(RuntimeError):
    """Somebody cannot reach somebody, and the message says who."""

    def __init__(self, message: str, unreachable: tuple[int, ...]):
        super().__init__(message)
        self.unreachable = unreachable


@dataclass(frozen=True)
class Rendezvous:
    """Where and for what workers meet."""

    host: str
    port: int
    number: int
    """Counts the process groups of a run."""
    workers: tuple[int, ...]
    backend: str
    timeout_s: float


class Store:
    """The rendezvous point, kept by the driver. It listens at `host` only, which is loopback unless there are other
    machines."""

    def __init__(self, host: str, port: int, timeout_s: float):
        self.host = host
        try:
            listener = listen_at(host, port)
            self.port: int = listener.getsockname()[1]
            self._store = dist.TCPStore(
                host,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
                master_listen_fd=listener.detach(),
            )
        except (RuntimeError, dist.DistError, OSError) as err:
            raise UserError(
                f"port {port} on {host} cannot be opened for the workers to meet ({reason_of(err)}); "
                "name a free one in cluster.port, or 0 for any"
            ) from err


class Joining:
    """How one worker joins a process group, from the rendezvous point to connections with all others."""

    def __init__(self, rendezvous: Rendezvous, me: int):
        self.rendezvous = rendezvous
        self.me = me
        self.addresses: dict[int, Address] = {}
        self._deadline = time.monotonic() + rendezvous.timeout_s
        self._here = address_towards(rendezvous.host, rendezvous.port)
        self._rank = rendezvous.workers.index(me)
        self._size = len(rendezvous.workers)

    def form(self) -> Any:
        """A process group of gloo."""
        self._store = self._open_store()
        self._exchange_addresses()
        self._check_reach()
        options = _GLOO._Options()
        options._devices = [_gloo_device(self._here)]
        options._timeout = self._left() / CONNECT_SHARE
        return _GLOO(dist.PrefixStore("gloo", self._store), self._rank, self._size, options)

    def form_nccl(self) -> None:
        interface = interface_of(self._here)
        if interface:  # "=": this one, not all whose name begins so
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        store = dist.PrefixStore("nccl", self._store)
        limit = timedelta(seconds=self.rendezvous.timeout_s)
        dist.init_process_group("nccl", store=store, rank=self._rank, world_size=self._size, timeout=limit)

    def _open_store(self) -> dist.Store:
        r = self.rendezvous
        why = why_unreachable((r.host, r.port), PEER_PROBE_S)
        if why:
            raise ConnectionError(
                f"worker {self.me} at {self._here} cannot reach the rendezvous point at {r.host}:{r.port} ({why})"
            )
        store = dist.TCPStore(r.host, r.port, is_master=False, timeout=self._left())
        return dist.PrefixStore(str(r.number), store)

    def _exchange_addresses(self) -> None:
        """So that each knows, when something fails, whom to try to reach."""
        listener = _listener(self._here)
        _empty(listener)
        said = self._ask_all("address", f"{self._here} {listener.getsockname()[1]}")
        for worker, word in said.items():
            host, port = word.split()
            self.addresses[worker] = (host, int(port))

    def _check_reach(self) -> None:
        """Each tries to reach each. Without this those that can would wait for the others in vain, and nobody would
        know who could not reach whom."""
        mine, unreachable = find_unreachable(self.me, self.addresses)
        sentences = [sentence for sentence in self._ask_all("unreachable", mine).values() if sentence]
        if sentences:  # those that it concerns say it themselves
            raise Unreachable(mine or "others cannot reach each other", unreachable)

    def _ask_all(self, what: str, mine: str) -> dict[int, str]:
        """What each worker says to the question, this one `mine`."""
        self._store.set(f"{what}/{self.me}", mine)
        keys = {w: f"{what}/{w}" for w in self.rendezvous.workers}
        try:
            self._store.wait(list(keys.values()), self._left())
        except (RuntimeError, dist.DistError) as err:
            missing = [str(w) for w, key in keys.items() if not self._store.check([key])]
            if not missing:
                raise
            raise TimeoutError(f"worker {' and '.join(missing)} did not come to the rendezvous") from err
        return {w: self._store.get(key).decode() for w, key in keys.items()}

    def _left(self) -> timedelta:
        return timedelta(seconds=max(self._deadline - time.monotonic(), 0.1))


def find_unreachable(me: int, addresses: dict[int, Address]) -> tuple[str, tuple[int, ...]]:
    """Whom this one cannot reach: as a sentence, and who."""
    others = {w: address for w, address in addresses.items() if w != me}
    failed = _probe(others)
    if not failed:
        return "", ()
    said = " and ".join(f"worker {w} at {others[w][0]} ({why})" for w, why in failed.items())
    return f"worker {me} at {addresses[me][0]} cannot reach {said}", tuple(failed)


def _gloo_device(here: str) -> object:
    """Where gloo listens; an interface that the user has named comes first, as in all of PyTorch."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return _GLOO.create_device(interface=interface)
    return _GLOO.create_device(hostname=here)


@cache
def _listener(here: str) -> socket.socket:
    """To which others connect to see whether this process can be reached. It stays open as long as the process
    lives, and nobody has to be at it: the system accepts."""
    return listen_at(here, 0, WAITING_CONNECTIONS)


def _empty(listener: socket.socket) -> None:
    """Forget probes that others have made."""
    listener.setblocking(False)
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return


def _probe(addresses: dict[int, Address]) -> dict[int, str]:
    """Which of these cannot be connected to, and why."""
    if not addresses:
        return {}
    with ThreadPoolExecutor(len(addresses)) as pool:
        reasons = list(pool.map(lambda address: why_unreachable(address, PEER_PROBE_S), addresses.values()))
    return {w: why for w, why in zip(addresses, reasons, strict=True) if why}


def reason_of(err: Exception) -> str:
    """Without the places in gloo's sources, and its advice."""
    line = str(err).strip().partition("\n")[0].partition(" This is typically caused")[0]
    return re.sub(r"\[\S+\.(cc|cpp|h):\d+\] ", "", line)
