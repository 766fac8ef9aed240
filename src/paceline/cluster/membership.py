"""A worker among others: the process group that it is in, and the part of the optimizer's state that it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.cluster.peers import Peers
from paceline.cluster.rendezvous import Rendezvous
from paceline.learn.shards import Holders, assign_holders, make_slots

if TYPE_CHECKING:
    from paceline.cluster.reporter import Reporter
    from paceline.learn.optimizer import AdamW


class Membership:
    def __init__(self, number: int, workers: int, parameters: Mapping[str, Tensor], reporter: Reporter):
        """`parameters` are what is learned, by name; without any there is no optimizer whose state could be held."""
        self.number = number
        self.reporter = reporter
        sizes = {name: p.numel() for name, p in parameters.items()}
        self.slots = make_slots(sizes, workers)
        self.holders = assign_holders(workers, range(workers))
        self.peers = Peers(Rendezvous("", 0, 0, (number,), "", 0.0), number)

    @property
    def leads(self) -> bool:
        """Whether it does what only one of the group has to do."""
        return self.peers.workers[0] == self.number

    def held(self) -> list[str]:
        """Parameters whose optimizer state is here."""
        pairs = zip(self.slots, self.holders, strict=True)
        return [name for slot, holders in pairs if self.number in holders for name in slot]

    def saved(self) -> list[str]:
        """Those of them that this worker writes to checkpoints."""
        pairs = zip(self.slots, self.holders, strict=True)
        return [name for slot, holders in pairs if self.number == holders[0] for name in slot]

    def join(self, rendezvous: Rendezvous) -> None:
        """Leave the present group for a new one."""
        self.peers.close()
        self.peers = Peers(rendezvous, self.number, self.reporter.waits)

    def take_slots(self, before: Sequence[Holders], optimizer: AdamW) -> None:
        """Have each slot of the optimizer's state sent to whoever is to hold it, from one that does, as `before` says.
        Nothing is dropped yet: if the group breaks, this is done again. Can be repeated."""
        holders = assign_holders(len(self.slots), self.peers.workers)
        for slot, old, new in zip(self.slots, before, holders, strict=True):
            if not set(new) <= set(old):
                missing = [name for name in slot if name not in optimizer.mean]
                for name in missing:
                    optimizer.hold(name)
                self.peers.broadcast([t for name in slot for t in optimizer.tensors(name)], old[0])
        self.holders = holders

    def drop_slots(self, optimizer: AdamW) -> None:
        """All others have joined too: drop what is held by others now."""
        kept = set(self.held())
        for name in [name for name in optimizer.mean if name not in kept]:
            optimizer.drop(name)

    def share_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Have each parameter sent by the first holder of its slot, which has updated it."""
        for slot, holders in zip(self.slots, self.holders, strict=True):
            self.peers.broadcast([weights[name].data for name in slot], holders[0])
