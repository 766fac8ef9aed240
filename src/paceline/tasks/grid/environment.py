"""With a tool: before it answers, the model may have some outages computed by an AC power flow."""

from __future__ import annotations

import re
from typing import Any

from paceline.core import Prompt, Sample
from paceline.tasks.grid.scenario import Scenario
from paceline.tasks.grid.scores import parse_screening

ASKED = re.compile(r"run\s+(\d+-\d+)", re.IGNORECASE)
RULES = (
    "You may have up to {flows} outages computed before you answer: write, for example, run {example} and end your "
    "message there; you are told the worst loading and voltage, in percent of the limits.\n"
)


class GridEnvironment:
    """`run 4-5` at the end of a turn computes that outage; anything else is the answer. The reward is the task's own,
    which the answer alone decides."""

    def __init__(self, flows: int = 3):
        self.flows = flows
        self.left = flows
        self.scenario: Scenario | None = None

    def reset(self, sample: Sample) -> Prompt | None:
        self.scenario = Scenario.of(sample.columns)
        self.left = self.flows
        if isinstance(sample.prompt, str) and sample.prompt.count("\n") == 1 and " | " in sample.prompt:
            return None  # the small models' own format, which has no words
        rules = RULES.format(flows=self.flows, example=self.scenario.candidates[0])
        if isinstance(sample.prompt, str):
            return sample.prompt + rules
        return [
            *sample.prompt[:-1],
            sample.prompt[-1] | {"content": f"{sample.prompt[-1]['content']}\n{rules.strip()}"},
        ]

    def step(self, text: str) -> tuple[str, None, bool]:
        assert self.scenario is not None, "reset comes first"
        asked = ASKED.findall(text)
        if not asked or parse_screening(text):
            return "", None, True
        name = asked[-1]
        if name not in self.scenario.candidates:
            return self._told(f"{name} is none of the lines that are asked about"), None, False
        if self.left == 0:
            return self._told("no power flow is left; give the answer"), None, False
        self.left -= 1
        flow = self.scenario.outage(name)
        return self._told(self._describe(name, flow)), None, False

    def _describe(self, name: str, flow: Any) -> str:
        if flow.bus == 0:
            return f"{name}: the power flow has no solution, {flow.severity:.0f}"
        return f"{name}: {flow.severity:.0f} (loading {flow.loading:.0f}, voltage {flow.voltage:.0f}), {self.left} left"

    def _told(self, text: str) -> str:
        return f"\n{text}\n"
