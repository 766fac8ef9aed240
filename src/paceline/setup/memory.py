"""What a run will need of a device's memory, planned before it starts.

Weights, gradients, optimizer, drafter, KV pages, graphs and what a pass computes on the way share one budget. All but
the KV pages have a size that follows from the settings; KV pages get what is left, up to what the batch can use. A run
that does not fit is refused with the settings that would make it fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from paceline.cluster.make import choose_workers
from paceline.config import Config
from paceline.draft import registry
from paceline.draft.base import MemoryRequest
from paceline.errors import UserError
from paceline.kernels.adam import PIECE
from paceline.learn.algorithms import resolve
from paceline.learn.logprobs import LOGITS_AT_ONCE
from paceline.learn.shards import COPIES
from paceline.model.checkpoint import find_model, read_config
from paceline.model.config import DecoderConfig
from paceline.model.decoder import Decoder, as_dtype
from paceline.rollout.pages import CPU_KV_BYTES, GPU_KV_SHARE, default_page_size, page_bytes, pages_for_batch
from paceline.setup.build import choose_device, engine_settings
from paceline.setup.machine import machine_memory
from paceline.spot.learning import when_to_train
from paceline.spot.trainer import FIRST_GPU, LEAST, MOST

PROMPT = 1024  # tokens that a prompt is taken to have where the settings do not limit it
GRAPHS = 8 * 10**9  # most that captured graphs of the default strategies take
KV_OF_REST = 0.8  # of what everything else leaves: estimates are estimates
GPU_RESERVE, CPU_RESERVE = 2 * 10**9, 5 * 10**8  # for the runtime and its libraries
FRAGMENTS = 0.03  # of a GPU, that no allocation fits into
LOGIT_BYTES = 20  # per logit and pass of the learner: scores, their float32, log-softmax, entropy, gradients
RACE_BYTES = 16  # per logit and pass of the engine
LITTLE = 0.02  # of the whole: a change that saves less is not worth a word
FOLLOWS = {
    "weights": "model.path, model.dtype",
    "gradients": "as the weights",
    "optimizer": "learn.optimizer_dtype, learn.master_weights",
    "reference": "learn.kl_coef",
    "passes": "learn.micro_tokens, learn.activation_checkpointing, rollout.prefill_tokens",
    "graphs": "speculation.graph_memory_gb, rollout.max_batch",
    "drafter": "speculation.drafter",
    "drafter training": "spot.when",
    "reserve": "the runtime and its libraries",
    "KV pages": "rollout.kv_memory_gb, or what is left",
}
Step = tuple[str, Callable[[Config], Config | None]]


@dataclass(frozen=True)
class DeviceMemory:
    """A device that workers share."""

    name: str
    bytes: int
    cuda: bool
    sharing: int = 1

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.cuda else "cpu")


@dataclass(frozen=True)
class MemoryPlan:
    room: DeviceMemory
    parts: dict[str, int]
    """Bytes of all workers on the device, by what they are for; KV pages among them."""
    least_kv: int
    """Of those for KV pages, what one longest request in each engine needs."""
    kv_tokens: int
    """Tokens that the pages of one engine hold."""
    kv_bytes: int
    """Of one engine."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def least(self) -> int:
        """What the run cannot do without."""
        return self.total - self.parts["KV pages"] + self.least_kv

    @property
    def fits(self) -> bool:
        return self.least <= self.room.bytes

    def line(self) -> str:
        parts = ", ".join(f"{name} {gb(size)}" for name, size in self.parts.items() if size > 0.001 * self.total)
        return f"memory {gb(self.total)} of {gb(self.room.bytes)} GB on {self.room.name}: {parts}"


def gb(size: int) -> str:
    return f"{size / 1e9:.3g}" if size < 1e10 else f"{size / 1e9:.1f}"


