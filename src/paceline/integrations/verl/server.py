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

    _dropped = False  # the weights, by sleep

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        complete(engine_kwargs, self.config)

    def _get_worker_extension_cls(self) -> str:
        return WORKER

    async def run_server(self, args: Any) -> None:
        await super().run_server(args)
        await self._ask_workers("paceline_keep_drafter")

    async def sleep(self) -> None:
        self._dropped = self.config.free_cache_engine and self.rollout_mode != RolloutMode.STANDALONE
        await super().sleep()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await super().wake_up(tags)
        if tags is not None and "weights" not in tags:
            return
        if self.rollout_mode == RolloutMode.HYBRID:
            await self._ask_workers("paceline_restore_drafter")
        self._dropped = False

    async def release_kv_cache(self) -> None:
        """Sleeps and wakes at once, so that the weights are dropped here too."""
        await super().release_kv_cache()
        if self.config.free_cache_engine and self.rollout_mode != RolloutMode.COLOCATED:
            await self._ask_workers("paceline_restore_drafter")

    async def take_drafter(self, folder: str) -> str | None:
        """Exchange the drafter by the one in this folder, between two steps: no request notices -> None; or why not,
        with the one before still in place."""
        if self._dropped:
            return f"the engine of rollout replica {self.replica_rank} sleeps: give it {folder} when it is awake"
        said = await self._ask_workers("paceline_load_drafter", folder)
        problem: str | None = next((one for one in said if one is not None), None)
        if problem is not None:
            await self._ask_workers("paceline_restore_drafter")  # workers must not draft with different ones
            return problem
        await self._ask_workers("paceline_keep_drafter")
        await self.engine.engine_core.call_utility_async("paceline_drafter_changed")
        return None

    async def tuner_state(self) -> dict[str, Any] | None:
        """What this engine's tuner has found, None where it is off."""
        found: dict[str, Any] | None = await self.engine.engine_core.call_utility_async("paceline_tuner_state")
        return found

    async def _ask_workers(self, method: str, *words: str) -> list[Any]:
        if self.node_rank != 0:
            return []
        try:
            return await self.engine.collective_rpc(method, timeout=KEEP_S, args=words)
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

    async def take_drafter(self, folder: str) -> str | None:
        """Of the replica's engine; see the server's."""
        answer: str | None = await self.servers[0].take_drafter.remote(folder)
        return answer
