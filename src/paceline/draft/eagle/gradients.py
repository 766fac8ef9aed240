"""The gradients of a drafter's training step; on a GPU as one graph replay.

A step over some thousand tokens is a thousand small kernels, which take the host longer to launch than the card to run.
A graph has one size, so sequences are padded to the next of a few sizes with one that nothing is learned from; where
something is learned is then a matter of weights, not of how many rows there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.draft.eagle.loss import DraftLoss, PackedSequences, unrolled_loss
from paceline.draft.eagle.model import EagleModel
from paceline.kernels.capture import Graph, capture, warm_up

CLIP = 1.0  # the most that the norm of a gradient may be
SMALLEST = 512  # tokens of a graph
LARGEST = 1 << 16


class Gradients(NamedTuple):
    """Of each parameter, in float32, clipped; and the numbers of the step: loss, norm before clipping, and how often
    each draft token in a row agrees."""

    of: list[Tensor]
    numbers: Tensor


def make_gradients(drafter: EagleModel, runs: int, loss: DraftLoss) -> Callable[[PackedSequences], Gradients]:
    """What computes them for this drafter, whose parameters it reads anew each time."""
    if drafter.fc.is_cuda:
        return GraphedGradients(drafter, runs, loss)
    return lambda sequences: gradients(drafter, sequences, runs, loss)


def gradients(
    drafter: EagleModel, sequences: PackedSequences, runs: int, loss: DraftLoss, rows: Tensor | None = None
) -> Gradients:
    params = list(drafter.parameters())
    with torch.enable_grad():
        value, agree = unrolled_loss(drafter, sequences, runs, loss, rows)
        # Sequences without a completion leave some without a gradient.
        found = torch.autograd.grad(value, params, materialize_grads=True)
    wide = [g.float() for g in found]
    norm = torch.nn.utils.get_total_norm(wide)
    torch._foreach_mul_(wide, (CLIP / (norm + 1e-6)).clamp(max=1.0))
    return Gradients(wide, torch.cat((torch.stack((value.detach(), norm)), agree)))


class GraphedGradients:
    def __init__(self, drafter: EagleModel, runs: int, loss: DraftLoss):
        self.drafter = drafter
        self.runs = runs
        self.loss = loss
        self._graphs: dict[int, tuple[Graph, PackedSequences, Gradients]] = {}
        self._memory = torch.cuda.graph_pool_handle()
        self._indices = torch.arange(LARGEST, device=drafter.fc.device)  # graphs read it, so it stays where it is

    def __call__(self, sequences: PackedSequences) -> Gradients:
        tokens = size_of(len(sequences.tokens))
        if tokens > LARGEST:
            return gradients(self.drafter, sequences.to(self.drafter.fc.device), self.runs, self.loss)
        if tokens not in self._graphs:
            self._graphs[tokens] = self._capture(tokens, sequences)
        graph, inputs, result = self._graphs[tokens]
        put(sequences, inputs)
        graph.replay()
        return result

    def _capture(self, tokens: int, sequences: PackedSequences) -> tuple[Graph, PackedSequences, Gradients]:
        inputs = make_inputs(tokens, sequences, self.drafter.fc.device)
        put(sequences, inputs)
        rows = self._indices[:tokens]
        work = lambda: gradients(self.drafter, inputs, self.runs, self.loss, rows)  # noqa: E731
        warm_up(work)
        graph, result = capture(work, self._memory)
        return graph, inputs, result


def size_of(tokens: int) -> int:
    """The size of the graph that takes so many tokens."""
    return max(SMALLEST, 1 << (tokens - 1).bit_length())


def make_inputs(tokens: int, sequences: PackedSequences, device: torch.device) -> PackedSequences:
    """Static inputs of a graph for so many tokens of such sequences."""
    empty = {name: t.new_zeros(tokens, *t.shape[1:], device=device) for name, t in vars(sequences).items()}
    return PackedSequences(**empty)


def put(sequences: PackedSequences, inputs: PackedSequences) -> None:
    """Copy sequences into a graph's inputs. What is left over is padding: a sequence of its own, from which nothing is
    learned."""
    used = len(sequences.tokens)
    padding = len(inputs.tokens) - used
    for name, target in vars(inputs).items():
        target[:used].copy_(getattr(sequences, name), non_blocking=True)
        target[used:].zero_()
    torch.arange(padding, out=inputs.positions[used:])
