"""From settings that leave something open to settings that do not: what the model and the machine decide. What the
algorithm decides is in `learn.algorithms`, and how much memory KV pages get in `memory`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from paceline.cluster.devices import my_cores
from paceline.config import Config
from paceline.draft.eagle.files import DRAFTER, find_drafter
from paceline.draft.eagle.loss import rate_for_width
from paceline.draft.registry import choose_strategies
from paceline.errors import UserError
from paceline.evaluation.prompts import decided_eval
from paceline.model.config import DecoderConfig
from paceline.model.decoder import as_dtype
from paceline.model.foreign_config import ForeignConfig
from paceline.rollout.pages import default_page_size
from paceline.spot.when import WARM_RATE, when_to_train

LORA_SHAPE = ("learn.lora.rank", "learn.lora.alpha", "learn.lora.targets")
"""What the adapters of a run are, once it has begun."""


def kept_settings(newest: Path | None) -> list[str]:
    """Settings that a resumed run keeps as they were decided at first: another precision or another wording of prompts
    would change what is learned, how many workers there are is for the user to change, and a drafter that the run has
    trained is its own. Everything else is decided again: it follows from these and from the machine."""
    always = ["model.device", "model.dtype", "task.style", "cluster.workers", *LORA_SHAPE]
    return [*always, "speculation.drafter"] if _has_own_drafter(newest) else always


def decide(config: Config, shape: DecoderConfig | ForeignConfig, style: str, newest: Path | None) -> Config:
    """What does not depend on the workers' device. The algorithm and the number of workers must be decided; `newest` is
    the checkpoint that the run goes on from, if there is one."""
    drafter = _drafter(config, newest)
    plain = config.speculation.mode == "plain"
    neural = not plain and (_has_own_drafter(newest) or drafter not in (None, "none"))
    speculation: dict[str, Any] = {"drafter": drafter}
    if config.speculation.strategies is None:
        speculation["strategies"] = [str(one) for one in choose_strategies(config.speculation, neural)]
    spot: dict[str, Any] = {"when": when_to_train(config, neural)}
    if spot["when"] != "off" and config.spot.drafter_lr is None:
        warm = drafter != "new"
        spot["drafter_lr"] = rate_for_width(shape.hidden_size) * (WARM_RATE if warm else 1.0)
    evaluation = decided_eval(config) if config.eval.task else {}
    return _with(config, {"task": {"style": style}, "speculation": speculation, "spot": spot, "eval": evaluation})


def decide_for_device(config: Config, device: torch.device) -> Config:
    """What depends on whether workers have a GPU."""
    c = config.cluster
    r = config.rollout
    cuda = device.type == "cuda"
    model: dict[str, Any] = {"dtype": str(as_dtype(config.model.dtype, device)).removeprefix("torch.")}
    if config.model.device == "auto":
        model["device"] = device.type
    if config.model.threads is None and c.backend == "local":  # the hosts of a Ray cluster may differ
        cores = len(my_cores()) or os.cpu_count() or 1
        alone = cuda or c.workers == 1
        model["threads"] = torch.get_num_threads() if alone else max(1, cores // c.workers)
    page_size = r.page_size or default_page_size(device, min(r.max_batch, r.prompts * r.samples))
    each_a_gpu = cuda and c.workers_per_gpu == 1
    collectives = ("nccl" if each_a_gpu else "gloo") if c.collectives == "auto" else c.collectives
    cluster = {"collectives": collectives}
    return _with(config, {"model": model, "rollout": {"page_size": page_size}, "cluster": cluster})


def _has_own_drafter(newest: Path | None) -> bool:
    return newest is not None and (newest / DRAFTER).is_dir()


def _drafter(config: Config, newest: Path | None) -> str | None:
    name = config.speculation.drafter
    if name != "auto":
        return name
    if config.speculation.mode == "plain":
        return "none"
    try:
        folder = find_drafter(name, config.model.path)
    except UserError:
        if newest is None:
            raise
        # The model that the run began with has gone since, and is not needed; neither is a drafter that lay in it.
        return name if _has_own_drafter(newest) else "none"
    return str(folder.resolve()) if folder else "none"


def _with(config: Config, changes: dict[str, dict[str, Any]]) -> Config:
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    return config.model_copy(update=sections)
