"""What answers the policy in `tool_wait.py`: half of the answers call a tool that takes its time."""

from __future__ import annotations

import hashlib
import time


class Waiting:
    """Which answers call it, and in how many turns, is a function of what was written: with and without waiting the
    policy is told the same."""

    def __init__(self, seconds: float = 0.5, calls: int = 2):
        self.seconds = seconds
        self.calls = calls
        self.written = ""
        self.made = 0

    def reset(self, sample: object) -> None:
        self.written = ""

    def step(self, text: str) -> tuple[str, None, bool]:
        self.written += text
        if not self.made and hashlib.sha256(self.written.encode()).digest()[0] % 2:
            return "", None, True
        if self.made == self.calls:
            return "", None, True
        self.made += 1
        time.sleep(self.seconds)
        return "again\n", None, False
