"""The rollout engine: requests in, completions out as they finish, the same tokens whatever happens in between."""

from paceline.rollout.engine import Engine, EngineSettings
from paceline.rollout.request import Completion, Request, Sampling

__all__ = ["Completion", "Engine", "EngineSettings", "Request", "Sampling"]
