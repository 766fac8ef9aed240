"""What workers do all together: sums and broadcasts over torch.distributed.

A circle of workers has a number. When one is lost, the circle breaks: whoever was waiting for it gets `PeerLost`, which
says who could not be reached, and the rest form a new one under the next number. The meeting point is a small store
that the driver keeps, so it outlives every worker.

Everything listens at one address only. The meeting point is at the driver's; a worker is at the one from which it
reaches the meeting point. A host's own name is never asked: on many it leads to a loopback address, or nowhere.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.cluster.addresses import Address, address_towards, interface_of, listen_at, why_unreachable
from paceline.cluster.deadline import within
from paceline.errors import UserError

AT_ONCE = 2**24  # numbers in one message
PROBE_S = (
    3.5  # seconds in which a peer that can be reached accepts a connection, also if the first two packets are lost
)
CONNECT_SHARE = 5  # gloo waits for a connection this many times as long as it is told to
WAITING_CONNECTIONS = 128  # probes that a process may leave unanswered: the system accepts them by itself


_GLOO: Any = dist.ProcessGroupGloo  # PyTorch's type hints leave out most of it


class PeerLost(Exception):
    """Another worker did not take part."""

    def __init__(self, message: str, unreachable: tuple[int, ...] = ()):
        """`unreachable` are workers to which this one cannot connect."""
        super().__init__(message)
        self.unreachable = unreachable


class _Unreachable(RuntimeError):
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
    members: tuple[int, ...]
    backend: str
    timeout_s: float


class Store:
    """The meeting point, kept by the driver. It listens at `host` only, which is loopback unless there are other
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
                f"port {port} on {host} cannot be opened for the workers to meet ({_first_line(err)}); "
                "name a free one in cluster.port, or 0 for any"
            ) from err


