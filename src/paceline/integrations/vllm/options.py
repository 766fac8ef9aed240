"""Everything that `vllm.LLM` has to be told, as keyword arguments."""

from __future__ import annotations

import os
from typing import Any

from paceline.integrations.vllm.settings import TunerSettings

SCHEDULER = "paceline.integrations.vllm.TunedScheduler"


def paceline_options(
    drafter: str | os.PathLike[str], depth: int = 7, method: str = "eagle3", **tuner: Any
) -> dict[str, Any]:
    """For `LLM(model, **paceline_options("drafter"))`: `depth` is the deepest draft, and `tuner` may hold `depths`,
    `explore`, `margin`, `state` (a file), `log_s` and `same_tokens`, by which a seed decides the tokens, whatever is
    drafted."""
    additional = {"paceline": tuner}
    TunerSettings.of(additional).check(depth)
    return {
        "scheduler_cls": SCHEDULER,
        "speculative_config": {"method": method, "model": os.fspath(drafter), "num_speculative_tokens": depth},
        "additional_config": additional,
    }
