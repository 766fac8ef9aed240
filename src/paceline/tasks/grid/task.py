"""Screening: given the state of a grid, which of some single outages break a limit? Prompts are drawn as they are asked
for, each from its index; the test part has topologies of its own: other lines are out already."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.core import Prompt, Sample, mix_seed
from paceline.errors import UserError
from paceline.tasks.grid.network import CASES
from paceline.tasks.grid.scenario import Scenario, draw
from paceline.tasks.grid.scores import parse_screening, score
from paceline.tasks.sample import text_of

SPLITS = ("train", "test")
LEVELS = {"easy": (14, 4), "medium": (30, 5), "hard": (57, 6), "expert": (118, 8)}
"""Buses of the case, and candidates."""
KINDS = ("screening", "tool")

STATE = (
    "The IEEE grid with {case} buses carries {level:.0%} of its usual load{out}. Lines are named by their buses. For "
    "each of these lines, its loading in percent of its limit: {candidates}.\n"
    "Which of them, if it alone went out now, would leave another line above its limit (100) or a bus beyond its "
    "voltage limits, and what would the worst of them be, in percent of its limit?"
)
HOW = (
    " Give all such lines with that number inside <answer> </answer>, like <answer>4-5: 118, 2-3: 104</answer>, or "
    "<answer>none</answer>."
)


class GridOptions(BaseModel):
    """`task.options` of this task."""

    model_config = ConfigDict(extra="forbid")
    case: int | None = None
    """14, 30, 57 or 118 buses; by default as the difficulty has it."""
    candidates: int | None = Field(None, ge=1, le=50)
    """Outages that are asked about; by default as the difficulty has it."""


class Grid:
    reward = "grid"

    def __init__(self, kind: str, options: dict[str, Any], difficulty: str, style: str, split: str, seed: int):
        try:
            self.options = GridOptions.model_validate(options)
        except ValidationError as err:
            first = err.errors()[0]
            where = ".".join(map(str, ("task.options", *first["loc"])))
            raise UserError(f"{where}: {first['msg']}; grid takes {', '.join(GridOptions.model_fields)}") from err
        if kind not in KINDS:
            raise UserError(f"there is no task 'grid:{kind}'; there are: {', '.join(f'grid:{one}' for one in KINDS)}")
        if difficulty not in LEVELS:
            raise UserError(f"grid:{kind} has no difficulty '{difficulty}'; it has: {', '.join(LEVELS)}")
        if split not in SPLITS:
            raise UserError(f"task.split = '{split}' is not a part of grid:{kind}; it has train and test, by topology")
        case, candidates = LEVELS[difficulty]
        self.case = self.options.case or case
        self.candidates = self.options.candidates or candidates
        if self.case not in CASES:
            raise UserError(f"task.options.case = {self.case} is no case; there are: {', '.join(map(str, CASES))}")
        self.name = f"grid:{kind}"
        self.style = style
        self.split = split
        self.seed = mix_seed(seed, "grid", split)
        draw(self.case, split, self.candidates, 0)  # what is missing is better found now

    def sample(self, index: int) -> Sample:
        scenario = draw(self.case, self.split, self.candidates, mix_seed(self.seed, index))
        return Sample(index, self._prompt(scenario), scenario.columns(), f"IEEE {self.case}")

    def _prompt(self, scenario: Scenario) -> Prompt:
        loadings = scenario.base()
        shown = [(name, round(loadings[name])) for name in scenario.candidates]
        if self.style == "search":
            state = " ".join(f"{name}:{loading}" for name, loading in shown)
            return f"{scenario.case} {scenario.level:.2f} {scenario.out or 'none'} | {state}\n"
        out = f", and line {scenario.out} is out already" if scenario.out else ""
        listed = ", ".join(f"{name}: {loading}" for name, loading in shown)
        text = STATE.format(case=scenario.case, level=scenario.level, out=out, candidates=listed) + HOW
        return [{"role": "user", "content": text}] if self.style == "chat" else text + "\n"


def reward(completions: list[Any], **columns: list[Any]) -> list[float]:
    """From the AC power flow of every candidate (see `scores`)."""
    out = []
    for i, completion in enumerate(completions):
        scenario = Scenario.of({name: columns[name][i] for name in ("case", "level", "load_seed", "out", "candidates")})
        out.append(score(parse_screening(text_of(completion)), scenario.truth()))
    return out
