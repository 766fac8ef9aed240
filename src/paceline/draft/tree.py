"""Trees of guesses as tensors: who is whose ancestor, what each node sees, and which nodes the policy agrees with.

A tree has T = nodes + 1 members: the last token of the text (the root, number 0), then the guesses, parents first.
Nothing here looks at values on the host, so all of it can be part of a captured graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.accept import count_accepted
from paceline.kernels.constants import constant
from paceline.kernels.paged_attention import chain_tree


class Tree(NamedTuple):
    depth: Tensor  # int64 [B, T] distance from the root
    bits: Tensor  # int64 [B, T] ancestors and self, as attention wants them
    lineage: Tensor | None  # bool [B, T, T] whether column j is i or an ancestor of i; None for chains


def chain(batch: int, nodes: int, device: torch.device) -> Tree:
    return Tree(_count(nodes + 1, device).expand(batch, -1), chain_tree(batch, nodes + 1, device), None)


def tree(parents: Tensor, depth: int) -> Tree:
    """From each guess's parent, int [B, nodes]: 0 is the root, i + 1 is guess i. No path is longer than `depth`."""
    batch, nodes = parents.shape
    eye = _eye(nodes + 1, parents.device)
    up = torch.zeros(batch, nodes + 1, nodes + 1, device=parents.device)
    up[:, 1:] = eye[parents.long()]
    lineage = up + eye  # paths of length 0 and 1; squaring doubles the length
    reach = 1
    while reach < depth:
        lineage = (lineage @ lineage).clamp_(max=1)
        reach *= 2
    related = lineage > 0
    bits = torch.where(related, _bits(nodes + 1, parents.device), 0).sum(-1)
    return Tree(related.sum(-1) - 1, bits, related)


def walk(
    shape: Tree, guesses: Tensor, parents: Tensor | None, winners: Tensor, usable: Tensor
) -> tuple[Tensor, Tensor]:
    """Follow the policy down the tree: guesses [B, nodes] against the winners [B, T] of the race at each member.

    Returns how many guesses hold, int64 [B], and the members on the way down, int64 [B, depth + 1]; behind the last
    one that holds the way is meaningless. `usable` [B, T] is false for members that had no place in the cache."""
    if shape.lineage is None:
        return count_accepted(guesses, winners, usable), shape.depth
    assert parents is not None
    right = (guesses == winners.gather(1, parents.long())) & usable[:, 1:]
    right = torch.cat((torch.ones_like(right[:, :1]), right), 1)
    held = ~(shape.lineage & ~right[:, None]).any(-1)  # [B, T] all of its lineage is right
    deepest = shape.depth.where(held, 0)
    last = deepest.argmax(1, keepdim=True)  # siblings differ, so at most one path holds all the way
    on_way = shape.lineage.gather(1, last[..., None].expand(-1, -1, held.shape[1]))[:, 0]
    levels = _count(held.shape[1], held.device)
    at_level = on_way[:, None] & (shape.depth[:, None] == levels[:, None])  # [B, level, member]
    return deepest.gather(1, last)[:, 0], at_level.int().argmax(2)


@constant
def _count(n: int, device: torch.device) -> Tensor:
    return torch.arange(n, device=device)


@constant
def _eye(n: int, device: torch.device) -> Tensor:
    return torch.eye(n, device=device)


@constant
def _bits(n: int, device: torch.device) -> Tensor:
    return torch.tensor([1 << i if i < 63 else -(1 << 63) for i in range(n)], device=device)
