"""Whether a run can learn anything from its answers, and if not, the likely cause: one sentence for each, once.

Answers teach by how their rewards differ within a group, so all causes are of one kind: rewards that are equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LOOK_BACK = 3
"""Steps in a row that must look alike before anything is said of them."""
MANY_CUT = 0.5
"""Share of answers that end at max_tokens from which on that is said."""
ALONE = ("reinforce_pp",)
"""Algorithms that compare answers over the whole batch, for which a group may have one member."""


@dataclass(frozen=True)
class NoSignal:
    """A likely cause of learning nothing."""

    cause: str
    sentence: str
    step: int = 0
    """At which it was found."""

    @property
    def heading(self) -> str:
        """How much of the run it is about."""
        if self.cause.startswith("reward/"):
            return "one reward may teach nothing"
        return "answers are cut" if self.cause == "cut" else "nothing may be learned"


def find_causes(settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[NoSignal]:
    """Of a whole run, each cause once, in the order in which they were found. `settings` are by their dotted keys,
    `rows` those of metrics.jsonl."""
    found: dict[str, NoSignal] = {}
    for end in range(1, len(rows) + 1):
        for one in causes_now(settings, rows[max(0, end - LOOK_BACK) : end]):
            found.setdefault(one.cause, one)
    return list(found.values())


def causes_now(settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[NoSignal]:
    """Those that the last steps show; `rows` are at most LOOK_BACK of them."""
    found = dict(_by_settings(settings))
    if not found and len(rows) == LOOK_BACK:
        found |= dict(_by_metrics(settings, rows))
    return [NoSignal(cause, sentence, int(rows[-1].get("step", 0))) for cause, sentence in found.items()]


def _by_settings(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    if settings.get("rollout.samples") == 1 and settings.get("learn.algorithm") not in ALONE:
        return [
            (
                "samples",
                "rollout.samples=1, but an answer is compared with others to its prompt, so that one alone teaches "
                "nothing: set rollout.samples to 4 or more",
            )
        ]
    if settings.get("rollout.temperature") == 0:
        return [
            (
                "temperature",
                "rollout.temperature=0 makes all answers to a prompt the same, so that none is better than another: "
                "set it to 1",
            )
        ]
    return []


def _by_metrics(settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    found = []
    steps = f"in {LOOK_BACK} steps"
    cut = _mean(rows, "response_length/clip_ratio")
    tokens = settings.get("rollout.max_tokens")
    names = {name for row in rows for name in row if name.startswith("reward/") and name != "reward/errors"}
    if all(row.get("groups/mixed") == 0 for row in rows):
        low = min(float(row.get("critic/rewards/min", math.nan)) for row in rows)
        high = max(float(row.get("critic/rewards/max", math.nan)) for row in rows)
        if not names:
            why = f"no reward function gave a value {steps}: all returned None"
        elif low == high and cut >= MANY_CUT:
            why = (
                f"{cut:.0%} of the answers were cut at rollout.max_tokens={tokens}, and all got the reward {low:g}: "
                "let them finish, with a larger max_tokens"
            )
        elif low == high == 0:
            why = (
                f"every answer got the reward 0 {steps}: the function never fires; see in samples.jsonl whether "
                "answers have the form that it looks for, and whether the model can solve any of the prompts"
            )
        elif low == high:
            why = f"every answer got the reward {low:g} {steps}: the function does not tell answers apart"
        else:
            why = (
                f"all answers to a prompt got the same reward, for every prompt {steps}: prompts are too easy or too "
                "hard for the model; take others, or more samples per prompt"
            )
        found.append(("equal", why))
    elif cut >= MANY_CUT:
        found.append(
            (
                "cut",
                f"{cut:.0%} of the answers were cut at rollout.max_tokens={tokens} {steps}, so that their rewards are "
                "those of unfinished answers: raise it",
            )
        )
    if len(names) > 1:
        for name in sorted(names):
            if all(row.get(name, 0.0) == 0 for row in rows):
                words = f"the reward {name.removeprefix('reward/')} was 0 on average in each of {LOOK_BACK} steps"
                found.append((name, f"{words}: does it ever fire?"))
    return found


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    values = [float(row.get(name, math.nan)) for row in rows]
    return sum(values) / len(values) if all(map(math.isfinite, values)) else 0.0
