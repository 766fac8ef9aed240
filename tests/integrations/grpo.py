"""A GRPO script on the embedded model, with and without Paceline."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # rollout_func is experimental, and says so every time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from paceline.model.checkpoint import EMBEDDED
from paceline.tasks import countdown
from paceline.tasks.countdown import Countdown

PROMPTS = 16


def data(prompts: int = PROMPTS, difficulty: str = "easy") -> Dataset:
    task = Countdown(difficulty, "search", 3, None)
    samples = [task.sample(i) for i in range(prompts)]
    return Dataset.from_list([{"prompt": s.prompt, **s.columns} for s in samples])


class Reward:
    """Countdown's own, which remembers what it has seen, in the trainer's order."""

    __name__ = "countdown"

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.completions: list[Any] = []
        self.values: list[float] = []

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        rows = zip(completions, columns["numbers"], columns["target"], strict=True)
        values = [countdown.reward([text], [numbers], [target])[0] for text, numbers, target in rows]
        self.prompts += prompts
        self.completions += completions
        self.values += values
        return values


def make(folder: Path, reward: Any, dtype: torch.dtype = torch.float32, **changes: Any) -> GRPOTrainer:
    names = ("rollout_func", "callbacks", "peft_config", "tools", "environment_factory")
    beside = {k: changes.pop(k) for k in names if k in changes}
    train, tokenizer = changes.pop("train_dataset", None), changes.pop("tokenizer", None)
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_steps": 2,
        "max_completion_length": 48,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": 5,
    }
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=dtype),
        reward_funcs=reward,
        args=GRPOConfig(**settings | changes),
        train_dataset=train or data(),
        processing_class=tokenizer or AutoTokenizer.from_pretrained(EMBEDDED),
        **beside,
    )
