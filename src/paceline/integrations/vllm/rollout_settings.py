"""What a vLLM engine is started with to roll out for a trainer: Paceline's settings in vLLM's words."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import paceline
from paceline.draft.strategy import Strategy
from paceline.errors import UserError
from paceline.integrations.vllm.internals import METHOD
from paceline.integrations.vllm.options import SCHEDULER
from paceline.integrations.vllm.settings import SAME_TOKENS
from paceline.model.checkpoint import find_model
from paceline.setup.build import engine_settings

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.core import Request, SamplingParams
    from paceline.setup.engines import EngineSetup

EXTENSION = "paceline.integrations.vllm.rollout_worker.RolloutWorker"
CPU_KV_GB = 1  # for KV pages on a CPU, unless rollout.kv_memory_gb or VLLM_CPU_KVCACHE_SPACE says another number
FREE_SHARE = 0.9  # of what is free when the engine starts: the rest is for the learner's temporaries and the runtime
AWAKE_SHARE = 0.5  # the same where the engine does not sleep while the policy is updated
DEPTH = 7  # deepest draft of the tuner, unless speculation.strategies names others
COMPLETE = "config.json"  # copied last
COPIED = (".json", ".txt", ".model", ".jinja")
"""Files of a model that are not its weights."""
INSTALLED = ("site-packages", "dist-packages")
"""Folders that hold other packages too: another Python must not see those of this one."""
TAKEN = ("model", "worker_extension_cls", "logprobs_mode", "skip_tokenizer_init", "generation_config", "seed")
"""Arguments of vLLM's engine that are not the user's to set: the loop depends on them."""


def engine_arguments(setup: EngineSetup, drafter: Path | None, tuner_state: Path | None) -> dict[str, Any]:
    """Of vLLM's `EngineArgs`; `drafter` is the folder of one if there is speculation."""
    config = setup.config
    given = dict(config.rollout.vllm)
    wrong = [name for name in TAKEN if name in given]
    if wrong:
        raise UserError(f"rollout.vllm has '{wrong[0]}', which Paceline sets itself: leave it out")
    cuda = setup.model.device.type == "cuda"
    settings = engine_settings(config, setup.model.device)
    arguments: dict[str, Any] = {
        "model": str(model_folder(setup)),
        "load_format": "dummy",  # all weights are the learner's
        "dtype": str(setup.model.dtype).removeprefix("torch."),
        "seed": config.seed % 2**32,
        "max_num_seqs": settings.max_batch,
        "max_num_batched_tokens": max(config.rollout.prefill_tokens, settings.max_batch * (DEPTH + 1)),
        "skip_tokenizer_init": not config.rollout.stop,
        "generation_config": "vllm",  # temperature and filters are the request's
        "logprobs_mode": logprobs_mode(config),
        "worker_extension_cls": EXTENSION,
        "enforce_eager": not config.rollout.cuda_graphs,
        "disable_log_stats": drafter is None,  # accepted draft tokens are among them
    }
    if settings.max_length is not None:
        arguments["max_model_len"] = min(settings.max_length, setup.model.config.max_positions)
    if cuda:
        arguments["enable_sleep_mode"] = True
        if config.rollout.kv_memory_gb:
            arguments["kv_cache_memory_bytes"] = int(config.rollout.kv_memory_gb * 1e9)
        else:
            sleeps = given.get("enable_sleep_mode", True)
            arguments["gpu_memory_utilization"] = free_share(setup.model.device, sleeps)
    ours: dict[str, Any] = {SAME_TOKENS: True}  # speculation changes no token, as in our own engine
    arguments["additional_config"] = {"paceline": ours}
    if drafter is not None:
        if tuner_state is not None:
            ours["state"] = str(tuner_state)
        arguments |= {
            "scheduler_cls": SCHEDULER,
            "speculative_config": {"method": METHOD, "model": str(drafter), "num_speculative_tokens": depth(config)},
        }
    return arguments | given


def model_folder(setup: EngineSetup) -> Path:
    """Where vLLM finds the config and the tokenizer: a copy in the run directory. A checkpoint that the run went on
    from has other weights besides the policy's, and may be gone when the engine has to be started again."""
    folder = setup.run / f"vllm-model-{setup.worker}" if setup.run else None
    if folder is not None and (folder / COMPLETE).is_file():
        return folder.resolve()
    source = find_model(setup.source)
    if folder is None:
        return source.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(source.iterdir()):
            if file.suffix in COPIED and file.is_file() and file.name != COMPLETE:
                shutil.copyfile(file, folder / file.name)
        shutil.copyfile(source / COMPLETE, folder / COMPLETE)
    except OSError as err:
        raise UserError(f"the config of the model could not be copied to {folder} for vLLM: {err}") from err
    return folder.resolve()


def free_share(device: torch.device, sleeps: bool) -> float:
    """Share of the whole GPU that the engine may take, rounded down."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(100 * (FREE_SHARE if sleeps else AWAKE_SHARE) * free / total) / 100


def environment(setup: EngineSetup) -> dict[str, str]:
    """Variables of the engine's process."""
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    source = Path(paceline.__file__).parents[1]
    if setup.config.rollout.vllm_python and source.name not in INSTALLED:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))
    device = setup.model.device
    if device.type == "cuda":
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(_learners_first(device.index or 0))
        return variables
    threads = setup.config.model.threads
    wanted = {
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(setup.config.rollout.kv_memory_gb or CPU_KV_GB))),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines would bind theirs to the same cores
        **({"OMP_NUM_THREADS": str(threads)} if threads else {}),
    }
    return variables | {name: value for name, value in wanted.items() if name not in os.environ}


def _learners_first(index: int) -> list[str]:
    """The GPUs that this process sees, the learner's before the others."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    return [devices[index], *devices[:index], *devices[index + 1 :]]


def logprobs_mode(config: Config) -> str:
    """What a learner compares with are log-probabilities at the temperature of sampling. vLLM has them before the
    temperature or behind it and all filters."""
    return "raw_logprobs" if config.rollout.temperature in (0, 1) else "processed_logprobs"


def depth(config: Config) -> int:
    named = [Strategy.parse(one).depth for one in config.speculation.strategies or [] if one.startswith("neural:")]
    return max(named, default=DEPTH)


def sampling_of(request: Request, max_length: int) -> dict[str, Any]:
    """Of vLLM's `SamplingParams`."""
    s: SamplingParams = request.sampling
    return {
        "temperature": s.temperature,
        "top_k": s.top_k,
        "top_p": s.top_p,
        "min_p": s.min_p,
        "max_tokens": min(s.max_tokens, max_length - len(request.prompt)),
        "min_tokens": s.min_tokens,
        "stop_token_ids": list(s.stop_token_ids),
        "stop": list(s.stop) or None,
        "include_stop_str_in_output": True,
        "ignore_eos": True,  # the tokens above say where completions end
        "detokenize": bool(s.stop),
        "skip_special_tokens": False,
        "logprobs": 0,  # of the token that was drawn
    }


def needs_race(setup: EngineSetup) -> bool:
    """Whether vLLM would draw wrongly with speculation, if it were not by race."""
    return setup.model.device.type == "cpu" and setup.config.rollout.temperature > 0


def without_speculation(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in ("speculative_config", "scheduler_cls")}
