"""The program of a reward process: import the functions, then reward completions until the trainer is gone."""

from __future__ import annotations

import os
import sys

from paceline.errors import UserError
from paceline.process.program import join_parent
from paceline.tasks.reward_process import Imported, try_rewards
from paceline.tasks.rewards import load_reward


def main() -> None:
    parent = join_parent()
    me = os.getpid()
    sys.path.insert(0, os.getcwd())
    try:
        rewards = [load_reward(name, weight, per) for name, weight, per in parent.receive()]
    except UserError as err:
        parent.send(Imported(str(err)))
        return
    parent.send(Imported(None, tuple(dict.fromkeys(reward.per for reward in rewards))))
    while True:
        done = try_rewards(rewards, parent.receive())
        if os.getpid() != me:
            os._exit(0)  # a function has forked, and this is the copy: the original sends the result
        parent.send(done)


if __name__ == "__main__":
    main()
