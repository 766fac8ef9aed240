"""Details of the race that the tests of the law cannot see."""

import torch

from paceline.rollout.rows import Rows
from paceline.rollout.sampling import race


def test_rows_that_pad_a_graph_are_harmless_with_filters_on():
    """A graph for 4 requests serves 3: its last row is all zeros, also where filters expect a positive number."""
    rows = Rows(4, 1, torch.device("cpu"))
    view = rows.view(0, 4).sampling
    view.temperature[:3], view.top_p[:3], view.min_p[:3] = 1.0, 0.5, 0.1
    logits = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    noise = torch.zeros_like(logits)
    tokens, logprobs = race(logits, view, noise, filters=True)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert logprobs.isfinite().all()
