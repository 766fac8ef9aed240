"""Power grids: which single outages overload a line or break a voltage limit, judged by AC power flows (pandapower)."""

from paceline.tasks.grid.task import Grid

__all__ = ["Grid"]
