"""Bytes of a rollout engine: KV pages, sampling and captured graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.model.memory import layer_elements
from paceline.rollout.pages import CPU_KV_BYTES, GPU_KV_SHARE, page_bytes, pages_for_batch

if TYPE_CHECKING:
    from paceline.model.config import DecoderConfig
    from paceline.rollout.engine import EngineSettings

MAX_GRAPH_BYTES = 8 * 10**9  # most that captured graphs of the default strategies take
GRAPH_BASE_BYTES = 2**28  # of graphs, whatever they compute
SAMPLING_BYTES = 16  # per logit: itself, its float32, the noise, their sum
KV_SHARE_OF_REST = 0.8  # of what everything else leaves on a GPU: estimates are estimates


def sampling_bytes(rows: int, shape: DecoderConfig) -> int:
    """Of a decoding pass over so many rows (tokens that are verified at once)."""
    return rows * shape.vocab_size * SAMPLING_BYTES


def graph_bytes(rows: int, shape: DecoderConfig, limit: int | None) -> int:
    """Of an engine's captured graphs, the largest of which has so many rows."""
    return min(MAX_GRAPH_BYTES if limit is None else limit, sampling_bytes(rows, shape) + GRAPH_BASE_BYTES)


def prefill_bytes(shape: DecoderConfig, tokens: int, dtype: torch.dtype) -> int:
    """Activations of a prefill pass over so many tokens: those of one layer."""
    return tokens * layer_elements(shape) * dtype.itemsize


@dataclass(frozen=True)
class KVPlan:
    """KV pages of one engine."""

    bytes: int
    least: int
    """Bytes that it cannot do without."""
    tokens: int
    """That the pages hold."""


def kv_capacity(cuda: bool, total: int, left: int, engines: int, sharing: int) -> int:
    """Bytes that one engine may take for KV pages where the settings do not say: on a GPU of `total` bytes half of a
    worker's share, within most of what everything else leaves for all engines (`left`)."""
    if not cuda:
        return CPU_KV_BYTES
    return min(int(GPU_KV_SHARE * total) // sharing, int(KV_SHARE_OF_REST * (left // (sharing * engines))))


def plan_kv(
    shape: DecoderConfig, dtype: torch.dtype, settings: EngineSettings, page_size: int, longest: int, capacity: int
) -> KVPlan:
    """Pages for a batch of requests that each may fill the context, within the settings' limit, or if they have none
    within `capacity` bytes; at the least those of one request of `longest` tokens."""
    context = min(settings.max_length or shape.max_positions, shape.max_positions)
    page = page_bytes(shape, page_size, dtype)
    wanted = pages_for_batch(settings.max_batch, context, page_size) * page
    if settings.kv_bytes is not None:
        size = least = min(wanted, settings.kv_bytes)
    else:
        least = pages_for_batch(1, min(context, longest), page_size) * page
        size = max(least, min(wanted, capacity))
    return KVPlan(size, least, size // page * page_size)
