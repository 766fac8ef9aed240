"""What the engine says about itself, against what it did."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import Request, SamplingParams
from paceline.draft.suffix.drafter import SuffixDrafter
from paceline.observe.step_text import describe_speculation
from paceline.rollout import EngineSettings, RolloutEngine
from paceline.rollout.sequence import Sequence
from paceline.rollout.stops import continues, finish_reason
from tests.rollout.reasoner import own_drafter, problems, reasoner


def test_metrics_tell_what_every_round_did():
    model = reasoner()
    engine = RolloutEngine(model, EngineSettings(max_batch=6), None, [SuffixDrafter(6, 1280), own_drafter(model)])
    dice, rounds, drafted = random.Random(3), [], []
    engine.choose = lambda _: dice.choice(engine.strategies)
    engine.record = rounds.append
    observe = engine.tuner.observe
    engine.tuner.observe = lambda outcome: (  # type: ignore[method-assign]
        drafted.extend((outcome.choice.strategy.depth, a) for a in outcome.accepted or []),
        observe(outcome),
    )[1]
    before = engine.stats.snapshot()
    list(engine.run(problems(6, 40)))  # counted before, so a difference must not see them
    middle, after_first = engine.stats.snapshot(), len(rounds)
    drafted.clear()
    list(engine.run([Request(100 + r.id, r.prompt, r.sampling) for r in problems(8, 60)]))
    metrics, rounds = engine.stats.since(middle).metrics(), rounds[after_first:]

    decoded = [r for r in rounds if r.strategy != "prefill"]
    spec = [r for r in decoded if r.strategy != "plain"]
    assert metrics["rollout/rounds"] == len(decoded) and metrics["rollout/spec_rounds"] == len(spec)
    ran = Counter(r.strategy for r in decoded)
    assert {k: v for k, v in metrics.items() if k.startswith("rollout/rounds/")} == {
        f"rollout/rounds/{name}": n for name, n in ran.items()
    }
    assert metrics["rollout/spec_accept_length"] == sum(r.tokens for r in spec) / sum(r.batch for r in spec)
    assert metrics["rollout/spec_accept_rate"] == sum(a for _, a in drafted) / sum(d for d, _ in drafted)
    for depth in range(1, 8):
        accepted = sum(a >= depth for _, a in drafted)
        assert metrics.get(f"rollout/spec_accept_at/{depth}", 0.0) == accepted / len(drafted)
    shares = {name: metrics[f"rollout/share/{name}"] for name in ("prefill", "plain", "draft", "verify")}
    assert sum(shares.values()) == pytest.approx(1) and min(shares.values()) > 0
    plain = sum(r.seconds for r in decoded if r.strategy == "plain")
    assert shares["plain"] == pytest.approx(plain / sum(r.seconds for r in rounds))
    assert engine.stats.since(before).metrics()["rollout/rounds"] > metrics["rollout/rounds"]
    assert f"accept length {metrics['rollout/spec_accept_length']:.2f}" in describe_speculation(metrics)


def test_a_rollout_without_draft_tokens_has_no_acceptance():
    engine = RolloutEngine(reasoner(), EngineSettings(max_batch=4))
    before = engine.stats.snapshot()
    list(engine.run(problems(4, 8)))
    metrics = engine.stats.since(before).metrics()
    assert metrics["rollout/spec_accept_length"] == 1.0 and metrics["rollout/spec_rounds"] == 0
    assert not any(name.startswith("rollout/spec_accept_at") for name in metrics)
    assert metrics["rollout/share/draft"] == metrics["rollout/share/verify"] == 0


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.integers(0, 20),
    st.integers(1, 20),
    st.integers(0, 20),
    st.integers(4, 30),
)
def test_a_glance_never_misses_an_end(tokens, written, most, least, longest):
    sampling = SamplingParams(max_tokens=most, min_tokens=min(least, most), stop_token_ids=(3, 7))
    seq = Sequence.of(Request(0, (1, 2, 3), sampling))
    seq.tokens += [0] * min(written, most - 1, max(0, longest - 4))
    if continues(seq, tokens, longest):
        for token in tokens:
            seq.tokens.append(token)
            assert finish_reason(seq, longest, None) is None
