"""What the server asks of its engine when it wakes, with an engine that writes it down: vLLM cannot sleep on a CPU.
Runs in an environment of its own (`make test-verl`):

python wake_verl.py OUT.json
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl.workers.rollout.replica import RolloutMode

from paceline.integrations.verl.server import PacelineServer


class WrittenDown:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.engine_core = self

    def __getattr__(self, name: str) -> Any:
        async def call(*words: Any, **named: Any) -> list[Any]:
            self.calls.append(" ".join([name, *map(str, words)]))
            return []

        return call


def made(mode: RolloutMode) -> PacelineServer:
    server = object.__new__(PacelineServer)
    server.engine = WrittenDown()
    server.node_rank = 0
    server.replica_rank = 0
    server.rollout_mode = mode
    server.config = SimpleNamespace(free_cache_engine=True, mtp=None)
    server.model_config = SimpleNamespace(lora_rank=0, lora={})
    return server


def asked(action: str, mode: RolloutMode, *words: Any) -> list[str]:
    server = made(mode)
    asyncio.run(getattr(server, action)(*words))
    return server.engine.calls


async def taken() -> list[str | None]:
    """What the server says to a new drafter: awake, asleep, and awake again."""
    server = made(RolloutMode.HYBRID)
    said = [await server.take_drafter("NEW")]
    await server.sleep()
    said.append(await server.take_drafter("NEW"))
    await server.wake_up(["kv_cache"])
    said.append(await server.take_drafter("NEW"))
    await server.wake_up(["weights"])
    return [*said, await server.take_drafter("NEW")]


if __name__ == "__main__":
    found = {
        "weights": asked("wake_up", RolloutMode.HYBRID, ["weights"]),
        "kv_cache": asked("wake_up", RolloutMode.HYBRID, ["kv_cache"]),
        "everything": asked("wake_up", RolloutMode.HYBRID),
        "colocated": asked("wake_up", RolloutMode.COLOCATED),
        "standalone": asked("wake_up", RolloutMode.STANDALONE),
        "release": asked("release_kv_cache", RolloutMode.STANDALONE),
        "take": asked("take_drafter", RolloutMode.HYBRID, "NEW"),
        "said": asyncio.run(taken()),
    }
    Path(sys.argv[1]).write_text(json.dumps(found))
