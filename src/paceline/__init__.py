"""Paceline: reinforcement learning for reasoning language models without waiting for the slowest answer."""

from paceline.version import __version__

__all__ = ["__version__"]
