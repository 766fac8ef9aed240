"""What workers do all together: sums and broadcasts over torch.distributed.

A circle of workers has a number. When one is lost, the circle breaks: whoever was waiting for it gets `PeerLost`, and
the rest form a new one under the next number. The meeting point is a small store that the driver keeps, so it outlives
every worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import UserError

AT_ONCE = 2**24  # numbers in one message


class PeerLost(Exception):
    """Another worker did not take part."""


@dataclass(frozen=True)
class Meeting:
    """Where and for what workers meet."""

    host: str
    port: int
    number: int
    members: tuple[int, ...]
    backend: str
    timeout_s: float


class Store:
    """The meeting point, kept by the driver."""

    def __init__(self, host: str, port: int, timeout_s: float):
        self.host = host
        try:
            self._store = dist.TCPStore(
                host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
            )
        except (RuntimeError, dist.DistError, OSError) as err:
            raise UserError(
                f"port {port} on {host} cannot be opened for the workers to meet ({_first_line(err)}); "
                "name a free one in cluster.port, or 0 for any"
            ) from err
        self.port = self._store.port


class Peers:
    def __init__(self, meeting: Meeting, me: int, waiting: Callable[[], None] = lambda: None):
        """`waiting` is called before anything in which others are waited for."""
        self.members, self.me, self.waiting = meeting.members, me, waiting
        self.alone = len(self.members) == 1
        if self.alone:
            return
        if meeting.host in ("localhost", "127.0.0.1"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's own name does not always resolve
        limit = timedelta(seconds=meeting.timeout_s)
        waiting()
        try:
            store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=limit)
            dist.init_process_group(
                meeting.backend,
                store=dist.PrefixStore(str(meeting.number), store),
                rank=self.members.index(me),
                world_size=len(self.members),
                timeout=limit,
            )
        except (RuntimeError, dist.DistError) as err:
            raise self._lost(err) from err

    def _lost(self, err: Exception) -> PeerLost:
        """Leave the circle, so that those who wait for this worker notice too: not all wait for the lost one itself."""
        self.close()
        return PeerLost(_first_line(err))

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Every tensor becomes its sum over the circle, the same bits everywhere. Half precision is summed in
        single."""
        self._each(tensors, dist.all_reduce, widen=True)

    def share(self, tensors: Sequence[Tensor], source: int) -> None:
        """Every tensor becomes what it is at `source`."""
        rank = self.members.index(source)
        self._each(tensors, lambda flat: dist.broadcast(flat, rank))

    @torch.no_grad()
    def _each(self, tensors: Sequence[Tensor], work: Callable[[Tensor], object], widen: bool = False) -> None:
        if self.alone:
            return
        if not dist.is_initialized():
            raise PeerLost("the circle is broken")
        self.waiting()
        for part in _parcels(tensors):
            flat = torch.cat([t.reshape(-1) for t in part])
            if widen and flat.dtype.itemsize < 4:
                flat = flat.float()
            try:
                work(flat)
            except (RuntimeError, dist.DistError) as err:
                raise self._lost(err) from err
            for tensor, new in zip(part, flat.split([t.numel() for t in part]), strict=True):
                tensor.copy_(new.view_as(tensor))

    def close(self) -> None:
        if not self.alone and dist.is_initialized():
            dist.destroy_process_group()


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
    return str(err).strip().partition("\n")[0]
