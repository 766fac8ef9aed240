"""`paceline train` on one of the hosts: keeps every answer, says where workers are, and stops on the way where asked.

Arguments: a folder to write to, the number of the step before whose update it waits for a file `go`, then those of
`paceline`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

WAIT_S = 120.0


def main(folder: Path, pause: int) -> None:
    from paceline import cli
    from paceline.loop import TrainLoop

    collect = TrainLoop._collect

    def recorded(self, clock):  # type: ignore[no-untyped-def]
        groups, cursor = collect(self, clock)
        answers = {i: c.tokens for g in groups for i, c in g.completions.items()}
        with open(folder / "answers.jsonl", "a") as file:
            file.write(json.dumps([self.progress.step, answers]) + "\n")
        (folder / "places.json").write_text(json.dumps(self.cluster.transport.hosts()))
        if self.progress.step + 1 == pause and not (folder / "paused").exists():
            (folder / "paused").touch()
            end = time.monotonic() + WAIT_S
            while not (folder / "go").exists() and time.monotonic() < end:
                time.sleep(0.02)
        return groups, cursor

    TrainLoop._collect = recorded  # type: ignore[method-assign]
    cli.main()


if __name__ == "__main__":
    folder, pause = Path(sys.argv[1]), int(sys.argv[2])
    sys.argv = ["paceline", *sys.argv[3:]]
    main(folder, pause)
