"""A task's samples as groups of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core import Group, Request, SamplingParams
from paceline.errors import UserError
from paceline.tasks.sample import Task

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.model.tokenizer import Tokenizer


class PromptStream:
    """Prompt i of the stream has the request ids i * samples to (i + 1) * samples - 1, so a group is a function of the
    settings and its index."""

    def __init__(self, task: Task, tokenizer: Tokenizer, sampling: SamplingParams, config: Config, max_length: int):
        """`max_length` is the engine's: tokens of prompt and completion."""
        self.task = task
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.samples = config.rollout.samples
        self.seed = config.seed
        self.max_prompt_tokens = config.task.max_prompt_tokens or max_length - 1

    def group(self, index: int) -> Group:
        sample = self.task.sample(index)
        tokens = tuple(self.tokenizer.encode_prompt(sample.prompt, sample.where))
        if not tokens or len(tokens) > self.max_prompt_tokens:
            raise UserError(
                f"the prompt of {sample.where} of {self.task.name} has {len(tokens)} tokens; it must have between 1 "
                f"and {self.max_prompt_tokens} (task.max_prompt_tokens, and the model's context)"
            )
        return Group(sample, tokens)

    def requests(self, index: int, group: Group) -> list[Request]:
        first = index * self.samples
        return [Request(first + k, group.prompt, self.sampling, self.seed) for k in range(self.samples)]

    def index_of(self, request_id: int) -> int:
        return request_id // self.samples
