"""What an engine may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineSettings:
    max_batch: int = 256
    """Most requests that decode at the same time."""
    max_length: int | None = None
    """Longest prompt and completion together, in tokens; the model's context if not given."""
    page_size: int | None = None
    """Tokens per KV page; by default what suits the device."""
    pages: int | None = None
    """Pages in the pool; by default as many as the full batch can use, within `kv_bytes`."""
    kv_bytes: int | None = None
    prefill_tokens: int = 8192
    cuda_graphs: bool = True
    graph_bytes: int | None = None
    """Most memory for captured graphs; beyond it, what is new runs without."""
    explore: float = 0.02
    """Share of the time that may go to strategies that are not the best known."""
    overlap: bool | None = None
    """Whether a round may be launched before the last one was read; by default on a GPU, which would wait otherwise."""
