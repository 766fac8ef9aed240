"""Which checkpoint of a run is its best one by evaluation: `RUN/best.json`, so that it is found, and never deleted."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field

from paceline.files import reading
from paceline.files.writing import write_aside
from paceline.run.checkpoints import checkpoint_name

BEST = "best.json"


@dataclass(frozen=True)
class BestCheckpoint:
    __pydantic_config__ = ConfigDict(extra="forbid")

    step: Annotated[int, Field(strict=True, ge=0, le=2**62)]
    """0 is the model that the run began with, which has no checkpoint."""
    metric: str
    """What it is the best by (`eval.best`)."""
    value: float
    checkpoint: str | None
    """Its folder within the run directory."""

    @classmethod
    def at(cls, step: int, metric: str, value: float) -> BestCheckpoint:
        return cls(step, metric, value, f"checkpoints/{checkpoint_name(step)}" if step else None)


def read_best(run: Path) -> BestCheckpoint | None:
    if not (run / BEST).exists():
        return None
    file = reading.inside(run, BEST)
    return reading.check(BestCheckpoint, reading.read_object(file), str(file))


def write_best(run: Path, best: BestCheckpoint | None) -> None:
    if best is None:
        (run / BEST).unlink(missing_ok=True)
    else:
        write_aside(run / BEST, json.dumps(asdict(best), indent=2) + "\n")
