"""Paceline inside verl: its tuner as the scheduler of verl's vLLM rollout, with a drafter that outlives sleep.

`pip install paceline` beside verl makes `actor_rollout_ref.rollout.name=paceline` known. See docs/verl.md.
"""

from __future__ import annotations

from paceline.integrations.verl.settings import hydra_overrides, rollout_settings

__all__ = ["hydra_overrides", "rollout_settings"]
