"""The child's side: what a program that was started as a `Child` does first."""

from __future__ import annotations

import os
import queue
import socket
import sys
from typing import Any

from paceline.process.channel import Channel
from paceline.process.guard import die_with_parent, stand_guard
from paceline.process.stopping import leave_to_driver


class Parent:
    """Messages from and to the process that started this one. When it is gone, this one ends."""

    def __init__(self, end: socket.socket):
        self._in: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._channel = Channel(end, lambda message, at: self._in.put(message), self._gone)

    @staticmethod
    def _gone(reason: str) -> None:
        os._exit(0)  # also in the middle of a call that never returns: there is nobody left to tell

    def receive(self, block: bool = True) -> Any:
        """The next message; without `block`, None if there is none."""
        try:
            return self._in.get(block)
        except queue.Empty:
            return None

    def send(self, message: object) -> None:
        """Written when this returns, so that nothing is lost if the next thing that happens is the end."""
        self._channel.send(message)


def join_parent() -> Parent:
    """Read what `Child` has put on the command line, make sure that this process ends with its parent, and connect."""
    leave_to_driver()
    descriptor, lifeline, parent = (int(word) for word in sys.argv[1:4])
    guarded = sys.argv[4]
    os.set_inheritable(descriptor, False)  # what a user's code starts must not keep the connection open
    if guarded == "guarded":
        stand_guard(lifeline)
    else:
        os.close(lifeline)
        die_with_parent(parent)
    return Parent(socket.socket(fileno=descriptor))
