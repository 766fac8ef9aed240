"""Evaluations in a run directory: a row of `evaluations.jsonl` each, with the reward of every answer, so that any two
can be compared later; and some of the answers in `evaluation_samples.jsonl`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from paceline.errors import UserError
from paceline.evaluation.scores import EvalScores, PromptScores
from paceline.files import reading
from paceline.observe.metrics import append_line, read_rows

if TYPE_CHECKING:
    from paceline.evaluation.evaluator import EvalResult

EVALUATIONS = "evaluations.jsonl"
EVAL_SAMPLES = "evaluation_samples.jsonl"
Count = Annotated[int, Field(ge=0, le=2**40)]


class PromptRow(TypedDict):
    """The answers to one prompt."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    data: str
    rewards: Annotated[list[float], Field(min_length=1)]
    lengths: list[Count]
    cut: Count
    values: dict[str, list[float | None]]
    greedy: float | None


class EvalRow(TypedDict):
    """One evaluation."""

    __pydantic_config__ = ConfigDict(extra="ignore")  # type: ignore[misc]
    step: Count
    fingerprint: str
    seconds: float
    tokens: Count
    ks: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    pass_reward: float
    prompts: Annotated[list[PromptRow], Field(min_length=1)]


_ROW = reading.checker(EvalRow)


@dataclass(frozen=True)
class EvalRecord:
    step: int
    fingerprint: str
    """Of the prompts and dice: records with the same one can be compared pair by pair."""
    seconds: float
    tokens: int
    """Of all answers, greedy ones among them."""
    scores: EvalScores

    @classmethod
    def of(cls, step: int, fingerprint: str, result: EvalResult) -> EvalRecord:
        tokens = sum(len(c.tokens) for group in result.groups for c in group.completions.values())
        return cls(step, fingerprint, result.seconds, tokens, result.scores)

    def as_json(self) -> dict[str, Any]:
        scores = self.scores
        return {
            "step": self.step,
            "fingerprint": self.fingerprint,
            "seconds": round(self.seconds, 3),
            "tokens": self.tokens,
            "ks": scores.ks,
            "pass_reward": scores.pass_reward,
            "summary": scores.summary(),
            "prompts": [dict(vars(prompt)) for prompt in scores.prompts],
        }


def write_record(run: Path, record: EvalRecord) -> None:
    append_line(run / EVALUATIONS, record.as_json())


def read_records(run: Path) -> list[EvalRecord]:
    """In the order in which they were made."""
    file = run / EVALUATIONS
    records = []
    for number, (_, values) in enumerate(read_rows(file), 1):
        where = f"row {number} of {file}"
        row = _ROW(values, where)
        prompts = [_prompt(prompt) for prompt in row["prompts"]]
        if any(len(p.rewards) != len(prompts[0].rewards) or row["ks"][-1] > len(p.rewards) for p in prompts):
            raise UserError(f"{where} has prompts with another number of answers; fix or remove that line")
        scores = EvalScores(prompts, row["ks"], row["pass_reward"])
        records.append(EvalRecord(row["step"], row["fingerprint"], row["seconds"], row["tokens"], scores))
    return records


def _prompt(row: PromptRow) -> PromptScores:
    return PromptScores(row["data"], row["rewards"], row["lengths"], row["cut"], row["values"], row["greedy"])


def write_eval_samples(run: Path, step: int, result: EvalResult, count: int) -> None:
    """The first answer to each of so many prompts."""
    for group, scores in list(zip(result.groups, result.scores.prompts, strict=True))[:count]:
        first = min(group.completions)
        row = {"step": step, "data": scores.data, "prompt": group.sample.prompt, "answer": group.texts[first]}
        row |= {"reward": group.rewards[first], "finish": group.completions[first].finish_reason}
        append_line(run / EVAL_SAMPLES, row)
