"""Guessing ahead: drafters, the strategies that use them, and the tuner that picks one."""
