"""What a run will need of a device's memory, planned before it starts.

Weights, gradients, optimizer, drafter, KV pages, graphs and activations share one budget. Each part says its own bytes
(`learn.memory`, `rollout.memory`, `spot.memory`, `setup.drafter_memory`), so the plan is their sum. All but the KV
pages have a size that follows from the settings; KV pages get what is left, up to what the batch can use. A run that
does not fit is refused with the settings that would make it fit (`setup.memory_fit`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from rich.table import Table

from paceline.cluster.devices import choose_workers
from paceline.draft import registry
from paceline.draft.base import MemoryRequest
from paceline.errors import UserError
from paceline.learn.algorithms import resolve
from paceline.learn.memory import learner_parts, learner_pass_bytes, update_bytes
from paceline.lora.memory import base_on_host, choose_base, with_base
from paceline.lora.start import decide_lora
from paceline.model.checkpoint import find_model, read_config
from paceline.model.decoder import Decoder, as_dtype
from paceline.rollout.memory import graph_bytes, kv_capacity, plan_kv, prefill_bytes, sampling_bytes
from paceline.rollout.pages import default_page_size
from paceline.setup.build import engine_settings, longest_completion
from paceline.setup.device import choose_device
from paceline.setup.machine import machine_memory
from paceline.setup.memory_fit import DEFAULT_PROMPT_TOKENS, check_base, check_fit
from paceline.spot.memory import drafter_training_bytes
from paceline.spot.when import when_to_train

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.model.config import DecoderConfig

GPU_RESERVE = 2 * 10**9  # bytes for the runtime and its libraries
CPU_RESERVE = 5 * 10**8  # the same of each worker
GPU_FRAGMENTS = 0.03  # of a GPU, that no allocation fits into
SETTINGS_OF = {
    "weights": "model.path, model.dtype",
    "gradients": "as what is trained: the weights, or the adapters",
    "optimizer": "learn.optimizer_dtype, learn.master_weights",
    "reference": "learn.kl_coef",
    "base": "learn.lora.base",
    "adapters": "learn.lora.rank, learn.lora.targets",
    "passes": "learn.micro_tokens, learn.activation_checkpointing, rollout.prefill_tokens",
    "graphs": "speculation.graph_memory_gb, rollout.max_batch",
    "drafter": "speculation.drafter",
    "drafter training": "spot.when",
    "reserve": "the runtime and its libraries",
    "KV pages": "rollout.kv_memory_gb, or what is left",
}
"""What each part of a plan follows from."""


@dataclass(frozen=True)
class DeviceMemory:
    """A device that workers share."""

    name: str
    bytes: int
    cuda: bool
    sharing: int = 1
    """Workers on it."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.cuda else "cpu")

    @property
    def reserve(self) -> int:
        return int(GPU_RESERVE + GPU_FRAGMENTS * self.bytes) if self.cuda else CPU_RESERVE * self.sharing


