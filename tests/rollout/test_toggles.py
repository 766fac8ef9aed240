"""Switching speculation on and off within a rollout is free: nothing is prefilled again, what the drafter missed is
made up in a pass or two of its own, and it drafts as well as one that was never off."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import pytest

from paceline.core import Completion
from paceline.draft.eagle.drafter import CATCH_UP_ROWS
from paceline.draft.strategy import PLAIN, Strategy
from paceline.rollout import EngineSettings, RolloutEngine
from paceline.rollout.stats import RoundRecord

from .reasoner import own_drafter, plainly, problems, reasoner
from .test_exactness import collect

DEEP = Strategy.parse("neural:5")
OFF = (3, 10, 1, 40, 6, 12, 2, 25, 5, 18, 3, 10, 1, 40, 2, 8, 4, 150, 3, 10, 1, 6, 2, 4, 5)
"""Plain rounds before each switch; the longest is more than the drafter looks back on."""
ON = 12  # speculative rounds after it
FIRST_ROUNDS = 10  # of a stretch, whose accept length is compared
BATCH = 3


@dataclass
class Rollout:
    """What happened, counted from outside the engine."""

    done: dict[int, Completion]
    engine: RolloutEngine
    rounds: list[RoundRecord]
    policy_passes: int
    catch_ups: list[int] = field(default_factory=list)  # for every speculative round, passes to make up what was missed
    rows: list[tuple[int, int]] = field(default_factory=list)  # of those passes, as announced and as made


def switching():
    """Stretches of plain decoding and of speculation in turns."""
    plan = (s for off in itertools.cycle(OFF) for s in [PLAIN] * off + [DEEP] * ON)
    return lambda batch: next(plan)


def roll_out(model, requests, choose, batch=BATCH) -> Rollout:
    engine = RolloutEngine(model, EngineSettings(max_batch=batch), None, [own_drafter(model)], [PLAIN, DEEP])
    engine.choose = choose
    out = Rollout({}, engine, [], 0)
    neural = engine.drafters["neural"]
    extend_cache, propose, passes, made = neural.extend_cache, engine.runner.propose, 0, 0

    def counted(count, new, *lookahead):
        nonlocal passes, made
        passes += 1
        made += 0 if lookahead else count * new  # with slots for draft tokens: the last one
        return extend_cache(count, new, *lookahead)

    def proposed(rows, *rest):
        nonlocal made
        announced, made = neural.catch_up_rows(engine.runner.shape(rows.sequences)), 0
        propose(rows, *rest)
        out.rows.append((announced, made))

    def note(round: RoundRecord) -> None:
        nonlocal passes
        out.rounds.append(round)
        if round.strategy == str(DEEP):
            out.catch_ups.append(passes - 1)  # the last one comes with the draft in any case
        passes = 0

    def passed(*_):
        out.policy_passes += 1

    neural.extend_cache, engine.runner.propose, engine.record = counted, proposed, note
    hook = model.register_forward_hook(passed)
    out.done = collect(engine, requests)
    hook.remove()
    return out


def accept_length(rounds: list[RoundRecord]) -> float:
    return sum(r.tokens for r in rounds) / sum(r.batch for r in rounds)


def after_switching_on(rounds: list[RoundRecord]) -> list[list[RoundRecord]]:
    """The speculative stretches of a rollout; prefills in between do not end one."""
    stretches: list[list[RoundRecord]] = []
    off = True
    for round in rounds:
        if round.strategy == "plain":
            off = True
        elif round.strategy == str(DEEP):
            if off:
                stretches.append([])
            off = False
            stretches[-1].append(round)
    return stretches


@pytest.fixture(scope="module")
def model():
    return reasoner("float64")  # where rounding cannot flip a race


@pytest.fixture(scope="module")
def requests():
    return problems(80, longest=400)


@pytest.fixture(scope="module")
def toggled(model, requests) -> Rollout:
    return roll_out(model, requests, switching())


def test_toggling_changes_no_token(model, requests, toggled):
    assert len(after_switching_on(toggled.rounds)) >= 50
    plain = plainly(model, requests, batch=64)
    assert {i: c.tokens for i, c in toggled.done.items()} == {i: c.tokens for i, c in plain.items()}


def test_nothing_is_prefilled_again(requests, toggled):
    stats = toggled.engine.stats
    assert stats.prefill_tokens == sum(len(r.prompt) for r in requests)
    assert stats.paused == 0
    assert toggled.policy_passes == len(toggled.rounds), "one pass of the policy per step, whatever was switched"


def test_what_was_missed_takes_at_most_two_passes_of_the_drafter(toggled):
    first = [stretch[0] for stretch in after_switching_on(toggled.rounds)]
    deep = [r for r in toggled.rounds if r.strategy == str(DEEP)]
    passes = dict(zip(map(id, deep), toggled.catch_ups, strict=True))
    by_switch = [passes[id(r)] for r in first]
    print(f"{len(first)} switches, {sum(by_switch)} passes, at most {max(by_switch)}")
    assert max(OFF) > toggled.engine.drafters["neural"].cache.window, "off for longer than it looks back"
    assert 0 < max(by_switch) <= 2
    assert sum(toggled.catch_ups) == sum(by_switch), "nothing is made up later"


def test_what_it_takes_to_catch_up_is_known_before(toggled):
    assert all(announced == made for announced, made in toggled.rows)
    assert len({made for _, made in toggled.rows}) > 5 and min(toggled.rows) == (0, 0)


def test_passes_for_many_texts_are_no_larger_than_for_some(toggled):
    """A row takes its time, and in a graph its memory."""
    neural = toggled.engine.drafters["neural"]
    for batch in (1, 32, 128, 1024):
        most = neural.entries(batch)
        assert most >= neural.step and (batch * most <= CATCH_UP_ROWS or most == neural.step)
        assert neural.step < neural.reach(batch) <= neural.ring.window


def test_draft_tokens_are_accepted_as_often_right_after_switching_on(model, requests, toggled):
    stretches = after_switching_on(toggled.rounds)
    early = accept_length([r for stretch in stretches for r in stretch[:FIRST_ROUNDS]])
    average = accept_length([r for stretch in stretches for r in stretch])
    always = roll_out(model, requests, lambda batch: DEEP, batch=32)
    never_off = accept_length([r for r in always.rounds if r.strategy == str(DEEP)])
    long_off = [stretch for off, stretch in zip(itertools.cycle(OFF), stretches, strict=False) if off >= 25]
    rested = accept_length([r for stretch in long_off for r in stretch[:FIRST_ROUNDS]])
    print(
        f"accept length {early:.3f} after switching on, {rested:.3f} where it was off for long, "
        f"{average:.3f} on average, {never_off:.3f} if never off"
    )
    assert average > 2
    assert early >= 0.9 * average and rested >= 0.9 * average
    assert early >= 0.9 * never_off and rested >= 0.9 * never_off


def test_what_lies_further_back_than_it_reaches_is_not_looked_at(model, requests):
    longer = [replace(r, sampling=replace(r.sampling, max_tokens=240, min_tokens=240)) for r in requests[:BATCH]]
    off = 150

    def roll_out_spoiled(spoiled: bool) -> list[tuple[str, int]]:
        engine = RolloutEngine(model, EngineSettings(max_batch=BATCH), None, [own_drafter(model)], [PLAIN, DEEP])
        plan, rounds = itertools.chain([PLAIN] * off, itertools.repeat(DEEP)), list[RoundRecord]()
        neural, propose = engine.drafters["neural"], engine.runner.propose

        def spoil_and_propose(*args):
            if spoiled and len(rounds) == 1 + off:  # after the prefill: whatever is there was made before all that
                for kept in (neural.cache.k, neural.cache.v):
                    kept.normal_(0, 100)
            propose(*args)

        engine.choose, engine.record, engine.runner.propose = lambda _: next(plan), rounds.append, spoil_and_propose
        collect(engine, longer)
        assert off > neural.reach(BATCH)
        return [(r.strategy, r.tokens) for r in rounds]

    assert roll_out_spoiled(True) == roll_out_spoiled(False)
