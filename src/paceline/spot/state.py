"""The drafter's training in a checkpoint: beside the drafter, which others read without it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, FiniteFloat, NonNegativeInt
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from paceline import reading
from paceline.errors import UserError
from paceline.spot.trainer import MOST, SpotTrainer

TENSORS, VALUES = "training.safetensors", "training.json"


@dataclass
class Steps:
    steps: NonNegativeInt


@dataclass
class Values:
    """What `SpotTrainer.state` has besides tensors."""

    trainer: Steps
    version: NonNegativeInt
    tokens: NonNegativeInt
    size: Annotated[FiniteFloat, Field(ge=1, le=MOST)]
    age: NonNegativeInt
    dice: tuple[int, list[Annotated[int, Field(ge=0, lt=2**32)]], FiniteFloat | None]
    seen: NonNegativeInt


def save_training(trainer: SpotTrainer, folder: Path) -> None:
    tensors, values = trainer.state()
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, folder / TENSORS)
    (folder / VALUES).write_text(json.dumps(values) + "\n")


def load_training(trainer: SpotTrainer, folder: Path) -> None:
    """Go on where it was; from the beginning, if the run did not train the drafter before."""
    if not (folder / VALUES).is_file():
        return
    try:
        values = reading.read_object(folder / VALUES)
        reading.check(Values, values, VALUES)
        tensors = load_file(folder / TENSORS)
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise ValueError(f"tensor {name} is not finite")
        trainer.load(tensors, values)
    except (UserError, OSError, SafetensorError, KeyError, ValueError, TypeError) as err:
        raise UserError(
            f"the drafter's training at {folder} cannot be read: {err}; remove {TENSORS} and {VALUES} to begin anew"
        ) from err
