"""Rotary position embeddings: the frequencies of the families we run, and their application.

`rope_type` is default, linear, llama3 or yarn. Both spellings are read: `rope_parameters` (transformers 5) and
`rope_theta` with `rope_scaling` (older checkpoints).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from paceline.errors import UserError
from paceline.files.reading import check, shorten
from paceline.kernels.fused import fuses

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
REQUIRED_SETTINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
MAX_POSITIONS = 2**26  # far beyond any model's context: a larger number in a config is damage

Factor = Annotated[float, Field(ge=1e-3, le=1e6, allow_inf_nan=False)]
"""A factor of frequencies: within these bounds angles are finite in every precision."""


class RopeSettings(BaseModel):
    """What is read of `rope_scaling` or `rope_parameters`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Annotated[float, Field(ge=1, le=1e15, allow_inf_nan=False)] | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: Annotated[int, Field(ge=1, le=MAX_POSITIONS)] | None = None
    factor: Factor | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    beta_fast: Factor | None = None
    beta_slow: Factor | None = None
    mscale: Annotated[float, Field(ge=0, le=1e3, allow_inf_nan=False)] | None = None
    mscale_all_dim: Annotated[float, Field(ge=0, le=1e3, allow_inf_nan=False)] | None = None
    attention_factor: Factor | None = None
    truncate: bool = True


@dataclass(frozen=True)
class Rope:
    """A model's rotary embedding: base frequency, kind of scaling and its settings."""

    theta: float = 10000.0
    kind: str = "default"
    scaling: dict[str, Any] = field(default_factory=dict)
    original_positions: int = 2048

    @classmethod
    def from_hf(cls, hf: dict[str, Any], where: str = "the model") -> Rope:
        source = f"the config.json of {where}"
        settings: dict[str, Any] = {}
        for spelling in ("rope_scaling", "rope_parameters"):
            settings |= check(dict[str, Any] | None, hf.get(spelling), f"{source} ({spelling})") or {}  # type: ignore[arg-type]
        nested = [name for name, value in settings.items() if isinstance(value, dict)]
        if nested:
            raise UserError(
                f"{where} has rope settings per kind of layer ({shorten(nested[0])}), which Paceline does not run"
            )
        known = check(RopeSettings, settings, f"the rope settings in {source}")
        top = check(RopeSettings, {k: hf[k] for k in ("rope_theta", "partial_rotary_factor") if k in hf}, source)
        kind = known.rope_type or known.type or "default"
        if kind not in ROPE_TYPES:
            raise UserError(
                f"{where} uses '{shorten(kind)}' rope scaling, which Paceline does not run; "
                f"it runs {', '.join(ROPE_TYPES)}"
            )
        for key in REQUIRED_SETTINGS.get(kind, ()):
            if settings.get(key) is None:
                raise UserError(f"the rope settings in {source} have no '{key}', which '{kind}' scaling needs")
        parts = (known.partial_rotary_factor, top.partial_rotary_factor)
        if any(part not in (None, 1.0) for part in parts):
            raise UserError(f"{where} rotates only part of each head, which Paceline does not run")
        theta = known.rope_theta or top.rope_theta or 10000.0
        if kind == "llama3" and (known.high_freq_factor or 0) <= (known.low_freq_factor or 0):
            raise UserError(f"'high_freq_factor' in {source} must be larger than 'low_freq_factor'")
        if kind == "yarn" and theta <= 1:
            raise UserError(f"'rope_theta' = {theta:g} in {source} does not work: yarn scaling needs more than 1")
        longest = check(RopeSettings, {"original_max_position_embeddings": hf.get("max_position_embeddings")}, source)
        original = known.original_max_position_embeddings or longest.original_max_position_embeddings or 2048
        return cls(theta, kind, settings, original)

    def frequencies(self, head_dim: int) -> tuple[Tensor, float]:
        """Inverse frequencies [head_dim / 2] in float64, and the factor that cos and sin are multiplied with."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
        inv = self.theta**-exponent
        if self.kind == "linear":
            return inv / self.scaling["factor"], 1.0
        if self.kind == "llama3":
            return self._llama3(inv), 1.0
        if self.kind == "yarn":
            return self._yarn(inv, head_dim)
        return inv, 1.0

    def _llama3(self, inv: Tensor) -> Tensor:
        """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
        factor, low, high = (self.scaling[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
        rotations = self.original_positions * inv / (2 * math.pi)  # full ones within the original context
        blend = ((rotations - low) / (high - low)).clamp(0, 1)
        return inv * (blend + (1 - blend) / factor)

    def _yarn(self, inv: Tensor, head_dim: int) -> tuple[Tensor, float]:
        """Dimensions that rotate often within the original context keep their frequency, slow ones are interpolated,
        with a linear ramp in between -> the frequencies, and the factor of cos and sin."""
        s = self.scaling
        factor = s["factor"]

        def dimension(rotations: float) -> float:
            span = math.log(self.original_positions / (rotations * 2 * math.pi))
            return head_dim * span / (2 * math.log(self.theta))

        low, high = dimension(s.get("beta_fast") or 32), dimension(s.get("beta_slow") or 1)
        if s.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001  # the ramp's width must not be zero
        ramp = ((torch.arange(head_dim // 2, dtype=torch.float64, device="cpu") - low) / (high - low)).clamp(0, 1)
        mixed = inv / factor * ramp + inv * (1 - ramp)
        return mixed, s.get("attention_factor") or _yarn_attention_factor(factor, s)


def _yarn_attention_factor(factor: float, scaling: dict[str, Any]) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    one, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return mscale(one) / mscale(all_dims) if one and all_dims else mscale(1.0)


def rotation_constants(rope: Rope, head_dim: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """inv_freq [head_dim] and signs [2, head_dim], the factors of cos and sin, as `rotations` takes them; those of sin
    are negative in the first half."""
    half, factor = rope.frequencies(head_dim)
    signs = torch.ones(2, head_dim, dtype=torch.float64, device="cpu")
    signs[1, : head_dim // 2] = -1
    return torch.cat((half, half)).to(device, dtype), (signs * factor).to(device, dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [N, heads, head_dim]: dimension i is rotated with i + head_dim / 2, by cos and sin
    [N, 1, head_dim]."""
    if fuses(x):
        from paceline.kernels.fused_triton import rotate as fused

        return fused(x, cos, sin)
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, -1), sin)
