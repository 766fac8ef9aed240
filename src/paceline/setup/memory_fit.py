"""A run that does not fit is refused, with the settings that would make it fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.config import Config, LoraConfig
from paceline.errors import UserError
from paceline.lora.memory import with_base

if TYPE_CHECKING:
    from paceline.setup.memory import MemoryPlan

DEFAULT_PROMPT_TOKENS = 1024  # that a prompt is taken to have where task.max_prompt_tokens does not limit it
ADAPTERS = LoraConfig(rank=32)
SMALL_BATCH = 32  # of rollout.max_batch, where memory is short
FAQ = "docs/faq.md#how-much-memory"
MIN_SAVING = 0.02  # of the whole; a change that saves less is not proposed
Change = Callable[[Config], Config | None]
"""A smaller config, or None if it would be the same."""


def check_fit(plan: MemoryPlan, config: Config, again: Callable[[Config], MemoryPlan]) -> None:
    """Refuse what does not fit, and name what would make it fit; `again` plans with other settings."""
    if plan.fits:
        return
    helps: list[str] = []
    now = plan
    for words, change in CHANGES:
        changed = change(config)
        if changed is None or now.fits:
            continue
        other = again(changed)
        if other.least < (1 - MIN_SAVING) * now.least:
            helps.append(words)
            config = changed
            now = other
    raise UserError(_sentence(plan, now, " and ".join(helps)))


def check_base(config: Config, size: int, memory: int) -> None:
    """Refuse a base of adapters that would not fit into the host's memory, of which each worker keeps `size` bytes."""
    from paceline.setup.memory import gb

    if size * max(1, config.cluster.workers) > memory:
        raise UserError(
            f"learn.lora.base = host keeps {gb(size)} GB for every worker in the memory of this machine, which has "
            f"{gb(memory)} GB; set learn.lora.base=device"
        )


def _sentence(plan: MemoryPlan, changed: MemoryPlan, helps: str) -> str:
    from paceline.setup.memory import gb

    largest = sorted(plan.parts.items(), key=lambda part: -part[1])[:3]
    needs = ", ".join(f"{name} {gb(size)}" for name, size in largest)
    advice = f"set {helps}" if helps and changed.fits else "take a smaller model or a larger device"
    if helps and not changed.fits:
        advice += f" (with {helps} it needs {gb(changed.least)} GB)"
    has = f"{plan.memory.name} has {gb(plan.memory.bytes)}"
    return f"this run needs about {gb(plan.least)} GB ({needs}, …), but {has}: {advice} ({FAQ})"


def _set(section: str, **values: Any) -> Change:
    def change(config: Config) -> Config | None:
        before = getattr(config, section)
        after = before.model_copy(update=values)
        return None if after == before else config.model_copy(update={section: after})

    return change


def _one_sequence_per_pass(config: Config) -> Config | None:
    longest = (config.task.max_prompt_tokens or DEFAULT_PROMPT_TOKENS) + config.rollout.max_tokens
    return _set("learn", micro_tokens=longest)(config) if longest < config.learn.micro_tokens else None


def _small_batch(config: Config) -> Config | None:
    r = config.rollout
    fits = min(r.max_batch, r.prompts * r.samples) <= SMALL_BATCH
    return None if fits else _set("rollout", max_batch=SMALL_BATCH)(config)


def _base_on_host(config: Config) -> Config | None:
    return with_base(config, "host") if config.learn.lora.base == "device" else None


def _train_adapters(config: Config) -> Config | None:
    lora = config.learn.lora
    adapted = config.model_copy(update={"learn": config.learn.model_copy(update={"lora": ADAPTERS})})
    return None if lora.rank else adapted


CHANGES: list[tuple[str, Change]] = [
    ("a lower rollout.kv_memory_gb", _set("rollout", kv_memory_gb=None)),
    ("learn.activation_checkpointing=true", _set("learn", activation_checkpointing=True)),
    ("a lower learn.micro_tokens", _one_sequence_per_pass),
    ("learn.optimizer_dtype=bfloat16", _set("learn", optimizer_dtype="bfloat16")),
    (f"rollout.max_batch={SMALL_BATCH}", _small_batch),
    ("learn.kl_coef=0", _set("learn", kl_coef=0.0)),
    ("learn.lora.base=host", _base_on_host),
    (f"learn.lora.rank={ADAPTERS.rank}", _train_adapters),
]
"""What makes a run smaller, the cheapest first; adapters last, because they learn something else."""
