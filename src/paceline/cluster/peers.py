"""Collectives over torch.distributed: sums and broadcasts that all workers of a process group make together.

Process groups are numbered. When a worker is lost, the group breaks: whoever was waiting for it gets `PeerLost`, which
says who could not be reached, and the rest form a new group under the next number (see `rendezvous.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.cluster.deadline import within
from paceline.cluster.rendezvous import PEER_PROBE_S, Joining, Rendezvous, Unreachable, find_unreachable, reason_of

if TYPE_CHECKING:
    from paceline.cluster.addresses import Address

BUCKET = 2**24  # numbers in one message


class PeerLost(Exception):
    """Another worker did not take part."""

    def __init__(self, message: str, unreachable: tuple[int, ...] = ()):
        """`unreachable` are workers to which this one cannot connect."""
        super().__init__(message)
        self.unreachable = unreachable


class Peers:
    """One worker's end of a process group."""

    def __init__(self, rendezvous: Rendezvous, me: int, waiting: Callable[[], None] = lambda: None):
        """`waiting` is called before anything in which others are waited for. Takes `rendezvous.timeout_s` at most, and
        twice `PEER_PROBE_S` more to find out who could not be reached."""
        self.workers = rendezvous.workers
        self.me = me
        self.waiting = waiting
        self.alone = len(self.workers) == 1
        self._group: Any = None
        self._nccl = False
        self._addresses: dict[int, Address] = {}
        if self.alone:
            return
        self._limit = timedelta(seconds=rendezvous.timeout_s)
        waiting()
        try:
            # Stores wait for ever for an answer of one that cannot be reached any more.
            joining = Joining(rendezvous, me)
            self._group = within(rendezvous.timeout_s + PEER_PROBE_S, joining.form)
            if rendezvous.backend == "nccl":
                joining.form_nccl()
                self._nccl = True
        except (RuntimeError, dist.DistError, OSError) as err:
            raise self._lost(err, joining.addresses) from err
        self._addresses = joining.addresses

    def _lost(self, err: Exception, addresses: dict[int, Address]) -> PeerLost:
        """Leave the group, so that those who wait for this worker notice too: not all wait for the lost one itself."""
        self.close()
        if isinstance(err, Unreachable):
            return PeerLost(str(err), err.unreachable)
        sentence, unreachable = find_unreachable(self.me, addresses)
        return PeerLost(f"{sentence}: {reason_of(err)}" if sentence else reason_of(err), unreachable)

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Every tensor becomes its sum over the group, the same bits everywhere. Half precision is summed in
        single."""
        self._each(tensors, self._sum_one, widen=True)

    def _sum_one(self, flat: Tensor) -> None:
        if self._nccl and flat.is_cuda:
            dist.all_reduce(flat)
        else:
            self._group.allreduce([flat], dist.ReduceOp.SUM, self._limit).wait()

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        """Every tensor becomes what it is at `source`."""
        rank = self.workers.index(source)
        self._each(tensors, lambda flat: self._broadcast_one(flat, rank))

    def _broadcast_one(self, flat: Tensor, rank: int) -> None:
        if self._nccl and flat.is_cuda:
            dist.broadcast(flat, rank)
        else:
            self._group.broadcast(flat, rank, self._limit).wait()

    @torch.no_grad()
    def _each(self, tensors: Sequence[Tensor], work: Callable[[Tensor], object], widen: bool = False) -> None:
        if self.alone:
            return
        if self._group is None:
            raise PeerLost("the process group is broken")
        self.waiting()
        for part in _buckets(tensors):
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


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type together, in messages of a bounded size."""
    part: list[Tensor] = []
    for tensor in sorted(tensors, key=lambda t: str(t.dtype)):
        if part and (part[0].dtype != tensor.dtype or sum(t.numel() for t in part) + tensor.numel() > BUCKET):
            yield part
            part = []
        part.append(tensor)
    if part:
        yield part
