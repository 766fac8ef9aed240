"""The program of a worker process: what it is to be comes first, then calls, until the driver is gone."""

from __future__ import annotations

import os

from paceline.process.program import join_parent


def main() -> None:
    driver = join_parent()  # first: what follows takes seconds, and the driver may be gone by then
    from paceline.cluster.serve import serve

    config, spec = driver.receive()
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
    serve(config, spec, driver.receive, driver.send)


if __name__ == "__main__":
    main()
