"""What trees are for: more draft tokens are accepted than in the likeliest chain alone. Tokens stay the same."""

from __future__ import annotations

from paceline.draft.strategy import PLAIN, Strategy
from paceline.rollout import EngineSettings, RolloutEngine

from .reasoner import own_drafter, problems, reasoner
from .test_exactness import collect


def test_more_draft_tokens_are_accepted_in_a_tree_and_those_that_are_left_out_are_the_least_likely():
    model, requests = reasoner("float64"), problems(32, longest=240)

    def accept_length(words: str) -> float:
        strategy = Strategy.parse(words)
        engine = RolloutEngine(model, EngineSettings(max_batch=32), None, [own_drafter(model)], [PLAIN, strategy])
        engine.choose = lambda _: strategy
        collect(engine, requests)
        return engine.stats.accept_length

    chain, some, tree = map(accept_length, ("neural:5~", "neural:5x3/10~", "neural:5x3~"))
    print(f"chain {chain:.2f}, likeliest ten {some:.2f}, whole tree {tree:.2f}")
    assert tree >= some > chain + 0.9 * (tree - chain) > 1.05 * chain
