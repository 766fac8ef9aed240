"""The program of a worker process: what it is to be comes first, then calls, until the pipe closes."""

from __future__ import annotations

import os
import sys
from functools import partial
from multiprocessing.connection import Connection

from paceline.cluster.local import put, take
from paceline.cluster.messages import Call
from paceline.cluster.serve import serve


def main(calls: Connection, reports: Connection) -> None:
    config, post = take(calls)
    if post.cores:
        os.sched_setaffinity(0, post.cores)

    def inbox(block: bool) -> Call | None:
        return take(calls) if block or calls.poll() else None

    try:
        serve(config, post, inbox, partial(put, reports))
    except BrokenPipeError:  # the driver is gone
        return


if __name__ == "__main__":
    main(Connection(int(sys.argv[1]), writable=False), Connection(int(sys.argv[2]), readable=False))
