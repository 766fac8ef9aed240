"""Environments and tools for tests, as a user writes them."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import time
from pathlib import Path


def digest(text: str) -> int:
    return int(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8], 16)


class Counting:
    """What it says is a function of all that was written; a reward with each turn."""

    def __init__(self, turns: int = 4, slow: float = 0.0):
        self.turns, self.slow = turns, slow
        self.history = ""
        self.count = 0

    def reset(self, sample):
        self.history = str(sample.index)

    def step(self, text):
        time.sleep(self.slow)
        self.history += text
        self.count += 1
        seen = digest(self.history)
        return f"{seen % 1000}? " * (seen % 4), seen % 7 / 10, self.count >= self.turns or seen % 11 == 0


class Dice(Counting):
    """Nobody knows what it says: only what is recorded is the same again."""

    def step(self, text):
        observation, _, done = super().step(text)
        return f"{random.SystemRandom().randrange(10**6)} {observation}", random.SystemRandom().random(), done


class Trouble(Counting):
    """Does everything that is wrong, by what is written."""

    def step(self, text):
        observation, reward, done = super().step(text)
        what = digest(self.history) % 9
        if what == 0:
            raise ValueError("no")
        if what == 1:
            os._exit(5)
        if what == 2:
            time.sleep(3600)
        if what == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        wrong = [b"\xff", None, (observation, "much", done), ("x" * 2**20, reward, done), (b"text", reward, done)]
        return wrong[what - 4]


class Slow(Counting):
    """Waits for something else than the processor, as most tools do; asynchronously."""

    async def step(self, text):
        await asyncio.sleep(random.SystemRandom().random() * 0.05)
        return super().step(text)


class Steps:
    """Without a prompt of its own; counts letters, in Gymnasium's five values."""

    def reset(self):
        return None, {}

    def step(self, text):
        return len(text), 1.0, False, len(text) > 20, {}


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second one,
            which is 1 if it is left out.

    Returns:
        Their sum.
    """
    return a + b


async def upper(text: str) -> dict:
    """Make it large."""
    await asyncio.sleep(0)
    return {"text": text.upper()}


def raises(text: str = "") -> str:
    """Raise."""
    raise ValueError(f"no {text}")


def leaves() -> str:
    """Exit."""
    raise SystemExit(3)


def hangs(seconds: float = 3600.0) -> str:
    """Hang."""
    time.sleep(seconds)
    return "woke up"


def megabyte() -> str:
    """A lot."""
    return "x" * 2**20


def raw() -> bytes:
    """No text."""
    return b"\xff\xfe\x00"


def nothing() -> None:
    """Nothing."""


def dies() -> str:
    """Exit at once."""
    os._exit(7)


def killed() -> str:
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)
    return "still here"


def killed_once(file: str) -> str:
    """Be killed, but for the second time."""
    if not Path(file).exists():
        Path(file).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "still here"


class Counter:
    """As TRL's: its methods are tools, and it tells its reward in the end."""

    def reset(self, start: int = 0, **kwargs) -> str | None:
        self.value = start
        return f" You begin at {start}."

    def increment(self, step: int) -> int:
        """Add to the counter.

        Args:
            step: How much.
        """
        self.value += step
        return self.value

    def get_reward(self) -> float:
        return float(self.value)
