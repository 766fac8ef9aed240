"""The learner in a checkpoint: one file for a lone worker, one for each where several share the work. Whoever loads it
takes what it holds from all of them, so a run can go on with another number of workers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from paceline.errors import UserError
from paceline.learn.learner import Learner


def save_learner(learner: Learner, folder: Path, worker: int, names: Iterable[str], reference: bool) -> None:
    state = {name: t.detach().cpu().contiguous() for name, t in learner.state(set(names), reference).items()}
    save_file(state, folder / f"learner-{worker}.safetensors")


def load_learner(learner: Learner, folder: Path) -> None:
    files = sorted(folder.glob("learner*.safetensors"))
    try:
        state = {k: t for file in files for k, t in load_file(file, device=str(learner.model.device)).items()}
        learner.load(state)
    except (OSError, SafetensorError, KeyError, ValueError) as err:
        raise UserError(f"the checkpoint {folder} cannot be read: {err}; remove it to go on from an older one") from err
