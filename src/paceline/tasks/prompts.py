"""A task's samples as groups of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.core import Group, Request, Sample, SamplingParams
from paceline.errors import UserError
from paceline.tasks.overlong import PromptLimit
from paceline.tasks.sample import Task

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.model.tokenizer import Tokenizer

MAX_SKIPPED = 1000
"""Samples in a row that are too long before a task that makes them is given up."""


class PromptStream:
    """Prompt i of the stream has the request ids i * samples to (i + 1) * samples - 1, so a group is a function of the
    settings and its index."""

    def __init__(
        self,
        task: Task,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        config: Config,
        max_length: int,
        say: Callable[[str], None] = lambda text: None,
        prepare: Callable[[Sample], Sample] | None = None,
    ):
        """`max_length` is the engine's: tokens of prompt and completion. `say` shows a line to the user. `prepare` has
        an environment make the prompt, where completions have turns."""
        self.task = task
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.samples = config.rollout.samples
        self.seed = config.seed
        self._prepare = prepare
        self._peeked: dict[int, Group] = {}
        self.limit = PromptLimit(config.task, max_length - 1, tokenizer, task, say)

    def peek(self, index: int) -> list[Request]:
        """The requests of an index before its turn; none where `group` will say what is wrong with its prompt."""
        if index not in self._peeked:
            try:
                self._peeked[index] = self._make_group(index)
            except UserError:
                return []
        return self.requests(index, self._peeked[index])

    def group(self, index: int) -> Group:
        """The one at an index."""
        return self._peeked.pop(index, None) or self._make_group(index)

    def _make_group(self, index: int) -> Group:
        """Where its prompt is too long, it is cut, or the next one that is not takes its place;
        those of data sets were left out before."""
        for skipped in range(MAX_SKIPPED):
            sample = self.task.sample(index + skipped)
            sample = self._prepare(sample) if self._prepare else sample
            tokens = self.limit.encode(sample.prompt, sample.where)
            if len(tokens) <= self.limit.most:
                return Group(sample, tuple(tokens))
            self.limit.found(len(tokens), sample.where)
            if not self.limit.leaves_out:
                return Group(sample, self.limit.cut(tokens))
        raise UserError(
            f"{MAX_SKIPPED:,} prompts of {self.task.name} in a row have more than {self.limit.most:,} tokens; raise "
            "task.max_prompt_tokens, or cut them with task.overlong_prompts"
        )

    def requests(self, index: int, group: Group) -> list[Request]:
        first = index * self.samples
        acts = self._prepare is not None
        return [Request(first + k, group.prompt, self.sampling, self.seed, acts) for k in range(self.samples)]

    def index_of(self, request_id: int) -> int:
        return request_id // self.samples
