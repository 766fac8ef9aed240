"""Answer prompts greedily with verl's own server classes on a CPU, under Ray. Runs in an environment of its own (`make
test-verl`):

python serve_verl.py JOB.json
    {model, prompts, max_tokens, words: overrides for Hydra, drafters: to take one after another, by name, out}
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
from hydra import compose, initialize_config_module
from ray.actor import ActorHandle
from verl.workers.rollout.replica import RolloutMode, get_rollout_replica_class  # importing verl loads the plug-in

# Before Ray starts anything.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own 15 starves where other tests run beside
HERE = Path(__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))

SMALL = [
    "tensor_model_parallel_size=1",
    "dtype=float32",
    "enforce_eager=true",
    "enable_sleep_mode=false",  # a CPU has no memory to give back
    "free_cache_engine=false",
    "max_model_len=1280",
    "max_num_seqs=16",
    "prompt_length=256",
    "response_length=900",
    "disable_log_stats=false",
]


def configured(job: dict) -> Any:
    """verl's configuration with the recipe's words."""
    words = [f"actor_rollout_ref.model.path={job['model']}", *(f"++actor_rollout_ref.rollout.{word}" for word in SMALL)]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*words, *job["words"]]).actor_rollout_ref


def start(config: Any) -> ActorHandle:
    """What verl's replica starts on a node with GPUs, which it looks for: its server class as an actor."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    from paceline.integrations.verl.server import PacelineServer

    assert get_rollout_replica_class(config.rollout.name).__name__ == "PacelineReplica"

    class ProbedServer(PacelineServer):
        def _get_worker_extension_cls(self) -> str:
            return "forgetful_worker.ForgetfulWorker"

        async def ask_workers(self, method: str) -> list[Any]:
            return await self._ask_workers(method)

        async def drafted(self) -> tuple[float, float]:
            """Rounds of speculation so far, and draft tokens accepted in them, by vLLM's own counters."""
            values = {metric.name: metric.value for metric in get_metrics_snapshot() if hasattr(metric, "value")}
            return values["vllm:spec_decode_num_drafts"], values["vllm:spec_decode_num_accepted_tokens"]

    server = ray.remote(ProbedServer).options(max_concurrency=64)
    return server.remote(
        config=config.rollout,
        model_config=config.model,
        rollout_mode=RolloutMode.HYBRID,
        workers=[],
        replica_rank=0,
        node_rank=0,
        gpus_per_node=1,
        nnodes=1,
        cuda_visible_devices="",
    )


def answer(server: ActorHandle, job: dict, name: str) -> dict:
    """All prompts at once, token in, token out, as verl's agent loops ask."""
    before = ray.get(server.drafted.remote(), timeout=60)
    greedy = {"temperature": 0.0, "max_tokens": job["max_tokens"], "logprobs": True}
    done = ray.get(
        [server.generate.remote(prompt, dict(greedy), f"{name}-{i}") for i, prompt in enumerate(job["prompts"])],
        timeout=600,
    )
    after = ray.get(server.drafted.remote(), timeout=60)
    rounds = after[0] - before[0]
    return {
        "tokens": [list(one.token_ids) for one in done],
        "logprobs": [list(one.log_probs) for one in done],
        "accept_length": 1 + (after[1] - before[1]) / rounds if rounds else 1.0,
        "tuner": ray.get(server.tuner_state.remote(), timeout=60),
    }


def main(job: dict) -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True)
    server = start(configured(job))
    ray.get(server.launch_server.remote(), timeout=600)
    found = {"first": answer(server, job, "first")}
    for name, method in (("forgotten", "paceline_forget_drafter"), ("restored", "paceline_restore_drafter")):
        asked = ray.get(server.ask_workers.remote(method), timeout=120)
        found[name] = answer(server, job, name) | {"tensors": asked}
    for name, folder in job["drafters"].items():
        said = ray.get(server.take_drafter.remote(folder), timeout=120)
        found[name] = answer(server, job, name) | {"said": said}
    Path(job["out"]).write_text(json.dumps(found))
    ray.shutdown()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
