"""Tasks of reasoning-gym by name, generated and scored by that library."""

from __future__ import annotations

import difflib
from typing import Any

from paceline.errors import UserError
from paceline.tasks.sample import Sample, mix_seed

DEFAULT_SIZE = 100_000
INSTRUCTION = "Give the final answer inside <answer> </answer>."


class Gym:
    reward = "gym"

    def __init__(self, name: str, options: dict[str, Any], style: str, seed: int = 0):
        gym = _library()
        known = sorted(gym.factory.DATASETS)
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            raise UserError(
                f"reasoning-gym has no task '{name}'" + (f"; close names: {', '.join(close)}" if close else "")
            )
        self.name, self.style = f"gym:{name}", style
        settings = {"size": DEFAULT_SIZE, "seed": mix_seed(seed, name) % 2**31} | options
        try:
            self.data = gym.create_dataset(name, **settings)
        except (TypeError, AssertionError, ValueError) as err:
            raise UserError(f"reasoning-gym's '{name}' does not take task.options = {options}: {err}") from err

    def sample(self, index: int) -> Sample:
        entry = self.data[index % len(self.data)]
        text = f"{entry['question']}\n\n{INSTRUCTION}"
        prompt = [{"role": "user", "content": text}] if self.style == "chat" else text + "\n"
        return Sample(index, prompt, {"entry": entry, "task": self.name.removeprefix("gym:")})


def score(text: str, entry: dict[str, Any], task: str) -> float:
    gym = _library()
    answer = gym.utils.extract_answer(text, tag_name="answer")
    return float(gym.get_score_answer_fn(task)(answer, entry))


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as err:
        raise UserError("gym tasks need reasoning-gym: pip install 'paceline[gym]'") from err
    return reasoning_gym
