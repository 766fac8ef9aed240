"""Which linear maps are adapted, and how large the adapters are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from paceline.config.training import ALL_LINEAR, TARGETS
from paceline.model.checkpoint import fused_parts

if TYPE_CHECKING:
    from paceline.config.training import LoraConfig
    from paceline.model.config import DecoderConfig


class AdaptedPart(NamedTuple):
    """A linear map of a layer that has an adapter: some rows of a matrix that the decoder keeps fused."""

    layer: int
    fused: str
    """The decoder's name of that matrix."""
    name: str
    """Its own in checkpoints, such as model.layers.0.self_attn.q_proj."""
    start: int
    """Its first row."""
    rows: int
    """Outputs."""
    columns: int
    """Inputs."""


@dataclass(frozen=True)
class LoraShape:
    """W = W0 + alpha / rank * B A, with A [rank, inputs] and B [outputs, rank]."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """In the order of `TARGETS`."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @classmethod
    def of(cls, settings: LoraConfig) -> LoraShape | None:
        """What the settings ask for; None where all weights are trained."""
        if not settings.rank:
            return None
        alpha = 2.0 * settings.rank if settings.alpha is None else settings.alpha
        chosen = TARGETS if settings.targets == ALL_LINEAR else settings.targets
        return cls(settings.rank, alpha, tuple(name for name in TARGETS if name in chosen))

    def parts(self, config: DecoderConfig) -> Iterator[AdaptedPart]:
        """All linear maps of a model that have an adapter."""
        columns = {"o": config.heads * config.head_dim, "down": config.intermediate_size}
        for layer in range(config.layers):
            for fused, sizes in fused_parts(config).items():
                start = 0
                for name, rows in sizes.items():
                    if name.rpartition(".")[2] in self.targets:
                        full = f"model.layers.{layer}.{name}"
                        yield AdaptedPart(layer, fused, full, start, rows, columns.get(fused, config.hidden_size))
                    start += rows
