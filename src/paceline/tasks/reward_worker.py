"""The program of a reward process: import the functions, then judge what comes in until the pipe closes."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.connection import Connection

from paceline.errors import UserError
from paceline.tasks.judge import try_judge
from paceline.tasks.rewards import load_reward


def main(orders: Connection, results: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which ends this process in its own time
    sys.path.insert(0, os.getcwd())
    try:
        rewards = [load_reward(name, weight) for name, weight in orders.recv()]
    except UserError as err:
        results.send(str(err))
        return
    results.send(None)
    while True:
        try:
            job = orders.recv()
        except EOFError:
            return
        started = time.perf_counter()
        verdict = try_judge(rewards, job)
        results.send((verdict, time.perf_counter() - started))


if __name__ == "__main__":
    main(Connection(int(sys.argv[1]), writable=False), Connection(int(sys.argv[2]), readable=False))
