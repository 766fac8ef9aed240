"""What verl has to be told, and what Paceline's rollout adds by itself."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from paceline.errors import UserError

ROLLOUT = "paceline"
"""Of `actor_rollout_ref.rollout.name`."""
SCHEDULER = "paceline.integrations.vllm.TunedScheduler"
DEPTH = 7
METHOD = "eagle3"
DRAFTERLESS = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculation without weights of their own."""
ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm"


def rollout_settings(
    drafter: str | os.PathLike[str], depth: int = DEPTH, method: str = METHOD, **tuner: Any
) -> dict[str, Any]:
    """The part `actor_rollout_ref.rollout` of verl's configuration: `depth` is the deepest draft, and `tuner` may hold
    `depths`, `explore`, `margin`, `state` (a file) and `log_s`."""
    engine: dict[str, Any] = {
        "scheduler_cls": SCHEDULER,
        "speculative_config": {"method": method, "model": os.fspath(drafter), "num_speculative_tokens": depth},
    }
    if tuner:
        engine["additional_config"] = {"paceline": tuner}
    return {"name": ROLLOUT, "engine_kwargs": {"vllm": engine}}


def hydra_overrides(rollout: Mapping[str, Any], prefix: str = "actor_rollout_ref.rollout") -> list[str]:
    """Those settings as words for verl's command line; what its schema does not have begins with a plus."""
    words = []
    for key, value in rollout.items():
        name = f"{prefix}.{key}"
        if isinstance(value, Mapping):
            words += hydra_overrides(value, name)
        else:
            plus = "++" if name.startswith(f"{ENGINE}.") else ""
            words.append(f"{plus}{name}={value if isinstance(value, str) else json.dumps(value)}")
    return words


def complete(engine: dict[str, Any], config: Any) -> None:
    """Add to `engine`, the arguments that verl gives to vLLM, what is not said; refuse what cannot work. `config` is
    verl's RolloutConfig."""
    speculative = engine.get("speculative_config")
    if isinstance(speculative, str):
        speculative = _parse(speculative)
    if not isinstance(speculative, Mapping):
        raise UserError(
            f"rollout.name={ROLLOUT} speculates, but has no drafter: set {ENGINE}.speculative_config.model to the "
            "folder of one (`paceline export` writes it)"
        )
    speculative = {"method": METHOD, "num_speculative_tokens": DEPTH} | dict(speculative)
    if speculative["method"] not in DRAFTERLESS and not speculative.get("model"):
        raise UserError(
            f"method {speculative['method']} needs a drafter: set {ENGINE}.speculative_config.model to its folder"
        )
    if config.data_parallel_size > 1:
        raise UserError(
            f"rollout.data_parallel_size={config.data_parallel_size} makes vLLM's ranks wait for each other, so each "
            f"cannot have its own depth: rollout.name={ROLLOUT} needs 1, where verl starts one engine per replica"
        )
    engine["speculative_config"] = speculative
    engine.setdefault("scheduler_cls", SCHEDULER)
    if config.load_format == "dummy":
        engine.setdefault("load_format", "auto")  # vLLM loads a drafter in the way of its policy: random otherwise


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as err:
        raise UserError(f"{ENGINE}.speculative_config is not JSON ({err}): {text[:80]}") from err
