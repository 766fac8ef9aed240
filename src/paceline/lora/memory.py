"""Bytes of adapters and of the base, and where the base is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from paceline.config import Config
from paceline.lora.adapters import MERGE_CHUNK
from paceline.lora.shape import LoraShape

if TYPE_CHECKING:
    from paceline.model.config import DecoderConfig

KV_SHARE_KEPT = 0.5  # of the tokens that KV pages could hold, which a base on the device must leave


def adapter_sizes(shape: LoraShape, config: DecoderConfig) -> list[int]:
    """Elements of every adapter tensor."""
    return [size * shape.rank for part in shape.parts(config) for size in (part.columns, part.rows)]


def adapter_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def base_bytes(shape: LoraShape, config: DecoderConfig, dtype: torch.dtype) -> int:
    """Of the copy of the adapted weights."""
    return sum(part.rows * part.columns for part in shape.parts(config)) * dtype.itemsize


def base_on_host(config: Config, shape: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes of host memory that each worker keeps the base in."""
    lora = LoraShape.of(config.learn.lora)
    return base_bytes(lora, shape, dtype) if lora and config.learn.lora.base == "host" else 0


def merge_bytes(shape: LoraShape, config: DecoderConfig, dtype: torch.dtype) -> int:
    """Temporaries of a merge: what is merged at once, as it is and in the adapters' precision."""
    largest = max(part.rows * part.columns for part in shape.parts(config))
    return min(MERGE_CHUNK, largest) * (dtype.itemsize + adapter_dtype(dtype).itemsize)


def with_base(config: Config, base: str) -> Config:
    lora = config.learn.lora.model_copy(update={"base": base})
    return config.model_copy(update={"learn": config.learn.model_copy(update={"lora": lora})})


def choose_base(config: Config, cuda: bool, plan: Callable[[Config], Any]) -> Config:
    """Decide where the base is kept, if the settings leave it open: on the device if the run fits then and KV pages
    keep at least half of the tokens that they could have. A CPU's memory is both."""
    lora = config.learn.lora
    if not lora.rank or (lora.base and cuda):
        return config
    on_device = with_base(config, "device")
    if not cuda:
        return on_device
    on_host = with_base(config, "host")
    near, far = plan(on_device), plan(on_host)
    return on_device if near.fits and near.kv_tokens >= KV_SHARE_KEPT * far.kv_tokens else on_host
