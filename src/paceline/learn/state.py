"""The learner in a checkpoint: one file for a lone worker, one for each where several share the work. Whoever loads it
takes what it holds from all of them, so a run can resume with another number of workers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import UserError
from paceline.files import reading
from paceline.learn.learner import Learner

FILE = re.compile(r"learner(-[0-9]{1,9})?\.safetensors")
COUNTERS = ("updates", "optimizer.steps")


def save_learner(learner: Learner, folder: Path, worker: int, names: Iterable[str], reference: bool) -> None:
    state = {name: t.detach().cpu().contiguous() for name, t in learner.state(set(names), reference).items()}
    save_file(state, folder / f"learner-{worker}.safetensors")


def load_learner(learner: Learner, folder: Path) -> None:
    """Nothing is taken over unless all of it is as it should be."""
    try:
        state: dict[str, Tensor] = {}
        for file in sorted(folder.iterdir()):
            if FILE.fullmatch(file.name):
                state |= reading.read_tensors(reading.inside(folder, file.name), str(learner.model.device))
        for name, own in learner.state().items():
            _check(name, own, state)
        learner.load(state)
    except (UserError, OSError) as err:
        raise UserError(f"the checkpoint {folder} cannot be read: {err}; remove it to go on from an older one") from err


def _check(name: str, own: Tensor, state: dict[str, Tensor]) -> None:
    kept = state.get(name)
    if kept is None:
        raise UserError(f"its learner has no tensor {name}")
    if kept.shape != own.shape:
        raise UserError(f"tensor {name} has shape {list(kept.shape)}, but the model needs {list(own.shape)}")
    if name in COUNTERS:
        if kept.is_floating_point() or not 0 <= int(kept) < 2**62:
            raise UserError(f"{name} is {kept.item()}, which is not a number of steps")
    elif not kept.is_floating_point() or kept.itemsize < 2:
        raise UserError(f"tensor {name} is of type {str(kept.dtype).removeprefix('torch.')}")
    elif ".square." in name and bool((kept < 0).any()):
        raise UserError(f"tensor {name} holds negative numbers, but it is a mean of squares")
