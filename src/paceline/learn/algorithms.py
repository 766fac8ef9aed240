"""The algorithms as data: which advantage, which clip, which aggregation. Settings that are `null` take these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.learn.losses import Aggregate

if TYPE_CHECKING:
    from paceline.config import Config


@dataclass(frozen=True)
class Preset:
    aggregate: Aggregate
    clip_low: float = 0.2
    clip_high: float = 0.2
    dynamic_sampling: bool = False
    overlong_buffer_share: float = 0.0
    """Of max_tokens."""


PRESETS = {
    "grpo": Preset("sequence_mean"),
    "dr_grpo": Preset("constant"),
    "dapo": Preset("token_mean", clip_high=0.28, dynamic_sampling=True, overlong_buffer_share=0.2),
    "rloo": Preset("sequence_sum"),
    "reinforce_pp": Preset("token_mean"),
}


def resolve(config: Config) -> Config:
    """The config with every `null` that the algorithm decides filled in."""
    learn, preset = config.learn, PRESETS[config.learn.algorithm]
    buffer = int(config.rollout.max_tokens * preset.overlong_buffer_share)
    defaults = {
        "clip_low": preset.clip_low,
        "clip_high": preset.clip_high,
        "aggregate": preset.aggregate,
        "dynamic_sampling": preset.dynamic_sampling,
        "overlong_buffer": buffer,
    }
    chosen = {k: v for k, v in defaults.items() if getattr(learn, k) is None}
    return config.model_copy(update={"learn": learn.model_copy(update=chosen)})
