"""Drafting: drafters, the strategies that use them, and the tuner that picks one."""
