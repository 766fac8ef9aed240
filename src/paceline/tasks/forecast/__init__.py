"""Forecasting as a task: a distribution of tomorrow's return and its volatility regime, from a window of the past,
rewarded by proper scoring rules."""

from paceline.tasks.forecast.task import Forecast

__all__ = ["Forecast"]
