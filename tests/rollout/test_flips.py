"""In float32, speculation changes nothing but near-ties, and those are rare: less than one in 500,000 tokens."""

from __future__ import annotations

import pytest

from paceline.rollout.differences import explain

from .reasoner import plainly, problems, reasoner, toggled

RARE = 500_000  # tokens among which one flip is allowed
BATCH, LONGEST = 96, 300


@pytest.mark.parametrize(
    ("most", "portion"),
    [(30_000, 240), pytest.param(RARE, 768, marks=pytest.mark.soak)],
)
def test_flips_are_near_ties_and_rare(most, portion):
    """A flip makes the rest of its answer another one, so an answer counts once."""
    model = reasoner()
    tokens, portions, flips = 0, 0, []
    while tokens < most:
        requests = problems(portion, LONGEST, answers=4, seed=portions)
        plain, spoken = plainly(model, requests, BATCH), toggled(model, requests, BATCH, seed=portions)
        assert plain.keys() == spoken.keys()
        tokens += sum(len(c.tokens) for c in plain.values())
        different = [i for i in plain if plain[i].tokens != spoken[i].tokens]
        flips += explain(model, [(plain[i], spoken[i]) for i in different])
        portions += 1
        print(f"{tokens:,} tokens, {len(flips)} flips {flips}", flush=True)
    assert all(flip.near_tie for flip in flips), flips
    assert len(flips) <= 1 + tokens // RARE, flips
