"""Where prompts come from and how completions are rewarded. Imports no model: reward processes import only this."""

from paceline.tasks.sample import Task
from paceline.tasks.tasks import make_task

__all__ = ["Task", "make_task"]
