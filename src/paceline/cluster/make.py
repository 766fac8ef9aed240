"""From settings to workers: how many, where, over which transport."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from paceline.cluster.cluster import Cluster
from paceline.cluster.local import LocalProcesses, my_cores
from paceline.cluster.messages import WorkerSpec
from paceline.cluster.transport import InProcess, Transport
from paceline.config import Config
from paceline.errors import UserError
from paceline.run import Run
from paceline.setup.build import choose_device

LOG = "workers.log"


def make_cluster(config: Config, run: Run, note: Callable[[str], None]) -> Cluster:
    """Workers for a run, not started yet."""
    c = config.cluster
    folder = run.folder
    transport: Transport
    if c.backend == "ray":
        from paceline.cluster.ray_actors import RayActors, choose_ray_device

        transport = RayActors(config)
        kind = choose_ray_device(config)
        devices = [kind] * c.workers
    elif c.workers == 1:
        transport, devices = InProcess(config), [str(choose_device(config.model.device))]
    else:
        transport, devices = LocalProcesses(config, folder / LOG), choose_devices(config)
    cores = _core_groups(config) if devices[0] == "cpu" and c.backend == "local" else [()] * c.workers
    threads = config.model.threads
    if threads is None and devices[0] == "cpu" and c.workers > 1:  # more threads than cores would only wait in turns
        threads = max(1, len(cores[0]) or transport.cores // c.workers)

    def post(worker: int, life: int) -> WorkerSpec:
        state = run.newest_checkpoint()
        state = state and state.resolve()  # actors have a working directory of their own
        model = Path(config.model.path)
        local = config.model.path != "embedded" and model.is_dir()
        return WorkerSpec(
            worker,
            life,
            c.workers,
            source=str(state or (model.resolve() if local else model)),
            state=state,
            device=devices[worker],
            run=folder.resolve(),
            sharing=c.workers_per_gpu if devices[worker] != "cpu" else 1,
            threads=threads,
            cores=cores[worker],
        )

    return Cluster(config, transport, post, note, _collectives(config, devices[0]), run.write_error)


def choose_workers(config: Config) -> Config:
    """The config with a number of workers that suits the machine, where it leaves that open."""
    c = config.cluster
    if c.workers:
        return config
    device = choose_device(config.model.device)
    if device.type == "cpu":
        count = 2 if len(my_cores()) > 1 else 1
    else:
        count = c.workers_per_gpu * (torch.cuda.device_count() if device.index is None else 1)
    return config.model_copy(update={"cluster": c.model_copy(update={"workers": count})})


def choose_devices(config: Config) -> list[str]:
    """A device for every worker on this machine."""
    c, device = config.cluster, choose_device(config.model.device)
    if device.type == "cpu":
        return ["cpu"] * c.workers
    gpus = [device.index] if device.index is not None else list(range(torch.cuda.device_count()))
    if c.workers > len(gpus) * c.workers_per_gpu:
        raise UserError(
            f"cluster.workers={c.workers}, but this machine has {len(gpus)} GPU{'s' if len(gpus) != 1 else ''} for "
            f"{c.workers_per_gpu} each: lower it, set cluster.workers_per_gpu, or model.device=cpu"
        )
    return [f"cuda:{gpus[worker // c.workers_per_gpu]}" for worker in range(c.workers)]


def _core_groups(config: Config) -> list[tuple[int, ...]]:
    """The cores of each worker; none where there are not enough to give everybody its own, or nobody to share with."""
    workers = config.cluster.workers
    cores = my_cores()
    if workers == 1 or len(cores) < workers:
        return [()] * workers
    each = len(cores) // workers
    return [tuple(cores[w * each : (w + 1) * each]) for w in range(workers)]


def _collectives(config: Config, device: str) -> str:
    c = config.cluster
    if c.collectives != "auto":
        return c.collectives
    return "nccl" if device.startswith("cuda") and c.workers_per_gpu == 1 else "gloo"
