"""The rollout engine: requests in, completions out as they finish, the same tokens whatever happens in between."""

from paceline.rollout.engine import EngineSettings, RolloutEngine

__all__ = ["EngineSettings", "RolloutEngine"]
