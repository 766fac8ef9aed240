"""Settings of the tuner in vLLM: the `paceline` part of vLLM's `additional_config`, or the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from paceline.errors import UserError
from paceline.files import reading

HERE = "paceline.integrations.vllm."
STATE = "PACELINE_TUNER_STATE"
"""Environment variable: the file that the tuner's state is kept in, where `additional_config` names none."""
SAME_TOKENS = "same_tokens"
"""The key by which an engine asks for sampling by race (`same_tokens`)."""
FREE_ROWS = 128
"""Rows of a pass up to which verifying costs little more than decoding; only the depths before anything was measured
come from it."""
DEEPER = 3 / 2
"""A depth of the table over the next smaller one."""
Depth = Annotated[int, Field(ge=0, le=63)]


class TunerOptions(TypedDict):
    """What `additional_config` may hold under `paceline`."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    depths: NotRequired[Annotated[list[Depth], Field(min_length=1, max_length=16)]]
    explore: NotRequired[Annotated[float, Field(ge=0, le=0.5)]]
    margin: NotRequired[Annotated[float, Field(gt=0, le=1)]]
    state: NotRequired[Annotated[str, Field(min_length=1)]]
    log_s: NotRequired[Annotated[float, Field(ge=0)]]
    same_tokens: NotRequired[bool]


@dataclass(frozen=True)
class TunerSettings:
    depths: tuple[int, ...] = ()
    """Depths of speculation that may be chosen; none: a ladder from the drafter's depth down to 0, which is off."""
    explore: float = 0.01
    """Share of the time that trials of other depths may take at most."""
    margin: float = 0.97
    """A depth runs if its tokens per second times this are more than those of decoding without speculation."""
    state: Path | None = None
    """File that the tuner's state is restored from and saved to."""
    log_s: float = 60.0
    """Seconds between two lines in the log; 0 writes none."""
    same_tokens: bool = False
    """Whether tokens are drawn by race, so that speculation changes none. Needs no tuner."""

    @classmethod
    def of(cls, additional_config: Any) -> TunerSettings:
        """From vLLM's `additional_config`, of which other keys belong to others."""
        given = additional_config.get("paceline", {}) if isinstance(additional_config, Mapping) else {}
        if isinstance(given, dict):  # keys of the other parts of the plug-in
            given = {key: value for key, value in given.items() if key != "drafter"}
        options = reading.check(TunerOptions, given, "additional_config.paceline")
        state = options.get("state") or os.environ.get(STATE)
        return cls(
            tuple(sorted(set(options.get("depths", ())))),
            options.get("explore", cls.explore),
            options.get("margin", cls.margin),
            reading.named_path(state) if state else None,
            options.get("log_s", cls.log_s),
            options.get("same_tokens", cls.same_tokens),
        )

    def check(self, depth: int) -> None:
        """Against the depth of the drafter, `num_speculative_tokens`."""
        if self.depths and self.depths[-1] > depth:
            raise UserError(
                f"additional_config.paceline.depths has {self.depths[-1]}, but num_speculative_tokens of the "
                f"speculative config is {depth}: raise that, or leave the depth out"
            )


def depth_ladder(depth: int) -> tuple[int, ...]:
    """0, which is off, and depths up to that of the drafter, each about half as deep again as the one before. CUDA
    graphs are captured for every one of them, and between two neighbours there is little to win."""
    depths = {0}
    rung = float(depth)
    while rung > 1:
        depths.add(round(rung))
        rung /= DEEPER
    return tuple(sorted(depths | {1, depth}))


def depth_table(depths: tuple[int, ...], max_batch: int) -> list[list[int]]:
    """vLLM's `num_speculative_tokens_per_batch_size`: [first batch size, last, depth], the deepest first. What a
    batch begins with before the tuner knows better, and the depths that vLLM captures CUDA graphs for: so every depth
    has a batch size of at least one, as far as there are any."""
    scale = min(1.0, max_batch / FREE_ROWS)
    table = []
    first = 1
    for depth in sorted(depths, reverse=True):
        last = max(first, int(scale * FREE_ROWS / (depth + 1)))
        table.append([first, last, depth])
        first = last + 1
    table[-1][1] = max(table[-1][1], max_batch)
    return table


def is_ours(scheduler_cls: Any) -> bool:
    """Whether vLLM's `scheduler_cls`, a class or its name, is Paceline's or derives from it."""
    if isinstance(scheduler_cls, str):
        return scheduler_cls.startswith(HERE)
    return any(base.__module__.startswith(HERE) for base in getattr(scheduler_cls, "__mro__", ()))
