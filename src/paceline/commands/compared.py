"""What `paceline compare` measures in a step, and its result over all steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from rich.table import Table

from paceline.core import Group
from paceline.observe.energy import spent
from paceline.rollout.differences import Difference
from paceline.rollout.stats import EngineStats

PLAIN_MODE = "plain"
ADAPTIVE_MODE = "adaptive"
NO_TRAINING_MODE = "adaptive, idle workers wait"


@dataclass
class ModeRollout:
    """The rollout of one step in one mode."""

    rollout_s: float
    """From the first prompt to the last answer."""
    reward_s: float = 0.0
    """From the last answer to its reward."""
    mean_reward: float = 0.0
    lengths: list[int] = field(default_factory=list)
    """Tokens of each answer; rounding can make them differ between modes."""
    joules: float | None = None
    """Energy, where the device counts it."""


@dataclass
class Identity:
    """Whether the other modes wrote the same tokens as the plain one."""

    responses: int = 0
    """Pairs of responses that were compared."""
    tokens: int = 0
    """Of the plain responses."""
    different: int = 0
    """Pairs that differ."""
    differences: list[Difference] = field(default_factory=list)
    """Those of them that were explained."""


@dataclass
class ComparedStep:
    modes: dict[str, ModeRollout]
    identity: Identity = field(default_factory=Identity)
    better: int = 0
    """Answers that got more reward in the adaptive mode than in the plain one."""
    worse: int = 0
    rest_s: float = 0.0
    """The parts of a step that are done once: rewards, update, drafter."""
    rest_joules: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def ratio(self, mode: str, to: str) -> float:
        """Rollout seconds of `to` over those of `mode`."""
        return self.modes[to].rollout_s / self.modes[mode].rollout_s

    @property
    def speedup(self) -> float:
        """Of the rollout: plain seconds / adaptive seconds."""
        return self.ratio(ADAPTIVE_MODE, PLAIN_MODE)

    @property
    def step_speedup(self) -> float:
        """Of the whole step."""
        plain = self.modes[PLAIN_MODE].rollout_s + self.rest_s
        return plain / (self.modes[ADAPTIVE_MODE].rollout_s + self.rest_s)


@dataclass
class AdaptiveTotals:
    """What the adaptive engines of all steps and workers did."""

    stats: EngineStats = field(default_factory=EngineStats)
    explored_s: float = 0.0
    """Decoding seconds in strategies that were not the best known."""
    tuned_s: float = 0.0
    """Decoding seconds in which the tuner chose the strategy."""


def better_and_worse(plain: list[Group], other: list[Group]) -> tuple[int, int]:
    """How many answers got more reward in the other mode, and how many less."""
    gaps = [h.rewards[i] - reward for g, h in zip(plain, other, strict=True) for i, reward in g.rewards.items()]
    return sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)


def summarize(steps: list[ComparedStep], adaptive: AdaptiveTotals) -> dict[str, Any]:
    modes = list(steps[0].modes)
    seconds = {mode: [s.modes[mode].rollout_s for s in steps] for mode in modes}
    speedups = sorted(s.speedup for s in steps)
    explained = [d for s in steps for d in s.identity.differences]
    tokens = sum(s.identity.tokens for s in steps)
    responses = sum(s.identity.responses for s in steps)
    result = {
        "rollout_speedup": round(median(speedups), 3),
        "rollout_speedup_range": [round(speedups[0], 3), round(speedups[-1], 3)],
        "rollout_speedup_total": round(sum(seconds[PLAIN_MODE]) / sum(seconds[ADAPTIVE_MODE]), 3),
        "step_speedup": round(median(s.step_speedup for s in steps), 3),
        "steps": len(steps),
        "tokens": tokens,
        "responses": responses,
        "identical": responses - sum(s.identity.different for s in steps),
        "near_ties": sum(d.near_tie for d in explained),
        "differences": [vars(d) for d in explained],
        "accept_length": round(adaptive.stats.accept_length, 3),
        "plain_tok_s": round(tokens / sum(seconds[PLAIN_MODE]), 1),
        "adaptive_tok_s": round(tokens / sum(seconds[ADAPTIVE_MODE]), 1),
        "rollout_s": {mode: round(median(some), 3) for mode, some in seconds.items()},
        "rest_s": round(median(s.rest_s for s in steps), 3),
        "reward": {mode: round(fmean(s.modes[mode].mean_reward for s in steps), 4) for mode in modes},
        "joules": joules_per_step(steps, modes),
        "rounds": dict(sorted(adaptive.stats.rounds.items(), key=lambda kv: -kv[1])),
        "explored": round(adaptive.explored_s / max(adaptive.tuned_s, 1e-9), 4),
    }
    if NO_TRAINING_MODE in modes:
        result["with_idle_training"] = _training_ratio(steps)
    return result


def _training_ratio(steps: list[ComparedStep]) -> dict[str, Any]:
    """Rollout seconds with training in idle time over those without."""
    ratios = sorted(s.ratio(NO_TRAINING_MODE, ADAPTIVE_MODE) for s in steps)
    trained = sum(s.modes[ADAPTIVE_MODE].rollout_s for s in steps)
    waited = sum(s.modes[NO_TRAINING_MODE].rollout_s for s in steps)
    return {
        "seconds_ratio": round(median(ratios), 3),
        "range": [round(ratios[0], 3), round(ratios[-1], 3)],
        "total": round(trained / waited, 3),
    }


def joules_per_step(steps: list[ComparedStep], modes: list[str]) -> dict[str, float | None]:
    """Of a whole step in each mode, the median; None where the device does not count them."""
    whole = {mode: [spent(-(s.rest_joules or 0.0), s.modes[mode].joules) for s in steps] for mode in modes}
    return {
        mode: None if None in some else round(median(j for j in some if j is not None), 1)
        for mode, some in whole.items()
    }


def result_table(r: dict[str, Any], picture: str) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    low, high = r["rollout_speedup_range"]
    table.add_row("rollout", f"{r['rollout_s']['plain']:.2f} s plain, {r['rollout_s']['adaptive']:.2f} s adaptive")
    table.add_row(
        "", f"{r['rollout_speedup']:.2f} times faster (median of {r['steps']} steps, {low:.2f} to {high:.2f})"
    )
    if "with_idle_training" in r:
        training = r["with_idle_training"]
        low, high = training["range"]
        table.add_row(
            "idle training", f"{training['seconds_ratio']:.3f} times the seconds without it ({low:.2f} to {high:.2f})"
        )
    table.add_row("whole step", f"{r['step_speedup']:.2f} times faster")
    table.add_row("tokens/s", f"{r['plain_tok_s']:,.0f} plain, {r['adaptive_tok_s']:,.0f} adaptive")
    same = f"{r['identical']} of {r['responses']} responses identical ({r['tokens']:,} tokens)"
    if r["identical"] < r["responses"]:
        same += f"; {r['near_ties']} differ by a near-tie, {r['responses'] - r['identical'] - r['near_ties']} do not"
    table.add_row("answers", same)
    table.add_row("accept length", f"{r['accept_length']:.2f} (while speculating)")
    table.add_row("rounds", ", ".join(f"{name} {count}" for name, count in r["rounds"].items()))
    table.add_row("picture", picture)
    return table
