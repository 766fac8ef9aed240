"""From settings to workers: how many, where, over which transport."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cluster.cluster import Cluster
from paceline.cluster.messages import WorkerSpec
from paceline.cluster.transport import load_transport
from paceline.model.checkpoint import EMBEDDED

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.run import Run

LOG = "workers.log"


def make_cluster(config: Config, run: Run, note: Callable[[str], None], learns: bool = True) -> Cluster:
    """Workers for a run, not started yet. Unless it `learns` they only decode."""
    c = config.cluster
    folder = run.folder
    name = "in_process" if c.backend == "local" and c.workers == 1 else c.backend
    transport = load_transport(name)(config, folder / LOG)
    devices = transport.devices
    core_sets = transport.core_sets
    threads = config.model.threads
    if threads is None and devices[0] == "cpu" and c.workers > 1:  # more threads than cores would only wait in turns
        threads = max(1, len(core_sets[0]) or transport.cores // c.workers)

    def make_spec(worker: int, generation: int) -> WorkerSpec:
        state = run.newest_checkpoint()
        state = state and state.resolve()  # actors have a working directory of their own
        model = Path(config.model.path)
        local = config.model.path != "embedded" and model.is_dir()
        base = str(model.resolve() if local else model)
        return WorkerSpec(
            worker,
            generation,
            c.workers,
            source=str(state) if state else base,
            state=state,
            device=devices[worker],
            run=folder.resolve(),
            sharing=c.workers_per_gpu if devices[worker] != "cpu" else 1,
            threads=threads,
            cores=core_sets[worker],
            learns=learns,
            base=str(EMBEDDED) if base == "embedded" else base,
        )

    return Cluster(config, transport, make_spec, note, _collectives(config, devices[0]), run.write_error)


def _collectives(config: Config, device: str) -> str:
    c = config.cluster
    if c.collectives != "auto":
        return c.collectives
    return "nccl" if device.startswith("cuda") and c.workers_per_gpu == 1 else "gloo"
