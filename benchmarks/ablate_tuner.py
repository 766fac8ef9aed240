"""What each part of the tuner buys: play_tuner.py's cases with one part left out or one number changed.

    python benchmarks/ablate_tuner.py --costs benchmarks/results/roofline-7b-wide-h200.txt

Prints the share of the best in hindsight by case and its mean, in percent, and the lowest median step of the flat cases
over plain decoding; the last line is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import paceline.draft.acceptance as acceptance
import paceline.draft.tuner as tuner
from paceline.draft.strategy import PLAIN, Strategy
from paceline.draft.tuner import BatchContext, Choice, Tuner
from play_tuner import arguments, play_all


class NoFreshStart(Tuner):
    def choose(self, context: BatchContext) -> Choice:
        self._batch = context.batch
        return super().choose(context)


class NoCatchUpPrice(Tuner):
    def choose(self, context: BatchContext) -> Choice:
        return super().choose(BatchContext(context.batch, context.tokens_left))


class NoCostGuess(Tuner):
    """What was not measured takes as long as plain decoding."""

    def _guess(self, size: int, strategy: Strategy) -> float:
        return self._costs[PLAIN][size].median


class NoTrials(Tuner):
    def _due(self, speeds: Mapping[Strategy, float], best: Strategy) -> Strategy | None:
        return None


class RisingRates(Tuner):
    """Rates that rise with depth count, however many sequences run."""

    def __init__(self, strategies: list[Strategy], max_batch: int, explore: float = 0.02):
        super().__init__(strategies, max_batch, explore)
        self._acceptance = {s.family: _AllLone() for s in self.strategies}


class _AllLone(acceptance.Acceptance):
    def accept_length(self, depth: int, lone: bool = False) -> float:
        return super().accept_length(depth, lone=True)


class Hold(Tuner):
    """A decision stands for three rounds more."""

    _held: tuple[int, Choice, int] = (0, Choice(PLAIN), 0)

    def choose(self, context: BatchContext) -> Choice:
        batch, choice, rounds = self._held
        if batch == context.batch and rounds:
            self._held = (batch, choice, rounds - 1)
            self.round += 1
            return choice
        choice = super().choose(context)
        self._held = (context.batch, choice, 0 if choice.trial else 3)
        return choice


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
    "BACKOFF 1": (Tuner, {"BACKOFF": 1}),
    "BACKOFF 2": (Tuner, {"BACKOFF": 2}),
    "HORIZON 128": (Tuner, {"HORIZON": 128}),
    "KEPT 1": (Tuner, {"KEPT": 1}),
    "FADE 0.8": (Tuner, {"FADE": 0.8}),
    "FADE 0.99": (Tuner, {"FADE": 0.99}),
    "held decisions": (Hold, {}),
}


@contextmanager
def numbers(changed: Mapping[str, float]) -> Any:
    before = {}
    for name, value in changed.items():
        module = tuner if hasattr(tuner, name) else acceptance
        before[name] = (module, getattr(module, name))
        setattr(module, name, value)
    yield
    for name, (module, value) in before.items():
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
            rows = list(play_all(args.costs, names, args.seeds, args.steps, args.explore, make))
        shares = [row["of_best"] for row in rows]
        flat = min((row["median"] for row in rows if row["case"].startswith("flat")), default=0.0)
        columns = " ".join(f"{100 * share:>11.1f}" for share in shares)
        print(f"{variant:<18} {columns} {100 * fmean(shares):>7.1f} {flat:>10.3f}", flush=True)
        found.append({"variant": variant, "rows": rows})
    result = {"steps": args.steps, "explore": args.explore, "seeds": args.seeds, "variants": found}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
