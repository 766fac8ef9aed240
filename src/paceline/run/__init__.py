"""A run as a directory: its files, its checkpoints, what is recorded of each step, and how it is saved when it stops.

directory     `Run`: the directory itself, its lock, its settings and its logs
checkpoints   saving and restoring; `Progress`, all that a run is beside its weights
records       metrics, rows and timeline spans of a step
saver         saves a run that stops at any moment, and says how to resume it
"""

from paceline.run.checkpoints import Progress
from paceline.run.directory import Run

__all__ = ["Progress", "Run"]
