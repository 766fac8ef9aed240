"""What this machine has for workers: how many suit it, and which device and CPU cores each gets."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from paceline.errors import UserError
from paceline.setup.device import choose_device

if TYPE_CHECKING:
    from paceline.config import Config


def my_cores() -> list[int]:
    """The cores that this process may use; none where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


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
    c = config.cluster
    device = choose_device(config.model.device)
    if device.type == "cpu":
        return ["cpu"] * c.workers
    gpus = [device.index] if device.index is not None else list(range(torch.cuda.device_count()))
    if c.workers > len(gpus) * c.workers_per_gpu:
        raise UserError(
            f"cluster.workers={c.workers}, but this machine has {len(gpus)} GPU{'s' if len(gpus) != 1 else ''} for "
            f"{c.workers_per_gpu} each: lower it, set cluster.workers_per_gpu, or model.device=cpu"
        )
    return [f"cuda:{gpus[worker // c.workers_per_gpu]}" for worker in range(c.workers)]


def choose_cores(config: Config) -> list[tuple[int, ...]]:
    """The cores of each worker on this machine; none where there are not enough to give everybody its own."""
    workers = config.cluster.workers
    cores = my_cores()
    if len(cores) < workers:
        return [()] * workers
    each = len(cores) // workers
    return [tuple(cores[w * each : (w + 1) * each]) for w in range(workers)]
