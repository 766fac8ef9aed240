"""verl's vLLM server with Paceline's scheduler, and with a drafter that outlives sleep.

While the policy is trained, verl lets its engine sleep at level 2: all weights are dropped, and the trainer sends those
of the policy afterwards. Nobody sends those of the drafter, so the workers keep them on the host.
"""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from paceline.errors import RunError
from paceline.integrations.verl.settings import complete

WORKER = "paceline.integrations.verl.worker.DrafterBackup"
KEEP_S = 300.0
"""Seconds in which the workers have copied a drafter, to the host or back."""


class PacelineServer(vLLMHttpServer):
    """One engine."""

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        complete(engine_kwargs, self.config)

    def _get_worker_extension_cls(self) -> str:
        return WORKER

    async def run_server(self, args: Any) -> None:
        await super().run_server(args)
        await self._ask_workers("paceline_keep_drafter")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await super().wake_up(tags)
        if self.rollout_mode == RolloutMode.HYBRID and (tags is None or "weights" in tags):
            await self._ask_workers("paceline_restore_drafter")

    async def release_kv_cache(self) -> None:
        """Sleeps and wakes at once, so that the weights are dropped here too."""
        await super().release_kv_cache()
        if self.config.free_cache_engine and self.rollout_mode != RolloutMode.COLOCATED:
            await self._ask_workers("paceline_restore_drafter")

    async def tuner_state(self) -> dict[str, Any] | None:
        """What this engine's tuner has found, None where it is off."""
        found: dict[str, Any] | None = await self.engine.engine_core.call_utility_async("paceline_tuner_state")
        return found

    async def _ask_workers(self, method: str) -> list[Any]:
        if self.node_rank != 0:
            return []
        try:
            return await self.engine.collective_rpc(method, timeout=KEEP_S)
        except TimeoutError as err:
            raise RunError(
                f"a worker of rollout replica {self.replica_rank} did not answer {method} within {KEEP_S:.0f} s; see "
                "vLLM's log above"
            ) from err


class PacelineReplica(vLLMReplica):
    """A rollout replica: verl's own, with that server."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(PacelineServer)
