"""A drafter that goes bad in mid-run costs little and not for long; one that comes back is found again.

The engine, the tuner and the weights are real. Time is not: a round takes what a table says, so that the outcome does
not depend on the machine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from paceline.draft.decision import RoundOutcome
from paceline.draft.strategy import Strategy
from paceline.draft.suffix.drafter import SuffixDrafter
from paceline.rollout import EngineSettings, RolloutEngine
from paceline.rollout.stats import RoundRecord

from .reasoner import own_drafter, problems, reasoner

BATCH, LONGEST = 8, 300


@dataclass(frozen=True)
class Costs:
    """Virtual seconds of a round, where a plain one takes 1."""

    neural: float  # to draft at all
    level: float  # for each draft token behind the other
    node: float  # for each draft token that is verified

    def of(self, strategy: Strategy) -> float:
        if strategy.plain:
            return 1.0
        draft = self.neural + self.level * strategy.depth if strategy.drafter == "neural" else 0.0
        return 1.05 + draft + self.node * strategy.nodes + (0.0 if strategy.chain else 0.1)


DEAR = Costs(neural=0.1, level=0.05, node=0.02)  # a drafter of a tenth of the policy's size
CHEAP = Costs(neural=0.05, level=0.03, node=0.01)  # a thirtieth


class Machine:
    """An engine with a full batch, in virtual time."""

    def __init__(self, costs: Costs, suffix: bool):
        model = reasoner()
        self.costs = costs
        self.drafter = own_drafter(model)
        self.good = copy.deepcopy(self.drafter.model.state_dict())
        drafters = [SuffixDrafter(BATCH, 512), self.drafter] if suffix else [self.drafter]
        self.engine = RolloutEngine(model, EngineSettings(max_batch=BATCH, max_length=512), None, drafters)
        self.engine.tuner.observe = self._in_virtual_time(self.engine.tuner.observe)
        self.rounds: list[RoundRecord] = []
        self.engine.record = self.rounds.append
        self.engine.submit(problems(600, LONGEST, answers=2))

    def _in_virtual_time(self, observe: Callable[..., None]) -> Callable[..., None]:
        def told(outcome: RoundOutcome) -> None:
            observe(replace(outcome, seconds=self.costs.of(outcome.choice.strategy)))

        return told

    @property
    def explored(self) -> float:
        return self.engine.tuner.explored_s / self.engine.tuner.total_s

    def go_bad(self) -> None:
        """Overwrite the drafter's weights where they are, as training does."""
        self.drafter.model.init_weights(seed=3)

    def come_back(self) -> None:
        self.drafter.model.load_state_dict(self.good)

    def speed(self, rounds: int) -> float:
        """Run so many rounds of decoding -> tokens per virtual second, where plain decoding of the batch is 1."""
        start = len(self.rounds)
        played: list[RoundRecord] = []
        while len(played) < rounds:
            self.engine.step()
            played = [r for r in self.rounds[start:] if r.strategy != "prefill"]
        assert {r.batch for r in played} == {BATCH}, "the batch stays full"
        seconds = sum(self.costs.of(Strategy.parse(r.strategy)) for r in played)
        return sum(r.tokens for r in played) / BATCH / seconds


@pytest.mark.parametrize(
    ("costs", "suffix"),
    [(DEAR, False), (DEAR, True), (CHEAP, False)],
    ids=["dear drafts", "dear drafts and suffixes", "cheap drafts"],
)
def test_a_drafter_goes_bad_and_comes_back(costs, suffix):
    machine = Machine(costs, suffix)
    machine.speed(150)
    good = machine.speed(200)
    machine.go_bad()
    falling, bad = machine.speed(100), machine.speed(100)
    machine.come_back()
    rising, again = machine.speed(200), machine.speed(200)
    print(
        f"good {good:.3f}; random {falling:.3f} for 100 rounds, then {bad:.3f}; "
        f"good again {rising:.3f} for 200 rounds, then {again:.3f}; explored {machine.explored:.2%}"
    )
    assert good >= 1.3
    assert bad >= 0.97, "back at the speed of plain decoding within 100 rounds"
    assert again >= 0.95 * good, "back at its own speed within 200"
    assert machine.explored <= 0.025
