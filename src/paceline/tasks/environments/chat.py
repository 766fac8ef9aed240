"""Observations as tokens: what the model's chat template puts between a turn of the assistant and the next one.

The turns themselves are never rendered again: they stay the tokens that the policy drew. A conversation with a mark in
place of the turn is rendered, and what stands behind the mark is what is put behind the turn, without the token that
ends it, if the policy has written that itself.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from paceline.core import Prompt
from paceline.errors import UserError
from paceline.tasks.environments.calls import Family, family_of
from paceline.tasks.environments.messages import Action
from paceline.tasks.environments.protocol import Messages
from paceline.tasks.environments.tools import describe_tools

if TYPE_CHECKING:
    from paceline.model.tokenizer import Tokenizer

MARK = "paceline0mark1paceline"
RESULT = "paceline2mark3paceline"
PLAIN_RESULT = "\n<result>{}</result>\n"
"""What a tool has returned, where there is no template."""


class Chat:
    def __init__(self, tokenizer: Tokenizer, schemas: tuple[dict[str, Any], ...], describe: bool):
        """`schemas` are those of the tools; `describe` says that the model is told of them in words where its template
        does not."""
        self.tokenizer = tokenizer
        template = tokenizer.hf.chat_template
        self._template: str | None = template if isinstance(template, str) else None
        self._schemas = list(schemas)
        self._in_template = bool(schemas) and "tools" in (self._template or "")
        self._described = "" if self._in_template or not schemas or not describe else describe_tools(self._schemas)
        if self._in_template:
            tokenizer.template_kwargs = {**tokenizer.template_kwargs, "tools": self._schemas}

    @property
    def family(self) -> Family:
        return family_of(self._template)

    def offered(self, prompt: Prompt) -> Prompt:
        """A prompt that tells of the tools, where the template does not do it."""
        if not self._described:
            return prompt
        if isinstance(prompt, str):
            return self._described + prompt
        first = prompt[0]
        if first.get("role") == "system":
            return [first | {"content": f"{self._described}{first['content']}"}, *prompt[1:]]
        return [{"role": "system", "content": self._described.strip()}, *prompt]

    def action(self, turn: list[int]) -> Action:
        """A turn as text."""
        ended = bool(turn) and turn[-1] in self.tokenizer.eos_ids
        written = turn[:-1] if ended else turn
        end = self.tokenizer.decode(turn[-1:], skip_special=False) if ended else ""
        return Action(self.tokenizer.decode(written), self.tokenizer.decode(written, skip_special=False), end)

    def failure(self, told: str) -> str | Messages:
        """What the model is told of a step that failed."""
        return [{"role": "tool", "content": told}] if self._schemas else told

    def observation(self, end: str, seen: str | Messages, is_chat: bool) -> list[int]:
        """Tokens behind a turn that was ended by the token `end`: what was observed, up to where the policy begins to
        write."""
        if not is_chat:
            text = seen if isinstance(seen, str) else "".join(PLAIN_RESULT.format(m.get("content", "")) for m in seen)
            return self.tokenizer.encode_text(text)
        messages = [{"role": "user", "content": seen}] if isinstance(seen, str) else seen
        if not self._knows_tool_role:
            messages = [m if m["role"] == "user" else {"role": "user", "content": m["content"]} for m in messages]
        return self.tokenizer.encode_text(self._behind(messages).removeprefix(end))

    def _behind(self, messages: Messages) -> str:
        """What the template puts behind the assistant's turn."""
        before: Messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
        _, mark, behind = self.tokenizer.render([*before, *messages]).rpartition(MARK)
        if not mark:
            raise UserError(
                f"the chat template of {self.tokenizer.where} does not show what the assistant wrote, so that nothing "
                "can be put behind it; prompts that are text need no template (task.style=text)"
            )
        return behind

    @cached_property
    def _knows_tool_role(self) -> bool:
        """Otherwise the user says what a tool has returned."""
        try:
            return RESULT in self._behind([{"role": "tool", "content": RESULT}])
        except UserError:
            return False
