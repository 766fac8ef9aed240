"""The drafter's training in a checkpoint: beside the drafter, which others read without it."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from paceline.errors import UserError
from paceline.spot.trainer import SpotTrainer

TENSORS, VALUES = "training.safetensors", "training.json"


def save_training(trainer: SpotTrainer, folder: Path) -> None:
    tensors, values = trainer.state()
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, folder / TENSORS)
    (folder / VALUES).write_text(json.dumps(values) + "\n")


def load_training(trainer: SpotTrainer, folder: Path) -> None:
    """Go on where it was; from the beginning, if the run did not train the drafter before."""
    if not (folder / VALUES).is_file():
        return
    try:
        trainer.load(load_file(folder / TENSORS), json.loads((folder / VALUES).read_text()))
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as err:
        raise UserError(
            f"the drafter's training at {folder} cannot be read: {err}; remove {TENSORS} and {VALUES} to begin anew"
        ) from err
