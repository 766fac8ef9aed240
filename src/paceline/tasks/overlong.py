"""Prompts of more tokens than the model's context, or a setting, allows: left out, cut, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from paceline.core import Prompt
from paceline.errors import UserError
from paceline.tasks.sample import Task

if TYPE_CHECKING:
    from paceline.config import TaskConfig
    from paceline.model.tokenizer import Tokenizer

Overlong = Literal["leave_out", "left", "right", "middle", "error"]
TEMPLATE_TOKENS = 4
"""Most times the tokens of the first prompt that a chat template may add to each message of another one; prompts that
are certain to fit by that are not tokenized before their turn comes."""


class PromptLimit:
    def __init__(self, config: TaskConfig, context: int, tokenizer: Tokenizer, task: Task, say: Callable[[str], None]):
        """`context` is what the model allows. Prompts of a data set are examined, and left out of it if that is the
        setting; `say` is told how many, and later of the first that is met on the way."""
        self.most = min(config.max_prompt_tokens or context, context)
        by_setting = config.max_prompt_tokens is not None and config.max_prompt_tokens <= context
        self._bound = f"the {self.most:,} " + ("of task.max_prompt_tokens" if by_setting else "of the model's context")
        self._what: Overlong = config.overlong_prompts
        self._tokenizer = tokenizer
        self._say = say
        self.count = 0
        """Prompts that were found to be too long."""
        self._first = ""
        self._overhead: int | None = None
        self._examining = True
        visit = getattr(task, "leave_out", None)  # of others, samples are made when they are asked for
        total = visit(self.fits, keep=self._what != "leave_out") if visit else None
        self._examining = False
        if self.count and total is not None:
            self._sum_up(total, task.name)

    @property
    def leaves_out(self) -> bool:
        return self._what == "leave_out"

    def encode(self, prompt: Prompt, where: str) -> list[int]:
        """Tokens of a prompt of any length."""
        tokens = self._tokenizer.encode_prompt(prompt, where)
        if not tokens:
            raise UserError(f"the prompt of {where} has no tokens")
        return tokens

    def fits(self, prompt: Prompt, where: str) -> bool:
        """Whether it is short enough; it is counted if it is not, or refused if that is the setting."""
        if self._certainly_fits(prompt, where):
            return True
        length = len(self.encode(prompt, where))
        if length <= self.most:
            return True
        self.found(length, where)
        return False

    def found(self, length: int, where: str) -> None:
        """One is too long."""
        if self._what == "error":
            raise UserError(
                f"the prompt of {where} has {length:,} tokens, more than {self._bound}; leave such prompts out with "
                "task.overlong_prompts=leave_out, or cut them with left, right or middle"
            )
        if not self.count:
            self._first = f"{where} with {length:,}"
            if not self._examining:
                self._say(
                    f"a prompt has more tokens than {self._bound} and is {self._done}, as others like it will be: "
                    f"{self._first} (task.overlong_prompts)"
                )
        self.count += 1

    def _certainly_fits(self, prompt: Prompt, where: str) -> bool:
        """By its bytes: a token has at least one."""
        messages = [prompt] if isinstance(prompt, str) else [str(m.get("content") or "") for m in prompt]
        if self._overhead is None:
            self._overhead = len(self.encode(prompt, where)) * TEMPLATE_TOKENS
        return sum(len(text.encode("utf-8")) + self._overhead for text in messages) <= self.most

    def cut(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """verl's truncation, which names the side that is lost."""
        if self._what == "left":
            return tuple(tokens[-self.most :])
        if self._what == "right":
            return tuple(tokens[: self.most])
        head = self.most // 2
        return (*tokens[:head], *tokens[len(tokens) - (self.most - head) :])

    @property
    def _done(self) -> str:
        return "left out" if self.leaves_out else f"cut ({self._what})"

    def _sum_up(self, total: int, name: str) -> None:
        if self.leaves_out and self.count == total:
            raise UserError(f"all {total:,} prompts of {name} have more tokens than {self._bound}: {self._first}")
        self._say(
            f"{self.count:,} of {total:,} prompts of {name} have more tokens than {self._bound} and are {self._done}: "
            f"the first is {self._first} (task.overlong_prompts)"
        )
