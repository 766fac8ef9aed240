"""What there is to export: the policy and the drafter that belong to a run, a model's folder or a drafter's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.config import Config
from paceline.draft.eagle.checkpoint import is_drafter
from paceline.draft.eagle.files import DRAFTER, find_drafter
from paceline.errors import UserError
from paceline.files.reading import inside, named_path, read_object
from paceline.model.checkpoint import EMBEDDED, find_model
from paceline.run import Run


@dataclass
class Source:
    policy: Path
    """Folder of the policy's weights."""
    drafter: Path | None
    run: Path | None = None
    config: Config | None = None
    """The run's settings."""
    step: int | None = None
    """Steps that the policy was trained for."""

    @property
    def drafter_of_run(self) -> bool:
        """Whether the run itself has trained the drafter, or was free to."""
        return (
            self.run is not None and self.drafter is not None and self.run.resolve() in self.drafter.resolve().parents
        )


def find_source(what: str, model: str | None = None) -> Source:
    """`what` is a run, one of its checkpoints, a model with a drafter beside it, or a drafter; `model` names the policy
    of a drafter that lies elsewhere."""
    path = EMBEDDED if what == "embedded" else named_path(what)
    if model is not None and (path / "config.yaml").is_file():
        raise UserError(f"--model names the policy of a drafter, but {what} is a run and has its own")
    if (path / "config.yaml").is_file():
        run = Run.open(path)
        newest = run.newest_checkpoint()
        if newest is None:
            raise UserError(f"the run {path} has no checkpoint yet, so there is nothing to export")
        return _of_checkpoint(newest, run)
    if not (path / "config.json").is_file():
        raise UserError(f"nothing to export at {what}: name a run, a model's folder or a drafter's")
    if not _is_drafter(path):
        inside = path.resolve().parent
        if inside.name == "checkpoints" and (inside.parent / "config.yaml").is_file():
            return _of_checkpoint(path, Run.open(inside.parent))
        return Source(path, _beside(path))
    if model is not None:
        return Source(find_model(model), path)
    policy = path.resolve().parent
    if path.resolve().name != DRAFTER or not (policy / "config.json").is_file():
        raise UserError(f"the drafter at {path} does not lie beside its policy; name the policy with --model")
    return find_source(str(policy))


def _of_checkpoint(checkpoint: Path, run: Run) -> Source:
    drafter = _beside(checkpoint)
    config = run.given()  # what was decided for the machine of the run need not hold on this one
    wanted = config.speculation.drafter
    if drafter is None and wanted not in (None, "new", "none"):
        drafter = find_drafter(wanted, config.model.path)  # one that stood still
    number = checkpoint.name.removeprefix("step-")
    if not (number.isascii() and number.isdigit()):
        raise UserError(
            f"{checkpoint} is not called step-N, as the checkpoints of a run are; move it elsewhere to export it"
        )
    return Source(checkpoint, drafter, run.folder, config, int(number))


def _beside(model: Path) -> Path | None:
    return inside(model, DRAFTER) if (model / DRAFTER / "config.json").is_file() else None


def _is_drafter(folder: Path) -> bool:
    return is_drafter(read_object(inside(folder, "config.json")))
