"""`paceline compare`: every step of a recipe is rolled out several times from the same weights, plainly and adaptively,
timed, checked for identity, and learned from once. Because samples are the same, the ways differ in nothing but speed.
Where idle workers train the drafter, a third way has them do nothing instead, to see whether training costs anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.cluster.devices import choose_workers
from paceline.cluster.messages import RolloutMode
from paceline.config import Config
from paceline.core import Completion, Group, Request
from paceline.errors import UserError
from paceline.files.writing import write_aside
from paceline.loop import TrainLoop
from paceline.observe.clock import Clock
from paceline.observe.energy import EnergyMeter, spent
from paceline.observe.live import LiveView
from paceline.process.stopping import Stopping
from paceline.report.picture import draw_rollouts
from paceline.rollout.differences import Difference
from paceline.rollout.stats import EngineStats, RoundRecord
from paceline.run import Run
from paceline.setup.build import choose_device
from paceline.setup.memory import engines_to_compare

ADAPTIVE, PLAIN, IDLE = "adaptive", "plain", "adaptive, idle workers wait"
MODES = {ADAPTIVE: RolloutMode("adaptive"), PLAIN: RolloutMode("plain"), IDLE: RolloutMode("adaptive_control")}


@dataclass
class ComparedStep:
    seconds: dict[str, float]
    """Of each way, from the first prompt to the last answer."""
    rest_s: float = 0.0
    """Of everything else that a step is made of, which is done once: rewards, update, drafter."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Of each way, the mean."""
    better: int = 0
    """Answers that the adaptive way got more reward for than the plain one."""
    worse: int = 0
    reward_s: dict[str, float] = field(default_factory=dict)
    """Of each way, from the last answer to its reward."""
    lengths: dict[str, list[int]] = field(default_factory=dict)
    """Of each way's answers; rounding can make them differ."""
    joules: dict[str, float | None] = field(default_factory=dict)
    """Of each way's rollout, where the device counts them."""
    rest_joules: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    responses: int = 0
    different: int = 0
    """Responses that are not the same in all ways."""
    differences: list[Difference] = field(default_factory=list)
    """Those of them that were looked into."""

    def ratio(self, way: str, to: str) -> float:
        return self.seconds[to] / self.seconds[way]

    @property
    def speedup(self) -> float:
        return self.ratio(ADAPTIVE, PLAIN)


def better_and_worse(plain: list[Group], other: list[Group]) -> tuple[int, int]:
    """How many answers got more reward the other way, and how many less."""
    gaps = [h.rewards[i] - reward for g, h in zip(plain, other, strict=True) for i, reward in g.rewards.items()]
    return sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)