@dataclass(frozen=True)
class MemoryPlan:
    memory: DeviceMemory
    parts: dict[str, int]
    """Bytes of all workers on the device, by what they are for; KV pages among them."""
    least_kv: int
    """Of those for KV pages, what one longest request in each engine needs."""
    kv_tokens: int
    """Tokens that the pages of one engine hold."""
    kv_bytes: int
    """Of one engine."""
    lora_base: str | None = None
    """Where the base of adapters is kept."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def least(self) -> int:
        """What the run cannot do without."""
        return self.total - self.parts["KV pages"] + self.least_kv

    @property
    def fits(self) -> bool:
        return self.least <= self.memory.bytes

    def line(self) -> str:
        """The table is `paceline plan`."""
        of = f"{gb(self.total)} of {gb(self.memory.bytes)} GB on {self.memory.name}"
        return f"memory: {of} (paceline plan has the parts)"


def gb(size: int) -> str:
    return f"{size / 1e9:.3g}" if size < 1e10 else f"{size / 1e9:.1f}"


def plan_memory(
    config: Config, shape: DecoderConfig, memory: DeviceMemory, workers: int = 1, engines: int = 1
) -> MemoryPlan:
    """For `workers` of which as many as `memory` says share the device, each with this many engines."""
    learn = config.learn
    rollout = config.rollout
    cuda = memory.cuda
    dtype = as_dtype(config.model.dtype, memory.device)
    with torch.device("meta"):
        policy = Decoder(shape).to(dtype)
    sizes = [p.numel() for p in policy.parameters()]
    settings = engine_settings(config, memory.device)
    prompt = config.task.max_prompt_tokens or DEFAULT_PROMPT_TOKENS
    longest = min(shape.max_positions, prompt + longest_completion(config))
    trained = min(shape.max_positions, prompt + rollout.max_tokens)
    learned = min(max(learn.micro_tokens, trained), rollout.prompts * rollout.samples * trained)
    prefilled = min(rollout.prefill_tokens, rollout.prompts * longest)
    batch = settings.max_batch
    drafters = registry.plan_memory(MemoryRequest(policy, config.speculation, config.model.path, batch))
    trainable = [drafter for drafter in drafters.values() if drafter.parameters]
    strategies = registry.choose_strategies(config.speculation, bool(trainable))
    rows = max((s.most_rows(batch) for s in strategies), default=batch)
    graphs = cuda and rollout.cuda_graphs

    parts = {
        "weights": sum(sizes) * dtype.itemsize,
        **learner_parts(learn, shape, sizes, dtype, workers, cuda),
        "passes": max(
            learner_pass_bytes(learn, shape, learned, dtype),
            update_bytes(learn, shape, sizes, dtype, cuda),
            prefill_bytes(shape, prefilled, dtype),
        ),
        "graphs": engines * (graph_bytes(rows, shape, settings.graph_bytes) if graphs else sampling_bytes(rows, shape)),
    }
    if drafters:
        parts["drafter"] = sum(d.shared_bytes + engines * d.engine_bytes for d in drafters.values())
    if trainable and when_to_train(config, True) != "off":
        parts["drafter training"] = sum(
            drafter_training_bytes(d.parameters, d.vocab_size, shape.hidden_size, learned, dtype, cuda)
            for d in trainable
        )
    parts = {name: size * memory.sharing for name, size in parts.items() if size}
    parts["reserve"] = memory.reserve
    left = memory.bytes - sum(parts.values())
    capacity = kv_capacity(cuda, memory.bytes, left, engines, memory.sharing)
    page_size = settings.page_size or default_page_size(memory.device, batch)
    kv = plan_kv(shape, dtype, settings, page_size, longest, capacity)
    parts["KV pages"] = kv.bytes * engines * memory.sharing
    return MemoryPlan(memory, parts, kv.least * engines * memory.sharing, kv.tokens, kv.bytes, learn.lora.base)


def filled(config: Config, plan: MemoryPlan) -> Config:
    """The config with what was planned where it leaves that open: memory for KV pages, where the base of LoRA is."""
    if plan.lora_base:
        config = with_base(config, plan.lora_base)
    if config.rollout.kv_memory_gb:
        return config
    kilobytes = plan.kv_bytes // 1000 + 1  # rounded up: a fraction less would be a page less
    rollout = config.rollout.model_copy(update={"kv_memory_gb": kilobytes / 1e6})
    return config.model_copy(update={"rollout": rollout})


def plan_run(config: Config, shape: DecoderConfig, engines: int = 1) -> MemoryPlan | None:
    """The plan for a run on this machine, checked; None where the workers are on others."""
    memory = find_memory(config)
    if memory is None:
        check_buffers(config)
        return None
    check_kv(config, memory, engines)
    again = lambda c: plan_memory(c, shape, memory, max(1, config.cluster.workers), engines)  # noqa: E731
    config = choose_base(config, memory.cuda, again)
    plan = again(config)
    check_fit(plan, config, again)
    check_buffers(config)
    check_base(config, base_on_host(config, shape, as_dtype(config.model.dtype, memory.device)), machine_memory())
    return plan


def check_kv(config: Config, memory: DeviceMemory, engines: int = 1) -> None:
    """Pages take no more than the batch can use, so a plan may fit although what was asked for never could."""
    asked = config.rollout.kv_memory_gb
    several = memory.sharing * engines
    if asked and asked * 1e9 * several > memory.bytes:
        each = f" for each of {several} engines" if several > 1 else ""
        raise UserError(
            f"rollout.kv_memory_gb = {asked:g}{each} is more than {memory.name} has, {gb(memory.bytes)} GB; "
            "lower it, or set it to null for what the batch can use"
        )


def check_buffers(config: Config) -> None:
    """What is kept on the host whatever the device is; with Ray, where the trainer runs."""
    memory = machine_memory()
    s, spot = config.speculation, config.spot
    used = {
        "speculation.suffix_mb": s.suffix_mb if s.suffix and s.mode != "plain" else 0.0,
        "spot.buffer_mb": spot.buffer_mb if spot.when != "off" else 0.0,
    }
    for key, megabytes in used.items():
        if megabytes * 2**20 * max(1, config.cluster.workers) > memory:
            raise UserError(
                f"{key} = {megabytes:g}, {gb(int(megabytes * 2**20))} GB for every worker, is more than "
                f"this machine has, {gb(memory)} GB; lower it"
            )


def engines_to_compare(config: Config) -> int:
    """`paceline compare` has an engine for each of its rollouts."""
    return 3 if when_to_train(config, True) in ("tail", "both") else 2


def show_plan(config: Config, compare: bool = False) -> Table:
    """The plan of a run as a table; what does not fit is an error."""
    config = decide_lora(choose_workers(resolve(config)), resumed=False)
    engines = engines_to_compare(config) if compare else 1
    plan = plan_run(config, read_config(find_model(config.model.path)), engines)
    if plan is None:
        raise UserError("the workers of a Ray cluster plan their own memory; there is nothing to show here")
    table = Table("memory", "GB", "what it follows from", box=None, padding=(0, 2, 0, 0))
    for name, size in plan.parts.items():
        more = f"; {plan.kv_tokens:,} tokens per engine" if name == "KV pages" else ""
        table.add_row(name, gb(size), SETTINGS_OF[name] + more)
    table.add_row("all", gb(plan.total), f"of {gb(plan.memory.bytes)} on {plan.memory.name}", style="bold")
    return table


def find_memory(config: Config) -> DeviceMemory | None:
    """Of the device of this machine that the run's workers share."""
    c = config.cluster
    if c.backend == "ray":
        return None
    device = choose_device(config.model.device)
    if device.type == "cpu":
        return DeviceMemory("this machine", machine_memory(), False, c.workers)
    name = torch.cuda.get_device_name(device)
    if c.workers > 1:  # they are processes of their own, and this one stays off the GPUs
        total = torch.cuda.get_device_properties(device).total_memory
        return DeviceMemory(name, total, True, min(c.workers, c.workers_per_gpu))
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return DeviceMemory(name, torch.cuda.mem_get_info(device)[0] + cached, True)
