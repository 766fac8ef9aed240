"""A child for tests: it says back what it is told, and can be told to misbehave."""

from __future__ import annotations

import os
import sys
import time

from paceline.process.program import join_parent


def main() -> None:
    parent = join_parent()
    while True:
        what, value = parent.receive()
        if what == "echo":
            parent.send(value)
        elif what == "pid":
            parent.send(os.getpid())
        elif what == "flood":
            for _ in range(value):
                parent.send(b"x" * 2**23)
            parent.send("flooded")
        elif what == "sleep":
            parent.send("sleeping")
            time.sleep(value)
        elif what == "fork":  # one that sleeps in a session of its own, as a daemon does
            first = os.fork()
            if first == 0:
                os.setsid()
                second = os.fork()
                if second:
                    parent.send(second)
                    os._exit(0)
                time.sleep(value)
                os._exit(0)
            os.waitpid(first, 0)
        elif what == "exit":
            os._exit(value)
        elif what == "garbage":
            os.write(int(sys.argv[1]), value)
            parent.send("never understood")


if __name__ == "__main__":
    main()