class Comparison(TrainLoop):
    look_into: int | None = None
    """Most differences of a step that are explained; all, if None. Each takes a pass in a wider precision."""

    def __init__(self, config: Config, run: Run, view: LiveView | None = None, stopping: Stopping | None = None):
        self.engines = engines_to_compare(choose_workers(config))
        super().__init__(config, run, view, stopping=stopping)
        self.ways = [PLAIN, ADAPTIVE, *([IDLE] if self.spot in ("tail", "both") else [])]
        self.way = ADAPTIVE
        self.steps: list[ComparedStep] = []
        self.stats = EngineStats()
        self.explored, self.tuned = 0.0, 0.0
        self.rounds: dict[str, list[RoundRecord]] = {}
        self.meter = EnergyMeter(choose_device(self.config.model.device))

    def step(self) -> dict[str, float]:
        begun = self.meter.joules()
        metrics = super().step()
        last = self.steps[-1]
        rest = spent(begun, self.meter.joules())
        rolled = [j for j in last.joules.values() if j is not None]
        last.rest_joules = None if rest is None else rest - sum(rolled)
        # A step of one way: the comparison itself, and checkpoints, are no part of it.
        parts = ("update_actor", "train_drafter", "merge_drafter")
        last.rest_s = last.reward_s[ADAPTIVE] + sum(metrics.get(f"timing_s/{part}", 0.0) for part in parts)
        last.metrics = metrics
        ratio = {"compare/rollout_speedup": last.speedup, "compare/identical": float(not last.different)}
        if IDLE in last.seconds:
            ratio["compare/with_training"] = last.ratio(IDLE, ADAPTIVE)
        return metrics | ratio

    def _rollout(self, indices: range, clock: Clock) -> list[Group]:
        """All ways, in turns first, so that none always finds the caches warm."""
        groups: dict[str, list[Group]] = {}
        seconds: dict[str, float] = {}
        reward_s: dict[str, float] = {}
        joules: dict[str, float | None] = {}
        turn = len(self.steps) % len(self.ways)
        for way in self.ways[turn:] + self.ways[:turn]:
            self.way, own, before = way, Clock(), self.meter.joules()
            groups[way] = super()._rollout(indices, own)
            seconds[way], reward_s[way] = own.parts["gen"], own.parts["reward"]
            joules[way] = spent(before, self.meter.joules())
        self.way = ADAPTIVE
        clock.parts["gen"] = clock.parts.get("gen", 0.0) + seconds[ADAPTIVE]
        clock.parts.setdefault("reward", 0.0)
        rewards = {way: fmean(r for g in groups[way] for r in g.rewards.values()) for way in self.ways}
        lengths = {way: [len(c.tokens) for g in groups[way] for c in g.completions.values()] for way in self.ways}
        step = ComparedStep(seconds, rewards=rewards, reward_s=reward_s, lengths=lengths, joules=joules)
        different: list[tuple[Completion, Completion]] = []
        for way in self.ways[1:]:
            pairs = zip(groups[PLAIN], groups[way], strict=True)
            for a, b in ((g.completions[i], h.completions[i]) for g, h in pairs for i in g.completions):
                step.responses += 1
                step.tokens += len(a.tokens) if way == ADAPTIVE else 0
                if a.tokens != b.tokens:
                    different.append((a, b))
        step.better, step.worse = better_and_worse(groups[PLAIN], groups[ADAPTIVE])
        step.different = len(different)
        step.differences = self.cluster.explain(different[: self.look_into])
        self.steps.append(step)
        return groups[ADAPTIVE]

    def _answers(self, requests: list[Request], expected: dict[int, float]) -> Iterator[list[Completion]]:
        train = self.way == ADAPTIVE and self.spot in ("tail", "both")  # always, to see what it costs
        return self.cluster.rollout(self.progress.step + 1, requests, expected, MODES[self.way], train)

    def _end_rollout(self) -> None:
        """The timeline shows the way that would have run without a comparison."""
        if self.way == ADAPTIVE:
            super()._end_rollout()
            outcomes = self.outcomes[-len(self.cluster.members) :]
            self.stats = sum((o.stats for o in outcomes), self.stats)
            self.explored += sum(o.explored_s for o in outcomes)
            self.tuned += sum(o.tuned_s for o in outcomes)
        else:
            outcomes = list(self.cluster.end().values())
        for worker, outcome in zip(self.cluster.members, outcomes, strict=True):
            self.rounds[f"{self.way}, worker {worker}" if len(outcomes) > 1 else self.way] = outcome.rounds


def run_comparison(config: Config, console: Console) -> None:
    if config.speculation.mode == "plain":
        raise UserError("speculation.mode=plain leaves nothing to compare; drop that setting")
    stopping = Stopping()
    with stopping.listening():
        run = Run.create(config)
        try:
            trainer = Comparison(run.config, run, LiveView(config, console), stopping)
        except UserError:
            run.discard()
            raise
        trainer.train()
    picture = run.folder / "compare.svg"
    write_aside(picture, draw_rollouts(trainer.rounds))
    result = summarize(trainer, str(run.folder))
    write_aside(run.folder / "compare.json", json.dumps(result, indent=2) + "\n")
    console.print(_table(result, str(picture)))
    print(json.dumps(result))


