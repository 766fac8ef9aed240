"""What is special about a run that is resumed: files that have changed or gone since, settings that were changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.draft.eagle.files import DRAFTER, find_drafter
from paceline.errors import UserError
from paceline.run.changes import describe_changes, write_changes
from paceline.run.sources import SourceCheck, check_sources, with_stand_ins, write_sources
from paceline.run.state import forget_end

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.observe.live import LiveView
    from paceline.run import Progress, Run
    from paceline.tasks import Task

GIVEN = "data"
"""What the settings of a run call rows that were given in Python."""


@dataclass
class Resumption:
    """Of a run that begins there is nothing to tell."""

    run: Run
    newest: Path | None
    """The checkpoint that the run goes on from."""
    sources: SourceCheck = field(default_factory=SourceCheck)

    @classmethod
    def of(cls, run: Run, config: Config, task: Task | None) -> Resumption:
        """Refuses data that has changed, or was given in Python and is not now."""
        if task is None and config.task.name == GIVEN:
            raise UserError(
                f"the data of the run {run.folder} was given in Python: resume it there, with "
                f"Trainer.resume({str(run.folder)!r}, data, reward)"
            )
        return cls(run, run.newest_checkpoint(), check_sources(run.folder, config))

    def without_model(self, config: Config) -> Config:
        """The config, with no drafter of the model's folder if that has gone: a checkpoint has all else."""
        name = config.speculation.drafter
        if self.newest is None or config.speculation.mode == "plain" or name == "new":
            return config
        try:
            find_drafter(name, config.model.path)
        except UserError:
            own = self.newest / DRAFTER
            if name != "auto" and not own.is_dir():
                raise
            there = str(own) if own.is_dir() else "none"
            return config.model_copy(update={"speculation": config.speculation.model_copy(update={"drafter": there})})
        return config

    def with_rewards(self, config: Config) -> Config:
        """The config, with the run's own copies for reward files that have gone."""
        return with_stand_ins(config, self.sources.stand_ins)

    def check_steps(self, progress: Progress, steps: int) -> None:
        if "steps" in self.run.changes and steps < progress.step:
            raise UserError(f"'steps' = {steps} does not work: the run has made {progress.step} steps already")

    def tell(self, config: Config, progress: Progress, view: LiveView) -> None:
        """Say what is different, and write it down."""
        forget_end(self.run.folder)
        write_sources(self.run.folder, config)
        for name, copy in self.sources.stand_ins.items():
            view.note(f"{name} has gone; the run's copy is used: {copy}")
        for name, (before, after) in self.sources.changed.items():
            kept = f"sources/{before}/{Path(name).name} in the run is what it was"
            view.note(f"the reward file {name} has changed since the run used it (hash {before} -> {after}); {kept}")
        changes = self.run.changes | self.sources.changed
        if self.run.changes:
            view.note(f"from step {progress.step + 1} on: {describe_changes(self.run.changes)}")
        if changes:
            write_changes(self.run.folder, progress.step, changes)
        self.run.changes = {}
        if self.newest is not None and progress.step >= config.steps:
            more = progress.step * 2
            view.note(f"all {config.steps} steps are done; for more: {self.run.resume_command} steps={more}")
