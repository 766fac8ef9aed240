"""Where prompts come from and how answers are judged. Knows nothing of models: reward processes import only this."""

from paceline.tasks.sample import Sample, Task
from paceline.tasks.tasks import make_task

__all__ = ["Sample", "Task", "make_task"]
