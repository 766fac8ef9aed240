"""IEEE cases under load and outages: an AC power flow, and how far beyond its limits it is.

Of the cases that pandapower ships only the one of 30 buses has ratings that mean something; the others have lines for
thousands of amperes. So limits come from the base flow: a branch may carry so many times its own current there, but
never less than if that were `FLOOR` times the median of all branches, and a bus may be so far from its own voltage
(`LIMITS`). Where the case has ratings they hold, unless the base flow breaks them already.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UserError

Floats = NDArray[np.float64]

CASES = (14, 30, 57, 118)
RATED = (30,)
"""Cases whose own ratings hold."""
LIMITS = {14: (2.6, 0.05), 30: (1.05, 0.045), 57: (2.6, 0.11), 118: (2.4, 0.04)}
"""Of each case: how many times its current in the base flow a branch may carry, and how far, in per unit, the voltage
of a bus may be from that in the base flow. A fifth to two fifths of the outages that are asked about break one."""
FLOOR = 0.5
COLLAPSE = 200.0
"""Percent: a power flow without a solution counts as a loading of this, and a loading above it as this."""


@dataclass(frozen=True)
class Flow:
    """The worst of an AC power flow, in percent of what is allowed: above 100 a limit is broken."""

    loading: float
    """Of the branch that is loaded most."""
    branch: str
    voltage: float
    """100 where a bus is as far from its voltage in the base flow as it may be."""
    bus: int

    @property
    def severity(self) -> float:
        return min(COLLAPSE, max(self.loading, self.voltage))

    @property
    def breaks(self) -> bool:
        return self.severity > 100.0


class Network:
    """One of the cases. Its lines are called by their buses: 4-5."""

    def __init__(self, case: int):
        power = _library("pandapower")
        self.case = case
        self._power = power
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._net: Any = getattr(_library("pandapower.networks"), f"case{case}")()
            power.runpp(self._net, numba=False)
        net = self._net
        self._load: tuple[Floats, Floats] = (net.load.p_mw.to_numpy(copy=True), net.load.q_mvar.to_numpy(copy=True))
        self._generation: Floats = net.gen.p_mw.to_numpy(copy=True)
        self._voltage: Floats = net.res_bus.vm_pu.to_numpy(copy=True)
        self.branches = [f"{a}-{b}" for a, b in self._ends()]
        current = self._current()
        margin, self.band = LIMITS[case]
        limits = margin * np.maximum(current, FLOOR * float(np.median(current)))
        if case in RATED:
            limits = np.maximum(net.line.max_i_ka.to_numpy(), margin * current)
        self._limits: Floats = limits

    @property
    def loads(self) -> int:
        return len(self._load[0])

    def _ends(self) -> list[tuple[int, int]]:
        lines = zip(self._net.line.from_bus, self._net.line.to_bus, strict=True)
        transformers = zip(self._net.trafo.hv_bus, self._net.trafo.lv_bus, strict=True)
        return [(int(a) + 1, int(b) + 1) for a, b in (*lines, *transformers)]

    def outages(self) -> list[str]:
        """Lines that can go without an island: not those whose bus ends hang on them, nor one of two in parallel."""
        lines = self.branches[: len(self._net.line)]
        unique = [name for name in lines if self.branches.count(name) == 1]
        return [name for name in unique if self.connected((name,))]

    def connected(self, out: tuple[str, ...]) -> bool:
        """Whether all buses hang together without these branches."""
        neighbours: dict[int, set[int]] = {}
        for name, (a, b) in zip(self.branches, self._ends(), strict=True):
            if name not in out:
                neighbours.setdefault(a, set()).add(b)
                neighbours.setdefault(b, set()).add(a)
        reached = {1}
        edge = [1]
        while edge:
            for bus in neighbours.get(edge.pop(), set()) - reached:
                reached.add(bus)
                edge.append(bus)
        return len(reached) == len(self._net.bus)

    def loadings(self, scale: Floats, out: tuple[str, ...] = ()) -> dict[str, float]:
        """Of every branch, in percent of its limit; empty if there is no solution."""
        if not self._run(scale, out):
            return {}
        return dict(zip(self.branches, (100.0 * self._current() / self._limits).tolist(), strict=True))

    def flow(self, scale: Floats, out: tuple[str, ...]) -> Flow:
        """With each load times its `scale`, and without the lines `out`."""
        if not self._run(scale, out):
            return Flow(COLLAPSE, "none", COLLAPSE, 0)
        loading = 100.0 * self._current() / self._limits
        away = 100.0 * np.abs(self._net.res_bus.vm_pu.to_numpy() - self._voltage) / self.band
        branch = int(np.argmax(loading))
        bus = int(np.argmax(away))
        return Flow(float(loading[branch]), self.branches[branch], float(away[bus]), bus + 1)

    def _run(self, scale: Floats, out: tuple[str, ...]) -> bool:
        net = self._net
        net.load["p_mw"] = self._load[0] * scale
        net.load["q_mvar"] = self._load[1] * scale
        net.gen["p_mw"] = self._generation * float(np.average(scale, weights=np.abs(self._load[0]) + 1e-9))
        net.line["in_service"] = [name not in out for name in self.branches[: len(net.line)]]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._power.runpp(net, numba=False, max_iteration=20)
        except self._power.LoadflowNotConverged:
            return False
        return bool(np.isfinite(net.res_bus.vm_pu.to_numpy()).all())

    def _current(self) -> Floats:
        net = self._net
        both = (net.res_line.i_ka.to_numpy(), net.res_trafo.i_hv_ka.to_numpy())
        return np.nan_to_num(np.concatenate(both))


@cache
def network(case: int) -> Network:
    return Network(case)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as err:
        raise UserError("grid tasks need pandapower: pip install 'paceline[grid]'") from err
