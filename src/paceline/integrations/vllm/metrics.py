"""The tuner in the /metrics of `vllm serve`. It lives in the engine's process; here, in the server's, depths are read
off vLLM's own statistics of a step."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.v1.metrics.loggers import StatLoggerBase

LABELS = ("model_name", "engine")


class TunerMetrics(StatLoggerBase):
    def __init__(self, vllm_config: Any, engine_index: int = 0):
        labels = (str(vllm_config.model_config.served_model_name), str(engine_index))
        self.labels = labels
        self.depth = _metric(Gauge, "paceline:spec_depth", "Draft tokens per sequence in the last step, 0 is off.")
        self.steps = _metric(Counter, "paceline:steps", "Steps of the engine by depth of speculation.", "depth")
        self.sequences = _metric(Gauge, "paceline:sequences", "Sequences whose draft tokens the last step verified.")

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0, **_: Any
    ) -> None:
        if scheduler_stats is None or not scheduler_stats.num_running_reqs:
            return
        drafts = scheduler_stats.spec_decoding_stats
        sequences = drafts.num_drafts if drafts is not None else 0
        depth = round(drafts.num_draft_tokens / sequences) if sequences else 0
        self.depth.labels(*self.labels).set(depth)
        self.sequences.labels(*self.labels).set(sequences)
        self.steps.labels(*self.labels, str(depth)).inc()

    def log_engine_initialized(self) -> None:
        pass


def _metric(kind: Any, name: str, about: str, *more: str) -> Any:
    """One for all engines of a process."""
    known = REGISTRY._names_to_collectors.get(name)
    return known if known is not None else kind(name, about, labelnames=(*LABELS, *more))
