"""Which answers go to which worker, whatever is lost and in whatever order things are heard of."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.coordinator import Done, Joined, Load, Lost, RolloutState, decide
from paceline.cluster.messages import RolloutProgress
from paceline.cluster.turns import OpenTurns
from paceline.core import Observation, Turn

TURNS = 3


class Answers:
    """Late, in any order; what was answered once is answered the same again."""

    def __init__(self, dice: random.Random):
        self.dice = dice
        self.known: dict[tuple[int, int], Observation] = {}
        self.asked: list[tuple[int, int]] = []
        self.ready: list[Observation] = []

    def take(self, turn: Turn) -> None:
        key = turn.request_id, turn.number
        if key in self.known:
            self.ready.append(self.known[key])
        elif key not in self.asked:
            self.asked.append(key)

    def answers(self) -> list[Observation]:
        while self.asked and self.dice.random() < 0.5:
            request, turn = self.asked.pop(self.dice.randrange(len(self.asked)))
            self.known[request, turn] = Observation(request, turn, [turn], turn + 1 == TURNS)
            self.ready.append(self.known[request, turn])
        out, self.ready = self.ready, []
        self.dice.shuffle(out)
        return out


class Worker:
    """Writes each request from its first turn on, one turn at a time."""

    def __init__(self) -> None:
        self.at: dict[int, int] = {}
        self.waits: set[int] = set()

    def assign(self, requests) -> None:
        self.at |= dict.fromkeys(requests, 0)

    def observe(self, observation: Observation) -> int | None:
        assert observation.request_id in self.waits and observation.turn == self.at[observation.request_id]
        self.waits.discard(observation.request_id)
        if observation.done:
            del self.at[observation.request_id]
            return observation.request_id
        self.at[observation.request_id] += 1
        return None

    def work(self, dice: random.Random) -> list[Turn]:
        able = [r for r in self.at if r not in self.waits]
        some = dice.sample(able, dice.randint(0, len(able)))
        self.waits |= set(some)
        return [Turn(r, self.at[r], [r], "stop") for r in some]


@given(st.integers(0, 10**9), st.integers(1, 4), st.integers(1, 8), st.integers(0, 4))
@settings(max_examples=200, deadline=None)
def test_every_turn_is_answered_once_to_whoever_waits(seed, workers, requests, losses):
    dice = random.Random(seed)
    answers = Answers(dice)
    turns = OpenTurns(answers)
    state = RolloutState(workers, dict.fromkeys(range(requests), 1.0))
    generation = [1] * workers
    them = [Worker() for _ in range(workers)]
    for w in range(workers):
        state.take(Joined(w, 1))
    for _ in range(5000):
        for order in decide(state, train=False):
            if hasattr(order, "requests"):
                them[order.worker].assign(order.requests)
            state.note(order)
        if state.over:
            break
        w = dice.randrange(workers)
        if losses and dice.random() < 0.1:  # and it comes back at once, with nothing
            losses -= 1
            state.take(Lost(w, generation[w]))
            generation[w] += 1
            them[w] = Worker()
            state.take(Joined(w, generation[w]))
            continue
        for worker, observations in turns.answered(state).items():
            for observation in observations:
                request = them[worker].observe(observation)
                if request is not None:
                    assert state.take(Done(worker, generation[worker], request))
        ended = them[w].work(dice)
        believed = state.take(Load(w, generation[w], 0))
        turns.ended(RolloutProgress(w, generation[w], (), 0, 0, tuple(ended)), believed)
        busy = turns.not_only_waiting(state)
        for i, worker in enumerate(them):
            assert (i in busy) or set(worker.at) <= worker.waits, "whoever can write is expected to say something"
    assert state.over and state.done == set(range(requests))
    assert len(answers.known) == TURNS * requests, "each turn was answered once, and kept"
