"""What vLLM calls in each of its processes before it builds anything (entry point `vllm.general_plugins`). Without
Paceline's scheduler nothing changes."""

from __future__ import annotations

import functools
import logging
from typing import Any

from paceline.integrations.vllm.drafting import find, follow_schedule
from paceline.integrations.vllm.graphs import list_graphs
from paceline.integrations.vllm.same_tokens import racing_worker, seeding_core, wanted
from paceline.integrations.vllm.settings import TunerSettings, depth_ladder, depth_table, is_ours
from paceline.integrations.vllm.versions import installed_version, names_of

ENGINE = "vllm.v1.engine.core:EngineCore"
log = logging.getLogger("vllm.paceline")


def register() -> None:
    try:
        engine = find(ENGINE)
        if hasattr(engine, "paceline_tuner_state"):
            return  # a process may load its plug-ins more than once
        names, warning = names_of(installed_version())
        if warning:
            log.warning("%s", warning)
        follow_schedule(names)
        list_graphs(names)
        for where, method, wrap in HOOKS:
            owner = find(where)
            setattr(owner, method, wrap(getattr(owner, method)))
        engine.paceline_tuner_state = tuner_state_of
        engine.paceline_drafter_changed = drafter_changed_in
    except (ImportError, AttributeError) as err:
        log.warning("Paceline's plug-in does not fit this vLLM, which goes on without it: %s", err)


def with_table(create: Any) -> Any:
    """`create_speculative_config` of engines with Paceline's scheduler: with a table of depths, so that vLLM captures
    CUDA graphs for all of them. A table that the user gives stays."""

    @functools.wraps(create)
    def create_speculative_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        if not is_ours(self.scheduler_cls) and not wanted(self):
            return config
        settings = TunerSettings.of(self.additional_config)  # a wrong one is refused before anything is loaded
        if not is_ours(self.scheduler_cls):
            return config
        if config is None or config.num_speculative_tokens_per_batch_size:
            return config
        settings.check(config.num_speculative_tokens)
        depths = settings.depths or depth_ladder(config.num_speculative_tokens)
        table = depth_table(depths, self.max_num_seqs or 1024)
        config.num_speculative_tokens_per_batch_size = [tuple(entry) for entry in table]
        return config

    return create_speculative_config


def with_metrics(init: Any) -> Any:
    """The constructor of the engine of `vllm serve`, with the tuner's metrics where there is the tuner and statistics
    are wanted. The entry point for such loggers would turn statistics on for every engine of the environment."""

    @functools.wraps(init)
    def init_with_metrics(self: Any, *args: Any, **kwargs: Any) -> None:
        config = kwargs.get("vllm_config") or args[0]
        if is_ours(config.scheduler_config.scheduler_cls) and kwargs.get("log_stats"):
            from paceline.integrations.vllm.metrics import TunerMetrics

            kwargs["stat_loggers"] = [*(kwargs.get("stat_loggers") or []), TunerMetrics]
        init(self, *args, **kwargs)

    return init_with_metrics


def tuner_state_of(engine: Any) -> dict[str, Any] | None:
    """In the engine's process: what its tuner has found, None without one."""
    tuning = getattr(engine.scheduler, "paceline", None)
    return None if tuning is None else tuning.tuner.summary()


def drafter_changed_in(engine: Any) -> None:
    """In the engine's process: let the tuner try every depth again."""
    tuning = getattr(engine.scheduler, "paceline", None)
    if tuning is not None:
        tuning.tuner.renew()


HOOKS = (
    ("vllm.engine.arg_utils:EngineArgs", "create_speculative_config", with_table),
    ("vllm.v1.engine.async_llm:AsyncLLM", "__init__", with_metrics),
    (ENGINE, "preprocess_add_request", seeding_core),
    ("vllm.v1.worker.worker_base:WorkerBase", "__init__", racing_worker),
)
"""Of vLLM: where a method is, and what it becomes."""
