"""The drafter's training in a checkpoint: next to the drafter, which others read without it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NotRequired

from pydantic import ConfigDict, Field
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import TypedDict

from paceline.errors import UserError
from paceline.files import reading
from paceline.spot.step_size import MAX_STEP_TOKENS

if TYPE_CHECKING:
    from paceline.spot.trainer import SpotTrainer

TENSORS = "training.safetensors"
VALUES = "training.json"
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
Count = Annotated[int, Field(ge=0, le=2**62)]
Word = Annotated[int, Field(ge=0, lt=2**32)]


class TrainerValues(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    steps: Count
    runs: NotRequired[Annotated[int, Field(ge=1, le=64)]]


class TrainingValues(TypedDict):
    """What `SpotTrainer.state` says besides tensors. The names are those of the file, which older checkpoints have."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    trainer: TrainerValues
    version: Count
    tokens: Count
    size: Annotated[float, Field(ge=1, le=MAX_STEP_TOKENS)]
    age: Count
    dice: tuple[int, Annotated[list[Word], Field(min_length=625, max_length=625)], float | None]
    seen: Count


def save_training(trainer: SpotTrainer, folder: Path) -> None:
    tensors, values = trainer.state()
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, folder / TENSORS)
    (folder / VALUES).write_text(json.dumps(values, allow_nan=False) + "\n", encoding="utf-8")


def load_training(trainer: SpotTrainer, folder: Path) -> None:
    """Resume where it was; from the beginning, if the run did not train the drafter before."""
    if not os.path.lexists(folder / VALUES):
        return
    try:
        values = reading.read_object(reading.inside(folder, VALUES))
        if isinstance(values.get("dice"), list):
            values["dice"] = tuple(values["dice"])  # JSON has no tuples
        checked = reading.check(TrainingValues, values, str(folder / VALUES))
        tensors = reading.read_tensors(reading.inside(folder, TENSORS))
        _check_tensors(trainer, tensors)
        trainer.load(tensors, dict(checked))
    except (UserError, KeyError, ValueError, TypeError) as err:
        raise UserError(
            f"the drafter's training at {folder} cannot be read: {err}; remove {TENSORS} and {VALUES} to begin anew"
        ) from err


def _check_tensors(trainer: SpotTrainer, tensors: dict[str, Tensor]) -> None:
    """Weights and both moments of each parameter have its shape; a count of steps is one number."""
    own = {name: tensor for name, tensor in trainer.state()[0].items() if name.startswith("master.")}
    shapes = {name.removeprefix("master."): tensor.shape for name, tensor in own.items()}
    if missing := own.keys() - tensors.keys():
        raise UserError(f"it has no tensor {min(missing)}")
    for name, tensor in tensors.items():
        part, _, parameter = name.partition(".")
        wanted = shapes.get(parameter)
        if wanted is None or not tensor.is_floating_point():
            raise UserError(f"tensor {reading.shorten(name)} is not one of the drafter's training")
        if tensor.shape != wanted and part != "step":
            raise UserError(f"tensor {name} has shape {list(tensor.shape)}, but the drafter has {list(wanted)}")
        if part == "step" and (tensor.dim() > 0 or float(tensor) < 0):
            raise UserError(f"tensor {name} is not a number of steps")
        if part == "exp_avg_sq" and bool((tensor < 0).any()):
            raise UserError(f"tensor {name} holds negative numbers, but it is a mean of squares")