def summarize(trainer: Comparison, folder: str) -> dict[str, Any]:
    steps = trainer.steps
    speedups = sorted(s.speedup for s in steps)
    taken = {way: [s.seconds[way] for s in steps] for way in trainer.ways}
    whole = [(s.seconds[PLAIN] + s.rest_s) / (s.seconds[ADAPTIVE] + s.rest_s) for s in steps]
    different = [d for s in steps for d in s.differences]
    tokens = sum(s.tokens for s in steps)
    responses = sum(s.responses for s in steps)
    stats = trainer.stats
    result = {
        "rollout_speedup": round(median(speedups), 3),
        "rollout_speedup_range": [round(speedups[0], 3), round(speedups[-1], 3)],
        "rollout_speedup_total": round(sum(taken[PLAIN]) / sum(taken[ADAPTIVE]), 3),
        "step_speedup": round(median(whole), 3),
        "steps": len(steps),
        "tokens": tokens,
        "responses": responses,
        "identical": responses - sum(s.different for s in steps),
        "near_ties": sum(d.near_tie for d in different),
        "differences": [vars(d) for d in different],
        "accept_length": round(stats.accept_length, 3),
        "plain_tok_s": round(tokens / sum(taken[PLAIN]), 1),
        "adaptive_tok_s": round(tokens / sum(taken[ADAPTIVE]), 1),
        "rollout_s": {way: round(median(seconds), 3) for way, seconds in taken.items()},
        "rest_s": round(median(s.rest_s for s in steps), 3),
        "reward": {way: round(fmean(s.rewards[way] for s in steps), 4) for way in trainer.ways},
        "joules": joules_of(steps, trainer.ways),
        "rounds": dict(sorted(stats.rounds.items(), key=lambda kv: -kv[1])),
        "explored": round(trainer.explored / max(trainer.tuned, 1e-9), 4),
        "workers": trainer.config.cluster.workers,
        "run": folder,
    }
    if IDLE in taken:
        costs = sorted(s.ratio(IDLE, ADAPTIVE) for s in steps)
        result["with_idle_training"] = {
            "seconds_ratio": round(median(costs), 3),
            "range": [round(costs[0], 3), round(costs[-1], 3)],
            "total": round(sum(taken[ADAPTIVE]) / sum(taken[IDLE]), 3),
        }
    return result


def joules_of(steps: list[ComparedStep], ways: list[str]) -> dict[str, float | None]:
    """Of a whole step of each way, the median; None where the device does not count them."""
    whole = {way: [spent(-(s.rest_joules or 0.0), s.joules[way]) for s in steps] for way in ways}
    return {way: None if None in js else round(median(j for j in js if j is not None), 1) for way, js in whole.items()}


def _table(r: dict[str, Any], picture: str) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    low, high = r["rollout_speedup_range"]
    table.add_row("rollout", f"{r['rollout_s']['plain']:.2f} s plain, {r['rollout_s']['adaptive']:.2f} s adaptive")
    table.add_row(
        "", f"{r['rollout_speedup']:.2f} times faster (median of {r['steps']} steps, {low:.2f} to {high:.2f})"
    )
    if "with_idle_training" in r:
        cost = r["with_idle_training"]
        low, high = cost["range"]
        table.add_row(
            "idle training", f"{cost['seconds_ratio']:.3f} times the seconds without it ({low:.2f} to {high:.2f})"
        )
    table.add_row("whole step", f"{r['step_speedup']:.2f} times faster")
    table.add_row("tokens/s", f"{r['plain_tok_s']:,.0f} plain, {r['adaptive_tok_s']:,.0f} adaptive")
    same = f"{r['identical']} of {r['responses']} responses identical ({r['tokens']:,} tokens)"
    if r["identical"] < r["responses"]:
        same += f"; {r['near_ties']} differ by a near-tie, {r['responses'] - r['identical'] - r['near_ties']} do not"
    table.add_row("answers", same)
    table.add_row("accept length", f"{r['accept_length']:.2f} tokens per check")
    table.add_row("strategies", ", ".join(f"{name} {count}" for name, count in r["rounds"].items()))
    table.add_row("picture", picture)
    return table