def plan_memory(
    config: Config, shape: DecoderConfig, room: DeviceMemory, workers: int = 1, engines: int = 1
) -> MemoryPlan:
    """For `workers` of which as many as the room says share the device, each with this many engines."""
    dtype = as_dtype(config.model.dtype, room.device)
    with torch.device("meta"):
        policy = Decoder(shape).to(dtype)
    count = sum(p.numel() for p in policy.parameters())
    largest = max(p.numel() for p in policy.parameters())
    learn, r = config.learn, config.rollout
    settings = engine_settings(config, room.device)
    batch = settings.max_batch
    context = min(settings.max_length or shape.max_positions, shape.max_positions)
    longest = min(shape.max_positions, (config.task.max_prompt_tokens or PROMPT) + r.max_tokens)
    drafters = registry.plan_memory(MemoryRequest(policy, config.speculation, config.model.path, batch))
    trained = [d for d in drafters.values() if d.parameters]
    spot = when_to_train(config, bool(trained))

    parts = {
        "weights": count * dtype.itemsize,
        "gradients": count * dtype.itemsize,
        "optimizer": int(_state_bytes(config, dtype) * count * min(1.0, COPIES / workers)),
        "reference": count * dtype.itemsize if learn.kl_coef else 0,
    }
    tokens = min(max(learn.micro_tokens, longest), r.prompts * r.samples * longest)
    learning = _activations(config, shape, tokens) * dtype.itemsize
    learning += min(LOGITS_AT_ONCE, tokens * shape.vocab_size) * LOGIT_BYTES
    stepping = 0 if room.cuda else min(PIECE, largest) * 4 * 5
    filling = min(r.prefill_tokens, r.prompts * longest) * _layer_floats(shape) * dtype.itemsize
    parts["passes"] = max(learning, stepping, filling)

    strategies = registry.choose_strategies(config.speculation, bool(trained))
    rows = max((s.most_rows(batch) for s in strategies), default=batch)
    graphs = int(config.speculation.graph_memory_gb * 1e9) if config.speculation.graph_memory_gb else GRAPHS
    racing = rows * shape.vocab_size * RACE_BYTES
    parts["graphs"] = engines * min(graphs, racing + 2**28) if room.cuda and r.cuda_graphs else engines * racing
    if drafters:
        parts["drafter"] = sum(d.shared_bytes + engines * d.engine_bytes for d in drafters.values())
    for drafter in trained if spot != "off" else []:
        # A copy, its gradients, masters and two moments in float32, and a step over so many tokens.
        step = MOST if room.cuda else max(LEAST, FIRST_GPU)
        scores = step * drafter.vocab_size * 12 * 5
        parts["drafter training"] = drafter.parameters * (2 * dtype.itemsize + 4 * 4) + scores
        parts["drafter training"] += tokens * 4 * shape.hidden_size * dtype.itemsize

    page = r.page_size or default_page_size(room.device, batch)
    each = page_bytes(shape, page, dtype)
    wanted = pages_for_batch(batch, context, page) * each
    least = pages_for_batch(1, min(context, longest), page) * each
    sharing = room.sharing
    parts = {name: size * sharing for name, size in parts.items() if size}
    parts["reserve"] = int(GPU_RESERVE + FRAGMENTS * room.bytes) if room.cuda else CPU_RESERVE * sharing
    left = (room.bytes - sum(parts.values())) // (sharing * engines)
    if r.kv_memory_gb:
        kv = min(wanted, int(r.kv_memory_gb * 1e9))
    elif room.cuda:
        kv = min(wanted, int(GPU_KV_SHARE * room.bytes) // sharing, int(KV_OF_REST * left))
    else:
        kv = min(wanted, CPU_KV_BYTES)
    kv = max(kv, least) if not r.kv_memory_gb else kv
    parts["KV pages"] = kv * engines * sharing
    least = kv if r.kv_memory_gb else least
    return MemoryPlan(room, parts, least * engines * sharing, kv // each * page, kv)


def _state_bytes(config: Config, dtype: torch.dtype) -> int:
    """Of the optimizer, per parameter."""
    learn = config.learn
    if dtype == torch.float64:
        return 16
    moments = 2 * (2 if learn.optimizer_dtype == "bfloat16" else 4)
    return moments + (4 if learn.master_weights and dtype.itemsize < 4 else 0)


def _layer_floats(shape: DecoderConfig) -> int:
    """Numbers per token that a layer keeps for the backward pass: its input and the normed one, q, k and v as attention
    takes them and its result, the same two for the second half, gate, up, what becomes of the gate, and the product."""
    return 4 * shape.hidden_size + 4 * shape.heads * shape.head_dim + 4 * shape.intermediate_size


def _activations(config: Config, shape: DecoderConfig, tokens: int) -> int:
    """Numbers that a pass of the learner over so many tokens keeps, with the layer that the backward pass is in."""
    layer = _layer_floats(shape)
    kept = shape.hidden_size if config.learn.activation_checkpointing else layer
    return int(tokens * (shape.layers * kept + 1.5 * layer + 4 * shape.hidden_size))


def _changes() -> list[Step]:
    """What makes a run smaller, the cheapest first."""

    def learn(**values: Any) -> Callable[[Config], Config | None]:
        def change(config: Config) -> Config | None:
            section = config.learn.model_copy(update=values)
            return None if section == config.learn else config.model_copy(update={"learn": section})

        return change

    def micro(config: Config) -> Config | None:
        longest = (config.task.max_prompt_tokens or PROMPT) + config.rollout.max_tokens
        return learn(micro_tokens=longest)(config) if longest < config.learn.micro_tokens else None

    def kv(config: Config) -> Config | None:
        if not config.rollout.kv_memory_gb:
            return None
        return config.model_copy(update={"rollout": config.rollout.model_copy(update={"kv_memory_gb": None})})

    def batch(config: Config) -> Config | None:
        r = config.rollout
        most = min(r.max_batch, r.prompts * r.samples)
        return None if most <= 32 else config.model_copy(update={"rollout": r.model_copy(update={"max_batch": 32})})

    return [
        ("a lower rollout.kv_memory_gb", kv),
        ("learn.activation_checkpointing=true", learn(activation_checkpointing=True)),
        ("a lower learn.micro_tokens", micro),
        ("learn.optimizer_dtype=bfloat16", learn(optimizer_dtype="bfloat16")),
        ("rollout.max_batch=32", batch),
        ("learn.kl_coef=0", learn(kl_coef=0.0)),
    ]


def check_fit(plan: MemoryPlan, config: Config, again: Callable[[Config], MemoryPlan]) -> None:
    """Refuse what does not fit, and name what would make it fit; `again` plans with other settings."""
    if plan.fits:
        return
    helps: list[str] = []
    now = plan
    for words, change in _changes():
        changed = change(config)
        if changed is None or now.fits:
            continue
        other = again(changed)
        if other.least < (1 - LITTLE) * now.least:
            helps.append(words)
            config, now = changed, other
    largest = sorted(plan.parts.items(), key=lambda kv: -kv[1])[:3]
    needs = ", ".join(f"{name} {gb(size)}" for name, size in largest)
    advice = f"set {' and '.join(helps)}" if helps and now.fits else "take a smaller model or a larger device"
    have = f"{plan.room.name} has {gb(plan.room.bytes)}"
    raise UserError(
        f"this run needs about {gb(plan.least)} GB ({needs}, …), but {have}: {advice}"
        + ("" if now.fits or not helps else f" (with {' and '.join(helps)} it needs {gb(now.least)} GB)")
    )


def filled(config: Config, plan: MemoryPlan) -> Config:
    """The config with the memory for KV pages that was planned, where it leaves that open."""
    if config.rollout.kv_memory_gb:
        return config
    kilobytes = plan.kv_bytes // 1000 + 1  # rounded up: a fraction less would be a page less
    rollout = config.rollout.model_copy(update={"kv_memory_gb": kilobytes / 1e6})
    return config.model_copy(update={"rollout": rollout})


def plan_run(config: Config, shape: DecoderConfig, engines: int = 1) -> MemoryPlan | None:
    """The plan for a run on this machine, checked; None where the workers are on others."""
    room = find_memory(config)
    if room is None:
        check_buffers(config)
        return None
    check_kv(config, room, engines)
    again = lambda c: plan_memory(c, shape, room, max(1, config.cluster.workers), engines)  # noqa: E731
    plan = again(config)
    check_fit(plan, config, again)
    check_buffers(config)
    return plan


def check_kv(config: Config, room: DeviceMemory, engines: int = 1) -> None:
    """Pages take no more than the batch can use, so a plan may fit although what was asked for never could."""
    asked = config.rollout.kv_memory_gb
    if asked and asked * 1e9 * room.sharing * engines > room.bytes:
        several = room.sharing * engines
        each = f" for each of {several} engines" if several > 1 else ""
        raise UserError(
            f"rollout.kv_memory_gb = {asked:g}{each} is more than {room.name} has, {gb(room.bytes)} GB; "
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
    """`paceline compare` has an engine for each way."""
    return 3 if when_to_train(config, True) in ("tail", "both") else 2


def show_plan(config: Config, compare: bool = False) -> Table:
    """The plan of a run as a table; what does not fit is an error."""
    config = choose_workers(resolve(config))
    engines = engines_to_compare(config) if compare else 1
    plan = plan_run(config, read_config(find_model(config.model.path)), engines)
    if plan is None:
        raise UserError("the workers of a Ray cluster plan their own memory; there is nothing to show here")
    table = Table("memory", "GB", "what it follows from", box=None, padding=(0, 2, 0, 0))
    for name, size in plan.parts.items():
        more = f"; {plan.kv_tokens:,} tokens per engine" if name == "KV pages" else ""
        table.add_row(name, gb(size), FOLLOWS[name] + more)
    table.add_row("all", gb(plan.total), f"of {gb(plan.room.bytes)} on {plan.room.name}", style="bold")
    return table


def find_memory(config: Config) -> DeviceMemory | None:
    """The device of this machine that the run's workers share."""
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
