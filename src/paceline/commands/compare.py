"""`paceline compare`: every step of a recipe is rolled out several times from the same weights, plain and adaptive,
timed, compared token by token, and learned from once. The tokens are the same, so the modes differ only in speed. Where
idle workers train the drafter, a third mode leaves them idle, to measure what training costs the rollout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import fmean

from rich.console import Console

from paceline.cluster.devices import choose_workers
from paceline.cluster.messages import RolloutMode
from paceline.commands.compared import (
    ADAPTIVE_MODE,
    NO_TRAINING_MODE,
    PLAIN_MODE,
    AdaptiveTotals,
    ComparedStep,
    Identity,
    ModeRollout,
    better_and_worse,
    result_table,
    summarize,
)
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
from paceline.rollout.stats import RoundRecord
from paceline.run import Run
from paceline.run.saver import starting
from paceline.setup.device import choose_device
from paceline.setup.engines import refuse_other_engines
from paceline.setup.memory import engines_to_compare

ROLLOUT_MODES = {
    ADAPTIVE_MODE: RolloutMode("adaptive"),
    PLAIN_MODE: RolloutMode("plain"),
    NO_TRAINING_MODE: RolloutMode("adaptive_control"),
}
SHARED_PARTS = ("update_actor", "train_drafter", "merge_drafter")  # of a step, done once for all modes


class Comparison(TrainLoop):
    max_explained: int | None = None
    """Differences per step that are explained; all, if None. Each takes a pass in a wider precision."""

    def __init__(self, config: Config, run: Run, view: LiveView | None = None, stopping: Stopping | None = None):
        self.engines = engines_to_compare(choose_workers(config))
        super().__init__(config, run, view, stopping=stopping)
        self.modes = [
            PLAIN_MODE,
            ADAPTIVE_MODE,
            *([NO_TRAINING_MODE] if self.drafting.when in ("tail", "both") else []),
        ]
        self.mode = ADAPTIVE_MODE
        """Of the rollout that is running."""
        self.steps: list[ComparedStep] = []
        self.adaptive = AdaptiveTotals()
        self.rounds: dict[str, list[RoundRecord]] = {}
        """Of the last step, by mode, and by worker where there are several."""
        self.meter = EnergyMeter(choose_device(self.config.model.device))

    def step(self) -> dict[str, float]:
        before = self.meter.joules()
        metrics = super().step()
        last = self.steps[-1]
        used = spent(before, self.meter.joules())
        rolled = sum(m.joules for m in last.modes.values() if m.joules is not None)
        last.rest_joules = None if used is None else used - rolled
        # Without the other modes' rollouts and without checkpoints: a step as it would be in one mode.
        shared = sum(metrics.get(f"timing_s/{part}", 0.0) for part in SHARED_PARTS)
        last.rest_s = last.modes[ADAPTIVE_MODE].reward_s + shared
        last.metrics = metrics
        ratios = {"compare/rollout_speedup": last.speedup, "compare/identical": float(not last.identity.different)}
        if NO_TRAINING_MODE in last.modes:
            ratios["compare/with_training"] = last.ratio(NO_TRAINING_MODE, ADAPTIVE_MODE)
        return metrics | ratios

    def _rollout(self, indices: range, clock: Clock) -> list[Group]:
        """In all modes; each is the first one in turn, so that none always finds the caches warm."""
        groups: dict[str, list[Group]] = {}
        modes: dict[str, ModeRollout] = {}
        first = len(self.steps) % len(self.modes)
        for mode in self.modes[first:] + self.modes[:first]:
            groups[mode], modes[mode] = self._rollout_in(mode, indices)
        self.mode = ADAPTIVE_MODE
        clock.parts["gen"] = clock.parts.get("gen", 0.0) + modes[ADAPTIVE_MODE].rollout_s
        clock.parts.setdefault("reward", 0.0)
        better, worse = better_and_worse(groups[PLAIN_MODE], groups[ADAPTIVE_MODE])
        ordered = {mode: modes[mode] for mode in self.modes}
        self.steps.append(ComparedStep(ordered, self._compare_tokens(groups), better, worse))
        return groups[ADAPTIVE_MODE]

    def _rollout_in(self, mode: str, indices: range) -> tuple[list[Group], ModeRollout]:
        self.mode = mode
        clock = Clock(on_begin=self.view.part)
        before = self.meter.joules()
        groups = super()._rollout(indices, clock)
        return groups, ModeRollout(
            rollout_s=clock.parts["gen"],
            reward_s=clock.parts["reward"],
            mean_reward=fmean(r for g in groups for r in g.rewards.values()),
            lengths=[len(c.tokens) for g in groups for c in g.completions.values()],
            joules=spent(before, self.meter.joules()),
        )

    def _compare_tokens(self, groups: dict[str, list[Group]]) -> Identity:
        """Every other mode with the plain one."""
        plain = groups[PLAIN_MODE]
        found = Identity(tokens=sum(len(c.tokens) for g in plain for c in g.completions.values()))
        different: list[tuple[Completion, Completion]] = []
        for mode in self.modes[1:]:
            for g, h in zip(plain, groups[mode], strict=True):
                found.responses += len(g.completions)
                pairs = ((a, h.completions[i]) for i, a in g.completions.items())
                different += [(a, b) for a, b in pairs if a.tokens != b.tokens]
        found.different = len(different)
        found.differences = self.cluster.explain(different[: self.max_explained])
        return found

    def _answers(self, requests: list[Request], expected: dict[int, float]) -> Iterator[list[Completion]]:
        in_tail = self.drafting.when in ("tail", "both")
        train = self.mode == ADAPTIVE_MODE and in_tail  # in every step, to see what it costs
        turns = self.finished.conversations
        mode = ROLLOUT_MODES[self.mode]
        return self.cluster.rollout(self.progress.step + 1, requests, expected, mode, train, answers=turns)

    def _end_rollout(self) -> None:
        """The timeline shows the adaptive mode: the one that would have run without a comparison."""
        if self.mode == ADAPTIVE_MODE:
            super()._end_rollout()
            outcomes = self.recorder.outcomes[-len(self.cluster.workers) :]
            self.adaptive.stats = sum((o.stats for o in outcomes), self.adaptive.stats)
            self.adaptive.explored_s += sum(o.explored_s for o in outcomes)
            self.adaptive.tuned_s += sum(o.tuned_s for o in outcomes)
        else:
            outcomes = list(self.cluster.end().values())
        for worker, outcome in zip(self.cluster.workers, outcomes, strict=True):
            self.rounds[f"{self.mode}, worker {worker}" if len(outcomes) > 1 else self.mode] = outcome.rounds


def run_comparison(config: Config, console: Console, as_json: bool = False) -> None:
    if config.speculation.mode == "plain":
        raise UserError("speculation.mode=plain leaves nothing to compare; drop that setting")
    refuse_other_engines(config, "paceline compare")
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"task": None})})  # it compares speed
    stopping = Stopping()
    with stopping.listening(), LiveView(config, console) as view:
        run = Run.create(config)
        with starting(run, is_new=True):
            comparison = Comparison(run.config, run, view, stopping)
        comparison.train()
    picture = run.folder / "compare.svg"
    write_aside(picture, draw_rollouts(comparison.rounds))
    result = summarize(comparison.steps, comparison.adaptive)
    result |= {"workers": comparison.config.cluster.workers, "run": str(run.folder)}
    write_aside(run.folder / "compare.json", json.dumps(result, indent=2) + "\n")
    console.print(result_table(result, str(picture)))
    if as_json:
        print(json.dumps(result))
