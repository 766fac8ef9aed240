"""On a GPU in bfloat16, where neighbouring scores are far apart: an answer that differs differs by a near-tie."""

from __future__ import annotations

import pytest

from paceline.rollout.differences import explain

from .reasoner import plainly, problems, reasoner, toggled

pytestmark = pytest.mark.gpu
DEVICE, DTYPE = "cuda", "bfloat16"


@pytest.mark.parametrize("batch", [32, 256])
def test_what_differs_is_a_near_tie(batch):
    """256 answers by plain decoding and by a strategy drawn anew for every round, with captured graphs."""
    model = reasoner(DTYPE, DEVICE)
    requests = problems(256, longest=300, answers=4)
    plain = plainly(model, requests, batch=256)
    other = toggled(model, requests, batch, seed=batch)
    assert plain.keys() == other.keys() == {r.id for r in requests}
    tokens = sum(len(c.tokens) for c in plain.values())
    differences = explain(model, [(plain[i], other[i]) for i in plain if plain[i].tokens != other[i].tokens])
    widest = max((d.gap for d in differences), default=0.0)
    print(f"{len(differences)} of {len(plain)} answers differ ({tokens:,} tokens), by gaps of at most {widest:.4f}")
    assert all(d.near_tie for d in differences), [d for d in differences if not d.near_tie]
