"""Tasks of reasoning-gym by name, generated and scored by that library."""

from __future__ import annotations

import difflib
from typing import Any

from paceline.core import Sample, mix_seed
from paceline.errors import UserError
from paceline.files.reading import shorten

DEFAULT_SIZE = 100_000  # problems, unless task.options names a size
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
        self.name = f"gym:{name}"
        self.style = style
        settings = {"size": DEFAULT_SIZE, "seed": mix_seed(seed, name) % 2**31} | options
        try:
            self.data = gym.create_dataset(name, **settings)
            size = len(self.data)
        except Exception as err:  # each of its tasks refuses options in its own way
            raise UserError(f"{self._takes(options)}: {_reason(err)}") from err
        if size < 1:
            raise UserError(f"{self._takes(options)}: there would be no samples")
        self.options = options

    def _takes(self, options: dict[str, Any]) -> str:
        name = self.name.removeprefix("gym:")
        return f"reasoning-gym's '{name}' does not take task.options = {shorten(str(options), 200)}"

    def sample(self, index: int) -> Sample:
        try:
            entry = self.data[index % len(self.data)]
        except Exception as err:  # some options are refused only where a problem is made from them
            raise UserError(f"{self._takes(self.options)}, found at sample {index}: {_reason(err)}") from err
        text = f"{entry['question']}\n\n{INSTRUCTION}"
        prompt = [{"role": "user", "content": text}] if self.style == "chat" else text + "\n"
        return Sample(index, prompt, {"entry": entry, "task": self.name.removeprefix("gym:")})


def score(text: str, entry: dict[str, Any], task: str) -> float:
    gym = _library()
    answer = gym.utils.extract_answer(text, tag_name="answer")
    return float(gym.get_score_answer_fn(task)(answer, entry))


def _reason(err: Exception) -> str:
    return shorten(str(err), 200) or type(err).__name__


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as err:
        raise UserError("gym tasks need reasoning-gym: pip install 'paceline[gym]'") from err
    return reasoning_gym
