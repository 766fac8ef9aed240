"""Trees of draft tokens as tensors: who is whose ancestor, what each node sees, and which nodes the policy accepts.

A tree has T = 1 + nodes: the last token of the sequence (the root, number 0), then the draft tokens, parents first.
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
    """From each draft token's parent, int [B, nodes]: 0 is the root, i + 1 is draft token i. No path is longer than
    `depth`."""
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
    shape: Tree, drafted: Tensor, parents: Tensor | None, sampled: Tensor, usable: Tensor
) -> tuple[Tensor, Tensor]:
    """Follow the policy down the tree: draft tokens [B, nodes] against the tokens [B, T] sampled behind each node.

    Returns how many draft tokens are accepted, int64 [B], and the accepted path, int64 [B, depth + 1]: the nodes from
    the root on; behind the last accepted one it is meaningless. `usable` [B, T] is false for nodes without a KV
    slot."""
    if shape.lineage is None:
        return count_accepted(drafted, sampled, usable), shape.depth
    assert parents is not None
    right = (drafted == sampled.gather(1, parents.long())) & usable[:, 1:]
    right = torch.cat((torch.ones_like(right[:, :1]), right), 1)
    accepted = ~(shape.lineage & ~right[:, None]).any(-1)  # [B, T] all of its lineage is right
    deepest = shape.depth.where(accepted, 0)
    last = deepest.argmax(1, keepdim=True)  # siblings differ, so at most one path is accepted
    on_path = shape.lineage.gather(1, last[..., None].expand(-1, -1, accepted.shape[1]))[:, 0]
    levels = _count(accepted.shape[1], accepted.device)
    at_level = on_path[:, None] & (shape.depth[:, None] == levels[:, None])  # [B, level, node]
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
