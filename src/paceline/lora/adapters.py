"""The adapters of a policy. Its weights are always the merged ones, W = W0 + alpha / rank * B A, written in place: the
engine's graphs hold their addresses, and rollout and learning read the same tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from paceline.core import mix_seed
from paceline.lora.base import BaseWeights
from paceline.lora.matmul import AdaptedMatmul, AdaptedRows
from paceline.lora.shape import LoraShape
from paceline.model.decoder import Decoder, Layer

MERGE_CHUNK = 2**24  # elements that are merged at once, in float32


class Lora:
    def __init__(self, model: Decoder, shape: LoraShape, seed: int = 0, base_on_host: bool = False):
        """Fresh adapters, which change nothing yet (B is zero), for a model whose weights are the base's."""
        self.model = model
        self.shape = shape
        wide = torch.float64 if model.dtype == torch.float64 else torch.float32
        self.parameters: dict[str, nn.Parameter] = {}
        """A and B of every adapted linear map, by PEFT's names without their prefix. Wider than bfloat16 weights, so
        that small updates are not lost."""
        self.start: dict[str, Tensor] = {}
        """Adapters that training began with, where it did not begin with fresh ones and there is a KL term: its
        reference has them merged."""
        self._weights: dict[str, Tensor] = {}  # of each part, the rows of the live matrix that it is
        adapted: dict[tuple[int, str], list[AdaptedRows]] = defaultdict(list)
        for part in shape.parts(model.config):
            a = _fresh(part.name, shape.rank, part.columns, seed).to(model.device, wide)
            b = torch.zeros(part.rows, shape.rank, device=model.device, dtype=wide)
            name_a, name_b = pair_names(part.name)
            self.parameters[name_a] = nn.Parameter(a, requires_grad=False)
            self.parameters[name_b] = nn.Parameter(b, requires_grad=False)
            end = part.start + part.rows
            matrix: Tensor = model.layers[part.layer].get_parameter(part.fused)
            self._weights[part.name] = matrix.detach()[part.start : end]
            rows = AdaptedRows(part.start, end, self.parameters[name_a], self.parameters[name_b])
            adapted[part.layer, part.fused].append(rows)
        self.base = BaseWeights(self._weights, base_on_host)
        layers = cast(list[Layer], model.layers)
        for (layer, fused), parts in adapted.items():
            layers[layer].adapted[fused] = AdaptedMatmul(shape.scale, parts)

    def merge(self) -> None:
        """Have the model's weights be the base's with the adapters as they are now."""
        self._write(self.parameters)

    @contextmanager
    def reference(self) -> Iterator[Decoder]:
        """The model with the weights that training began with; afterwards it has its own again, the same bits."""
        try:
            if self.start:
                self._write(self.start)
            else:
                self.restore()
            yield self.model
        finally:
            self.merge()

    @torch.no_grad()
    def restore(self) -> None:
        """Have the model's weights be the base's."""
        for name, weight in self._weights.items():
            weight.copy_(self.base[name], non_blocking=True)

    @torch.no_grad()
    def _write(self, adapters: Mapping[str, Tensor]) -> None:
        for name, weight in self._weights.items():
            a, b = (adapters[one] for one in pair_names(name))
            rows = max(1, MERGE_CHUNK // weight.shape[1])
            pieces = (t.split(rows) for t in (weight, self.base[name], b))
            for target, base, some in zip(*pieces, strict=True):
                # A copy: without one, weights of the same precision would be added to where they are kept.
                merged = base.to(weight.device, non_blocking=True).to(a.dtype, copy=True)
                target.copy_(merged.addmm_(some, a, alpha=self.shape.scale))

    @torch.no_grad()
    def load(self, adapters: Mapping[str, Tensor]) -> None:
        """Go on with these, by the names of `parameters`."""
        for name, parameter in self.parameters.items():
            parameter.copy_(adapters[name])
        self.merge()

    def detach(self) -> None:
        """Leave the model as it is, without adapters."""
        for layer in cast(list[Layer], self.model.layers):
            layer.adapted = {}

    def keep_start(self) -> None:
        """Keep the adapters as they are for the reference of the KL term."""
        self.start = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}


def pair_names(part: str) -> tuple[str, str]:
    """Of A and B of a linear map."""
    return f"{part}.lora_A.weight", f"{part}.lora_B.weight"


def _fresh(name: str, rank: int, columns: int, seed: int) -> Tensor:
    """A as PEFT begins with it: uniform within 1 / sqrt(inputs); the same on every machine."""
    generator = torch.Generator("cpu").manual_seed(mix_seed(seed, "lora", name))
    bound = 1 / math.sqrt(columns)
    return torch.empty(rank, columns, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