class Peers:
    def __init__(self, meeting: Rendezvous, me: int, waiting: Callable[[], None] = lambda: None):
        """`waiting` is called before anything in which others are waited for. Takes `meeting.timeout_s` at most, and
        twice `PROBE_S` more to find out who could not be reached."""
        self.members, self.me, self.waiting = meeting.members, me, waiting
        self.alone = len(self.members) == 1
        self._group: Any = None
        self._nccl = False
        self._addresses: dict[int, Address] = {}
        if self.alone:
            return
        self._limit = timedelta(seconds=meeting.timeout_s)
        waiting()
        try:
            # Stores wait for ever for an answer of one that cannot be reached any more.
            joining = _Joining(meeting, me)
            self._group = within(meeting.timeout_s + PROBE_S, joining.form)
            if meeting.backend == "nccl":
                joining.form_nccl()
                self._nccl = True
        except (RuntimeError, dist.DistError, OSError) as err:
            raise self._lost(err, joining.addresses) from err
        self._addresses = joining.addresses

    def _lost(self, err: Exception, addresses: dict[int, Address]) -> PeerLost:
        """Leave the circle, so that those who wait for this worker notice too: not all wait for the lost one itself."""
        self.close()
        if isinstance(err, _Unreachable):
            return PeerLost(str(err), err.unreachable)
        sentence, unreachable = _find_unreachable(self.me, addresses)
        return PeerLost(f"{sentence}: {_first_line(err)}" if sentence else _first_line(err), unreachable)

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Every tensor becomes its sum over the circle, the same bits everywhere. Half precision is summed in
        single."""
        self._each(tensors, self._sum_one, widen=True)

    def _sum_one(self, flat: Tensor) -> None:
        if self._nccl and flat.is_cuda:
            dist.all_reduce(flat)
        else:
            self._group.allreduce([flat], dist.ReduceOp.SUM, self._limit).wait()

    def share(self, tensors: Sequence[Tensor], source: int) -> None:
        """Every tensor becomes what it is at `source`."""
        rank = self.members.index(source)
        self._each(tensors, lambda flat: self._share_one(flat, rank))

    def _share_one(self, flat: Tensor, rank: int) -> None:
        if self._nccl and flat.is_cuda:
            dist.broadcast(flat, rank)
        else:
            self._group.broadcast(flat, rank, self._limit).wait()

    @torch.no_grad()
    def _each(self, tensors: Sequence[Tensor], work: Callable[[Tensor], object], widen: bool = False) -> None:
        if self.alone:
            return
        if self._group is None:
            raise PeerLost("the circle is broken")
        self.waiting()
        for part in _parcels(tensors):
            flat = torch.cat([t.reshape(-1) for t in part])
            if widen and flat.dtype.itemsize < 4:
                flat = flat.float()
            try:
                work(flat)
            except (RuntimeError, dist.DistError) as err:
                raise self._lost(err, self._addresses) from err
            for tensor, new in zip(part, flat.split([t.numel() for t in part]), strict=True):
                tensor.copy_(new.view_as(tensor))

    def close(self) -> None:
        """Waits for nobody: whatever others still expect of this one fails at once."""
        if self._group is not None:
            self._group.abort()
            self._group = None
        if self._nccl:
            dist.destroy_process_group()
            self._nccl = False


class _Joining:
    """One worker's way into a circle, from the meeting point to connections with all others."""

    def __init__(self, meeting: Rendezvous, me: int):
        self.meeting, self.me = meeting, me
        self.addresses: dict[int, Address] = {}
        self._deadline = time.monotonic() + meeting.timeout_s
        self._here = address_towards(meeting.host, meeting.port)
        self._rank, self._size = meeting.members.index(me), len(meeting.members)

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
        limit = timedelta(seconds=self.meeting.timeout_s)
        dist.init_process_group("nccl", store=store, rank=self._rank, world_size=self._size, timeout=limit)

    def _open_store(self) -> dist.Store:
        m = self.meeting
        why = why_unreachable((m.host, m.port), PROBE_S)
        if why:
            raise ConnectionError(
                f"worker {self.me} at {self._here} cannot reach the meeting point at {m.host}:{m.port} ({why})"
            )
        store = dist.TCPStore(m.host, m.port, is_master=False, timeout=self._left())
        return dist.PrefixStore(str(m.number), store)

    def _exchange_addresses(self) -> None:
        """So that each knows, when something fails, whom to try to reach."""
        door = _door(self._here)
        _empty(door)
        said = self._ask_all("address", f"{self._here} {door.getsockname()[1]}")
        for worker, word in said.items():
            host, port = word.split()
            self.addresses[worker] = (host, int(port))

    def _check_reach(self) -> None:
        """Each tries to reach each. Without this those that can would wait for the others in vain, and nobody would
        know who could not reach whom."""
        mine, unreachable = _find_unreachable(self.me, self.addresses)
        sentences = [sentence for sentence in self._ask_all("unreachable", mine).values() if sentence]
        if sentences:  # those that it concerns say it themselves
            raise _Unreachable(mine or "others cannot reach each other", unreachable)

    def _ask_all(self, what: str, mine: str) -> dict[int, str]:
        """What each member says to the question, this one `mine`."""
        self._store.set(f"{what}/{self.me}", mine)
        keys = {w: f"{what}/{w}" for w in self.meeting.members}
        try:
            self._store.wait(list(keys.values()), self._left())
        except (RuntimeError, dist.DistError) as err:
            missing = [str(w) for w, key in keys.items() if not self._store.check([key])]
            if not missing:
                raise
            raise TimeoutError(f"worker {' and '.join(missing)} did not come to the meeting") from err
        return {w: self._store.get(key).decode() for w, key in keys.items()}

    def _left(self) -> timedelta:
        return timedelta(seconds=max(self._deadline - time.monotonic(), 0.1))


def _find_unreachable(me: int, addresses: dict[int, Address]) -> tuple[str, tuple[int, ...]]:
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
def _door(here: str) -> socket.socket:
    """To which others connect to see whether this process can be reached. It stays open as long as the process lives,
    and nobody has to be at it: the system accepts."""
    return listen_at(here, 0, WAITING_CONNECTIONS)


def _empty(door: socket.socket) -> None:
    """Forget probes that others have made."""
    door.setblocking(False)
    while True:
        try:
            door.accept()[0].close()
        except BlockingIOError:
            return


def _probe(addresses: dict[int, Address]) -> dict[int, str]:
    """Which of these cannot be connected to, and why."""
    if not addresses:
        return {}
    with ThreadPoolExecutor(len(addresses)) as pool:
        reasons = list(pool.map(lambda address: why_unreachable(address, PROBE_S), addresses.values()))
    return {w: why for w, why in zip(addresses, reasons, strict=True) if why}


def _parcels(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type together, in messages of a bounded size."""
    part: list[Tensor] = []
    for tensor in sorted(tensors, key=lambda t: str(t.dtype)):
        if part and (part[0].dtype != tensor.dtype or sum(t.numel() for t in part) + tensor.numel() > AT_ONCE):
            yield part
            part = []
        part.append(tensor)
    if part:
        yield part


def _first_line(err: Exception) -> str:
    """Without the places in gloo's sources, and its advice."""
    line = str(err).strip().partition("\n")[0].partition(" This is typically caused")[0]
    return re.sub(r"\[\S+\.(cc|cpp|h):\d+\] ", "", line)
