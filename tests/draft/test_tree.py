"""The walk down a tree of draft tokens, against the obvious loop."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.tree import chain, tree, walk


def obvious(tokens, parents, winners, usable):
    at, path = 0, [0]
    while True:
        found = [i for i, (g, p) in enumerate(zip(tokens, parents, strict=True)) if p == at and g == winners[at]]
        if not found or not usable[found[0] + 1]:
            return len(path) - 1, path
        at = found[0] + 1
        path.append(at)


def random_tree(r: random.Random, nodes: int, depth: int) -> tuple[list[int], list[int]]:
    """Parents and tokens; siblings differ, as a drafter's do."""
    depths, taken, parents, tokens = [0], {0: set()}, [], []
    for i in range(nodes):
        parent = r.choice([p for p in range(len(depths)) if depths[p] < depth and len(taken[p]) < 3])
        token = r.choice([g for g in range(3) if g not in taken[parent]])
        taken[parent].add(token)
        taken[i + 1] = set()
        depths.append(depths[parent] + 1)
        parents.append(parent)
        tokens.append(token)
    return parents, tokens


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 20), st.integers(3, 6))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_walk(seed, batch, nodes, depth):
    r = random.Random(seed)
    trees = [random_tree(r, nodes, depth) for _ in range(batch)]
    parents, tokens = torch.tensor([t[0] for t in trees]), torch.tensor([t[1] for t in trees])
    winners = torch.tensor([[r.randrange(3) for _ in range(nodes + 1)] for _ in range(batch)])
    usable = torch.tensor([[i == 0 or r.random() < 0.9 for i in range(nodes + 1)] for _ in range(batch)])
    shape = tree(parents, depth)
    accepted, paths = walk(shape, tokens, parents, winners, usable)
    for b in range(batch):
        rows = (x[b].tolist() for x in (tokens, parents, winners, usable))
        count, path = obvious(*rows)
        assert accepted[b] == count and paths[b, : count + 1].tolist() == path
        for i in range(nodes + 1):
            line, at = {i}, i
            while at:
                at = int(parents[b, at - 1])
                line.add(at)
            assert int(shape.bits[b, i]) == sum(1 << j for j in line)
            assert shape.depth[b, i] == len(line) - 1


def test_a_chain_is_a_tree_of_width_one():
    parents = torch.arange(5).expand(3, 5)
    a, b = chain(3, 5, torch.device("cpu")), tree(parents, 5)
    assert torch.equal(a.depth, b.depth) and torch.equal(a.bits, b.bits)
    tokens, winners = torch.randint(2, (3, 5)), torch.randint(2, (3, 6))
    usable = torch.ones(3, 6, dtype=torch.bool)
    assert torch.equal(walk(a, tokens, None, winners, usable)[0], walk(b, tokens, parents, winners, usable)[0])
