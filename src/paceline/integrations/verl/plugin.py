"""What verl imports when it is imported itself (entry point `verl.plugins`): from then on it knows
`rollout.name=paceline`. Nothing else changes."""

from __future__ import annotations

import logging
from typing import Any

from paceline.integrations.verl.settings import ROLLOUT

ADAPTER = "verl.workers.rollout.vllm_rollout.ServerAdapter"
"""What sends the trainer's weights to the engine: verl's own."""
log = logging.getLogger("verl.paceline")


def register() -> None:
    try:
        from verl.workers.rollout.base import _ROLLOUT_REGISTRY
        from verl.workers.rollout.replica import RolloutReplicaRegistry
    except ImportError as err:  # verl itself would tell it at a level that nobody sees
        log.warning("Paceline's plug-in does not fit this verl, so rollout.name=%s is not known: %s", ROLLOUT, err)
        return
    RolloutReplicaRegistry.register(ROLLOUT, load_replica)
    _ROLLOUT_REGISTRY[ROLLOUT, "async"] = ADAPTER


def load_replica() -> Any:
    """vLLM is imported only by those who choose this rollout."""
    from paceline.integrations.verl.server import PacelineReplica

    return PacelineReplica


register()  # verl imports what an entry point names, and calls nothing
