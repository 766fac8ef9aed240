"""What each part of the tuner buys: play_tuner.py's cases with one part left out or one number changed.

    python benchmarks/ablate_tuner.py --costs benchmarks/results/roofline-7b-wide-h200.txt

Prints the share of the best in hindsight by case and its mean, in percent, and the lowest median step of the flat cases
over plain decoding; the last line is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from typing import Any

import paceline.draft.acceptance as acceptance
import paceline.draft.costs as costs
import paceline.draft.stragglers as stragglers
import paceline.draft.tuner as tuner
import play_tuner
from paceline.draft.decision import BatchContext, Choice, RoundOutcome
from paceline.draft.strategy import PLAIN, Strategy
from paceline.draft.tuner import Tuner
from play_tuner import arguments, play_all, seeds_of


class NoFreshStart(Tuner):
    def choose(self, context: BatchContext) -> Choice:
        self._batch = context.batch
        return super().choose(context)


class NoCatchUpPrice(Tuner):
    def choose(self, context: BatchContext) -> Choice:
        return super().choose(replace(context, catch_up_rows={}))


class NoCostGuess(Tuner):
    """What was not measured takes as long as plain decoding."""

    def __init__(self, strategies: list[Strategy], max_batch: int, explore: float = 0.02):
        super().__init__(strategies, max_batch, explore)
        table = self._costs
        table._guess = lambda size, strategy: table.plain[size].median  # type: ignore[method-assign]


class NoTrials(Tuner):
    def _trial(self, size: int, others: list[Strategy]) -> Strategy | None:
        return None


class NoStragglers(Tuner):
    """Nobody is waited for."""

    def choose(self, context: BatchContext) -> Choice:
        return super().choose(replace(context, slowest=None))


class AlwaysTogether(Tuner):
    """Stragglers count in a long tail as where all end together."""

    def observe(self, outcome: RoundOutcome) -> None:
        super().observe(replace(outcome, ended=()))


class RisingRates(Tuner):
    """Rates that rise with depth count, however many sequences run."""

    def __init__(self, strategies: list[Strategy], max_batch: int, explore: float = 0.02):
        super().__init__(strategies, max_batch, explore)
        self._acceptance = {s.family: _AllLone() for s in self.strategies}


class _AllLone(acceptance.Acceptance):
    def accept_length(self, depth: int, lone: bool = False) -> float:
        return super().accept_length(depth, lone=True)


class Keep(Tuner):
    """A decision stands for three rounds more."""

    _kept: tuple[int, Choice, int] = (0, Choice(PLAIN), 0)

    def choose(self, context: BatchContext) -> Choice:
        batch, choice, rounds = self._kept
        if batch == context.batch and rounds:
            self._kept = (batch, choice, rounds - 1)
            self.round += 1
            return choice
        choice = super().choose(context)
        self._kept = (context.batch, choice, 0 if choice.trial else 3)
        return choice


MODULES = (acceptance, costs, stragglers, tuner, play_tuner)
VARIANTS: dict[str, tuple[type[Tuner], dict[str, float]]] = {
    "as it is": (Tuner, {}),
    "no margin": (Tuner, {"MARGIN": 1.0}),
    "MARGIN 0.9": (Tuner, {"MARGIN": 0.9}),
    "MARGIN 0.8": (Tuner, {"MARGIN": 0.8}),
    "rising rates": (RisingRates, {}),
    "no fresh start": (NoFreshStart, {}),
    "no catch-up price": (NoCatchUpPrice, {}),
    "no cost guesses": (NoCostGuess, {}),
    "no trials": (NoTrials, {}),
    "no stragglers": (NoStragglers, {}),
    "always together": (AlwaysTogether, {}),
    "TRIAL_LOSS 1/4": (Tuner, {"TRIAL_LOSS": 1 / 4}),
    "TRIAL_LOSS 1/16": (Tuner, {"TRIAL_LOSS": 1 / 16}),
    "HORIZON 8": (Tuner, {"HORIZON": 8, "FADE": 1 - 1 / 8}),
    "HORIZON 128": (Tuner, {"HORIZON": 128, "FADE": 1 - 1 / 128}),
    "ENOUGH 2": (Tuner, {"ENOUGH": 2}),
    "ENOUGH 32": (Tuner, {"ENOUGH": 32}),
    "PRIOR 0.3": (Tuner, {"PRIOR": 0.3}),
    "PRIOR 0.7": (Tuner, {"PRIOR": 0.7}),
    "kept decisions": (Keep, {}),
}


@contextmanager
def numbers(changed: Mapping[str, float]) -> Any:
    """Numbers are imported by name, so each module has its own."""
    before = [(module, name) for name in changed for module in MODULES if hasattr(module, name)]
    old = [getattr(module, name) for module, name in before]
    for module, name in before:
        setattr(module, name, changed[name])
    yield
    for (module, name), value in zip(before, old, strict=True):
        setattr(module, name, value)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = arguments(__doc__)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="some of: " + ", ".join(VARIANTS))
    args = parser.parse_args(argv)
    names = args.cases.split(",")
    print(f"{'':<18} {' '.join(f'{name:>11}' for name in names)}    mean  flat step")
    found = []
    for variant in args.variants.split(","):
        make, changed = VARIANTS[variant]
        with numbers(changed):
            rows = list(play_all(args.costs, names, seeds_of(args), args.steps, args.explore, make))
        shares = [row["of_best"] for row in rows]
        flat = min((row["median"] for row in rows if row["case"].startswith("flat")), default=0.0)
        columns = " ".join(f"{100 * share:>11.1f}" for share in shares)
        print(f"{variant:<18} {columns} {100 * fmean(shares):>7.1f} {flat:>10.3f}", flush=True)
        found.append({"variant": variant, "rows": rows})
    result = {"steps": args.steps, "explore": args.explore, "seeds": list(seeds_of(args)), "variants": found}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
