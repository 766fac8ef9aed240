"""From a row of a data set to a sample: which column is the prompt, or which columns it is made of, what is put before
it, and under which names rewards get the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.core import Prompt, Sample
from paceline.errors import UserError
from paceline.tasks.rows import PROMPT_SETTING, as_prompt, check_prompt, check_row
from paceline.tasks.templates import Template, column_of, find_entry

if TYPE_CHECKING:
    from paceline.config import TaskConfig

Messages = list[dict[str, Any]]


@dataclass
class Wording:
    prompt_column: str = "prompt"
    system: str | None = None
    template: Template | None = None
    columns: dict[str, str] = field(default_factory=dict)
    """Where each further column for rewards comes from."""
    few_shot: int = 0
    """How many of the first rows are examples."""
    answer: Template | None = None
    """Of such an example."""
    chat: bool = False
    """Whether what the template makes is a message, or stays text."""
    shots: list[tuple[Prompt, str]] = field(default_factory=list)
    """The examples: prompt and answer."""

    @classmethod
    def of(cls, config: TaskConfig, style: str) -> Wording:
        template = Template(config.template, "task.template") if config.template else None
        answer = Template(config.few_shot_answer, "task.few_shot_answer") if config.few_shot else None
        return cls(
            config.prompt_column, config.system, template, config.columns, config.few_shot, answer, style == "chat"
        )

    @property
    def needed(self) -> list[str]:
        """Columns that every row must have."""
        sources = self.template.names if self.template else [self.prompt_column]
        return list(dict.fromkeys(column_of(name) for name in (*sources, *self.columns.values())))

    def asked_by(self, column: str) -> str:
        """The setting that needs a column."""
        if self.template and column in map(column_of, self.template.names):
            return self.template.setting
        return PROMPT_SETTING if not self.template and column == self.prompt_column else "task.columns"

    def check(self, row: Any, where: str) -> None:
        """Refuse a row that cannot become a sample; `where` says which it is."""
        check_row(row, None if self.template else self.prompt_column, where)
        if self.template:
            check_prompt(self.template.fill(row, where), where)
        for source in self.columns.values():
            find_entry(row, source, where, "task.columns")

    def take_shots(self, rows: list[tuple[Mapping[str, Any], str]]) -> None:
        """Make the examples, from (row, which it is)."""
        assert self.answer is not None, "asked for with few_shot alone"
        if len(rows) < self.few_shot:
            raise UserError(f"task.few_shot = {self.few_shot}, but there are only {len(rows)} rows to take examples of")
        self.shots = [(self._question(row, where), self.answer.fill(row, where)) for row, where in rows]

    def sample(self, index: int, row: Mapping[str, Any], where: str) -> Sample:
        columns = dict(row)
        columns.pop(self.prompt_column, None)  # rewards have it as `prompts`
        marks = row.get("reward_model")
        if isinstance(marks, dict) and "ground_truth" in marks:
            columns["ground_truth"] = marks["ground_truth"]
        for name, source in self.columns.items():
            columns[name] = find_entry(row, source, where, "task.columns")
        return Sample(index, self.prompt(row, where), columns, where)

    def prompt(self, row: Mapping[str, Any], where: str) -> Prompt:
        """What the model is given: the question of a row that was checked, behind the system message and the
        examples."""
        return self._join(self._question(row, where))

    def _question(self, row: Mapping[str, Any], where: str) -> Prompt:
        if self.template is None:
            return as_prompt(row[self.prompt_column])
        text = self.template.fill(row, where)
        return [_message("user", text)] if self.chat else text

    def _join(self, question: Prompt) -> Prompt:
        parts = [question, *(prompt for prompt, _ in self.shots)]
        if self.system is None and all(isinstance(part, str) for part in parts):
            solved = [f"{prompt}{_gap(prompt)}{answer}" for prompt, answer in self.shots if isinstance(prompt, str)]
            return "\n\n".join([*solved, str(question)])
        messages = _messages(question)
        first = [messages[0]] if messages[0]["role"] == "system" else []
        if not first and self.system is not None:
            first = [_message("system", self.system)]
        for prompt, answer in self.shots:
            first += [*_turns(prompt), _message("assistant", answer)]
        return first + _turns(question)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _messages(prompt: Prompt) -> Messages:
    return [_message("user", prompt)] if isinstance(prompt, str) else list(prompt)


def _turns(prompt: Prompt) -> Messages:
    """Without the system message, of which a conversation has one."""
    messages = _messages(prompt)
    return messages[1:] if messages[0]["role"] == "system" else messages


def _gap(prompt: str) -> str:
    return "" if prompt[-1:].isspace() else " "
