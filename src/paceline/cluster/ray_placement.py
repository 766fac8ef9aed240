"""Which host of a Ray cluster a worker goes to: spread over all, and away from those that cannot be reached."""

from __future__ import annotations

from typing import Any

from paceline.cluster.addresses import why_unreachable
from paceline.errors import UserError

READY_S = 30.0  # seconds in which a cluster with room has set it aside
HOST_PROBE_S = 1.0  # seconds in which a living host accepts a connection
SHARES = (1.0, 0.5, 0.25, 0.1, 0.01)  # CPUs to ask for each worker: only so that they are spread, so less will do


class Placement:
    """A bundle of a placement group for each worker."""

    def __init__(self, ray: Any, workers: int, gpus: float):
        """`gpus` is a worker's share of one, or 0."""
        from ray.util.placement_group import placement_group

        self._ray = ray
        self._gpus = gpus
        bundle = {"GPU": gpus} if gpus else {"CPU": self._cpu_share(workers)}
        self._group = None
        if not all(bundle.values()):  # a cluster without CPUs to give: Ray spreads them as well as it can
            return
        self._group = placement_group([bundle] * workers, strategy="SPREAD")
        if not self._group.wait(READY_S):
            self.remove()
            what, amount = next(iter(bundle.items()))
            raise UserError(
                f"the Ray cluster has had no room for {workers} workers with {amount:g} {what} each within "
                f"{READY_S:.0f} s; it has {self._describe(what)}: "
                "wait for other jobs, add hosts, or lower cluster.workers"
            )

    def options(self, worker: int, again: bool) -> dict[str, Any]:
        """For the actor of a worker. One that is started `again` goes to another host if its own is gone."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": self._gpus, "scheduling_strategy": "SPREAD"}
        bundle = self._bundle_node(worker)
        if self._group is not None and (not again or (bundle and self._reachable(bundle))):
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=worker
            )
        elif not self._gpus:
            nodes = [n for n in self._nodes() if n["NodeID"] != bundle and self._reachable(n["NodeID"])]
            if nodes:
                node = nodes[worker % len(nodes)]["NodeID"]
                options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=True)
        return options

    def remove(self) -> None:
        from ray.util.placement_group import remove_placement_group

        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _cpu_share(self, workers: int) -> float:
        """The most that every worker can have."""
        cpus = [n["Resources"].get("CPU", 0.0) for n in self._nodes()]
        fitting = [share for share in SHARES if sum(int(c / share) for c in cpus) >= workers]
        return fitting[0] if fitting else 0.0

    def _bundle_node(self, worker: int) -> str | None:
        """Where Ray keeps the worker's bundle at present: it moves those of hosts that it knows to be dead."""
        from ray.util.placement_group import placement_group_table

        if self._group is None:
            return None
        table = placement_group_table(self._group)
        return table["bundles_to_node_id"].get(worker) if table["state"] == "CREATED" else None

    def _reachable(self, node_id: str) -> bool:
        """Ray takes up to a minute to notice that a host is gone."""
        nodes = [n for n in self._nodes() if n["NodeID"] == node_id]
        return any(
            why_unreachable((n["NodeManagerAddress"], n["NodeManagerPort"]), HOST_PROBE_S) is None for n in nodes
        )

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _describe(self, what: str) -> str:
        rows = [f"{n['Resources'].get(what, 0):g} at {n['NodeManagerAddress']}" for n in self._nodes()]
        free = self._ray.available_resources().get(what, 0)
        return f"{', '.join(rows)} ({what}; {free:g} free)"
