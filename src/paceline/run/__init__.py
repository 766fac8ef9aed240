"""A run as a directory: its files, its checkpoints, what is recorded of each step, and how it is saved when it stops.

directory     `Run`: the directory itself, its lock, its settings and its logs
checkpoints   saving and restoring; `Progress`, all that a run is beside its weights
records       metrics, rows and timeline spans of a step
changes       settings that change when a run is resumed, and those that may not
sources       its data and reward files: absolute paths, hashes, copies
state         what has become of it: finished, running, stopped, failed
saver         saves a run that stops at any moment, and says how to resume it
"""

from paceline.run.checkpoints import Progress
from paceline.run.directory import Run

__all__ = ["Progress", "Run"]
