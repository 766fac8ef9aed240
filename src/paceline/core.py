"""The vocabulary: the types that flow through a step, from a task's sample to what the learner is given.

    Sample ──encoded──► Group of Requests ──► Sequence (while it decodes) ──► Completion ──rewarded──► Trajectory

This module knows nothing of the rest of the package.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, Literal

Prompt = str | list[dict[str, Any]]
"""Text, or messages for the model's chat template."""

FinishReason = Literal["stop", "length"]
MAX_BANNED = 8


class Filters(IntEnum):
    """What shapes the distribution beside the temperature; the highest of a batch is what its passes do."""

    NONE = 0
    BANS = 1  # tokens that would end the answer too early
    SORTS = 2  # also top-k, top-p and min-p, for which the vocabulary is sorted


@dataclass(frozen=True)
class Sample:
    index: int
    prompt: Prompt
    columns: dict[str, Any] = field(default_factory=dict)
    """Passed to the reward functions by name."""
    origin: str = ""
    """Which row it is, for messages: "line 7 of data.jsonl"; empty for one that was generated."""

    @property
    def where(self) -> str:
        """For messages."""
        return f"sample {self.index} ({self.origin})" if self.origin else f"sample {self.index}"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. Filters apply in the order top-k, top-p, min-p to the logits over the temperature."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 512
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Texts that end the answer; the tokens that complete one are kept."""

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative, got {self.temperature}")
        if self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise ValueError(f"top_k >= 0, 0 < top_p <= 1 and 0 <= min_p <= 1 must hold, got {self}")
        if self.max_tokens < 1 or not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"1 <= max_tokens and 0 <= min_tokens <= max_tokens must hold, got {self}")
        if self.min_tokens and len(self.stop_token_ids) > MAX_BANNED:
            raise ValueError(f"min_tokens works with at most {MAX_BANNED} stop tokens, got {len(self.stop_token_ids)}")

    @cached_property
    def filters(self) -> Filters:
        if self.top_k > 0 or self.top_p < 1 or self.min_p > 0:
            return Filters.SORTS
        return Filters.BANS if self.min_tokens > 0 else Filters.NONE

    @cached_property
    def stop_set(self) -> frozenset[int]:
        return frozenset(self.stop_token_ids)


@dataclass(frozen=True)
class Request:
    """One answer to be written. Its tokens are a function of the policy and of what is in here, and of nothing else."""

    id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"request {self.id} has an empty prompt")


@dataclass(frozen=True)
class Completion:
    request: Request
    tokens: list[int]
    """The answer, without the prompt; ends with the stop token if one ended it."""
    logprobs: list[float]
    """log p of each token under the policy at the request's temperature, before filters (at 0: temperature 1)."""
    finish_reason: FinishReason


@dataclass(eq=False)
class Sequence:
    """A request on its way: its tokens so far, and the pages that hold their keys and values."""

    request: Request
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    admitted: int = -1
    """Order of admission; the latest is paused first when pages run out."""
    slot: int = -1
    """Where a running request keeps its features."""

    @classmethod
    def of(cls, request: Request) -> Sequence:
        return cls(request, list(request.prompt))

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def fresh(self) -> bool:
        """Nothing written yet, so the prompt's pages can be shared with the rest of its group."""
        return self.generated == 0

    def complete(self, reason: FinishReason) -> Completion:
        response = self.tokens[len(self.request.prompt) :]
        assert len(response) == len(self.logprobs), "every token has its log-probability"
        return Completion(self.request, response, self.logprobs, reason)


@dataclass
class Trajectory:
    """One answer as the learner sees it."""

    prompt: tuple[int, ...]
    tokens: list[int]
    logprobs: list[float]
    """As the engine reported them."""
    reward: float

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)


@dataclass
class Group:
    """A prompt and its answers."""

    sample: Sample
    prompt: tuple[int, ...]
    completions: dict[int, Completion] = field(default_factory=dict)  # by request id
    rewards: dict[int, float] = field(default_factory=dict)
    values: dict[int, dict[str, float]] = field(default_factory=dict)  # of each reward function

    def trajectories(self) -> list[Trajectory]:
        ids = sorted(self.completions)
        done = self.completions
        return [Trajectory(self.prompt, done[i].tokens, done[i].logprobs, self.rewards[i]) for i in ids]


def mix_seed(*parts: int | str) -> int:
    """One seed from several, the same on every machine and in every process."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
