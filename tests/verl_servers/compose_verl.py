"""verl's configuration with some words of its command line, read as verl reads it. Runs in an environment of its own
(`make test-verl`):

python compose_verl.py OUT.json WORD...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from hydra import compose, initialize_config_module
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutReplicaRegistry, get_rollout_replica_class
from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main(out: str, *words: str) -> None:
    known = sorted(RolloutReplicaRegistry._registry)
    if not words:
        Path(out).write_text(json.dumps({"known": known}))
        return
    with initialize_config_module("verl.trainer.config", version_base=None):
        whole = compose("ppo_trainer", overrides=list(words))
    rollout = omega_conf_to_dataclass(whole.actor_rollout_ref.rollout)
    replica = get_rollout_replica_class(rollout.name)
    server = object.__new__(vLLMHttpServer)  # its constructor wants a model
    server.config = rollout
    server.model_config = SimpleNamespace(lora_rank=0, lora={})
    engine = dict(rollout.engine_kwargs["vllm"])
    if rollout.name == "paceline":
        from paceline.integrations.verl.settings import complete

        complete(engine, rollout)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args(build_cli_args_from_config(engine))
    found = {
        "known": known,
        "replica": f"{replica.__module__}.{replica.__name__}",
        "adapter": get_rollout_class(rollout.name, rollout.mode).__name__,
        "sleep_level": server._resolve_sleep_level(),
        "load_format": engine.get("load_format", rollout.load_format),
        "scheduler_cls": parsed.scheduler_cls,
        "speculative_config": parsed.speculative_config,
        "additional_config": parsed.additional_config,
    }
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
