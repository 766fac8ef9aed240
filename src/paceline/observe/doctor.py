"""`paceline doctor`: the hardware and packages of this machine, and what Paceline uses them for."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
from dataclasses import dataclass

import torch

from paceline.process.waiting import measure_use
from paceline.setup.machine import machine_memory

OPTIONAL_PACKAGES = {
    "ray": ("workers on several machines", "paceline[ray]"),
    "trl": ("use inside TRL", "paceline[trl]"),
    "math_verify": ("the math reward", "paceline[math]"),
    "reasoning_gym": ("tasks gym:NAME", "paceline[gym]"),
    "datasets": ("tasks hub:ID", "paceline[hub]"),
    "wandb": ("log.wandb", "paceline[track]"),
    "trackio": ("log.trackio", "paceline[track]"),
    "pynvml": ("GPU energy", "paceline[gpu]"),
}


@dataclass(frozen=True)
class Finding:
    name: str
    found: str
    used_for: str
    good: bool = True


def check_machine() -> list[Finding]:
    return [*_machine(), *_gpus(), *_packages()]


def _machine() -> list[Finding]:
    threads = torch.get_num_threads()
    free = shutil.disk_usage(".").free / 1e9
    memory = machine_memory() / 1e9
    return [
        Finding("python", platform.python_version(), "runs Paceline"),
        Finding("torch", torch.__version__, "policy, rollout engine, learner"),
        Finding(
            "CPU",
            f"{os.cpu_count()} cores, {threads} threads",
            "rewards; decoding and learning without a GPU",
        ),
        _load(),
        Finding("memory", f"{memory:.0f} GB", "KV pages take at most 2 GB of it without a GPU"),
        Finding("disk here", f"{free:.0f} GB free", "checkpoints under runs/", free > 2),
    ]


def _load() -> Finding:
    use = measure_use()
    if use.shared:
        how = "shared with others: threads wait passively (OMP_WAIT_POLICY), else they would slow each other down"
        return Finding("CPU load", use.describe(), how, False)
    return Finding("CPU load", use.describe(), "threads of one process may spin while they wait")


def _gpus() -> list[Finding]:
    if not torch.cuda.is_available():
        return [Finding("GPU", "none that CUDA can use", "everything runs on the CPU, in float32", False)]
    out = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        name = f"{p.name}, {p.total_memory / 1e9:.0f} GB, {p.multi_processor_count} SMs"
        bf16 = torch.cuda.is_bf16_supported()
        out.append(Finding(f"GPU {i}", name, "bfloat16, CUDA graphs" if bf16 else "no bfloat16: use float32", bf16))
    try:
        version = importlib.metadata.version("triton")
        out.append(Finding("triton", version, "kernels on the GPU: paged attention, sampling, matmuls"))
    except importlib.metadata.PackageNotFoundError:
        out.append(Finding("triton", "missing", "needed on a GPU: pip install triton", False))
    return out


def _packages() -> list[Finding]:
    out = []
    for module, (use, extra) in OPTIONAL_PACKAGES.items():
        try:
            # Found is not enough: a package can be there and broken.
            importlib.import_module(module)
            found = importlib.metadata.version(_distribution(module))
            out.append(Finding(module, found, use))
        except ImportError:
            out.append(Finding(module, "not installed", f"{use}: pip install '{extra}'", False))
        except Exception as err:  # noqa: BLE001 (whatever it is, it is the finding)
            out.append(Finding(module, f"broken: {type(err).__name__}: {err}", use, False))
    return out


def _distribution(module: str) -> str:
    return {"math_verify": "math-verify", "reasoning_gym": "reasoning-gym", "pynvml": "nvidia-ml-py"}.get(
        module, module
    )
