"""The vocabulary: the types that flow through a step, from a task's sample to what the learner is given.

    Sample ──encoded──► Group of Requests ──decoded──► Completion ──rewarded──► Trajectory

A task yields samples. The loop encodes each one's prompt and makes a group of requests from it; the engine decodes a
request as a `Sequence` of its own (`rollout/sequence.py`); the completion goes to the rewards, and with its reward to
the learner.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

Prompt = str | list[dict[str, Any]]
"""Text, or messages for the model's chat template."""

FinishReason = Literal["stop", "length"]
"""A stop token or stop string, or max_tokens or the model's context."""
MAX_BANNED = 8  # stop tokens per request that min_tokens can ban: their ids have so many columns in the sampling table


@dataclass(frozen=True)
class Sample:
    """A row of a task: the prompt, and what its reward functions need to know."""

    index: int
    """In the task's endless stream."""
    prompt: Prompt
    columns: dict[str, Any] = field(default_factory=dict)
    """Passed to the reward functions by name."""
    origin: str = ""
    """Which row it is, for messages: "line 7 of data.jsonl"; empty for one that was generated."""
    task_prompt: Prompt | None = None
    """The task's own prompt, where an environment has made another one of it."""

    @property
    def where(self) -> str:
        """For messages."""
        return f"sample {self.index} ({self.origin})" if self.origin else f"sample {self.index}"

    @property
    def short(self) -> str:
        """The beginning of the prompt's text or last message, for messages."""
        text = self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]
        return repr(text.strip()[:60])


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled. Filters apply in the order top-k, top-p, min-p to softmax(logits / temperature)."""

    temperature: float = 1.0
    """Softmax temperature; 0 is greedy."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 512
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Strings that end the completion; the tokens that complete one are kept."""

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
    def stop_set(self) -> frozenset[int]:
        return frozenset(self.stop_token_ids)


@dataclass(frozen=True)
class Request:
    """One completion to be generated. Its tokens are a function of the policy and of these fields, and of nothing else:
    not of the batch, the worker, the drafter or whether there is one."""

    id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    seed: int = 0
    acts: bool = False
    """Whether the end of a turn is answered by an observation, behind which the policy goes on: a tool's result, or
    what an environment says."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"request {self.id} has an empty prompt")


Spans = tuple[tuple[int, int], ...]
"""[first, last) positions, in order."""


@dataclass(frozen=True)
class Turn:
    """What the policy has written since the prompt or the last observation, where it is not all: the sequence waits for
    an `Observation`."""

    request_id: int
    number: int
    """From 0."""
    tokens: list[int]
    finish_reason: FinishReason


@dataclass(frozen=True)
class Observation:
    """What a turn has led to."""

    request_id: int
    turn: int
    """The number of the turn that it answers."""
    tokens: list[int]
    """Put behind the turn, up to where the policy begins to write again; where they leave no room for that, the
    completion ends with the turn."""
    done: bool = False
    """The completion ends with the turn."""


@dataclass(frozen=True)
class Completion:
    """A finished request."""

    request: Request
    tokens: list[int]
    """Without the prompt; ends with the stop token if one ended it."""
    logprobs: list[float]
    """log p of each token under the policy at the request's temperature, before filters (at 0: temperature 1); 0.0
    where the token was observed, which has none."""
    finish_reason: FinishReason
    observed: Spans = ()
    """Which of the tokens the policy did not write: observations between its turns."""

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.logprobs), "every token has its log-probability"

    @property
    def num_written(self) -> int:
        """Tokens that the policy wrote."""
        return len(self.tokens) - span_length(self.observed)


@dataclass(frozen=True)
class TrajectoryFacts:
    """What every learner knows of a trajectory that it may not have: enough for advantages and token weights."""

    prompt_length: int
    num_tokens: int
    """Of the completion, that the policy wrote: those that are learned from."""
    reward: float
    num_observed: int = 0
    """Of the completion, that it did not write."""
    turns: tuple[tuple[int, float], ...] = ()
    """Tokens that the policy wrote in each turn, and what an environment gave for it."""

    @property
    def length(self) -> int:
        return self.prompt_length + self.completion_length

    @property
    def completion_length(self) -> int:
        return self.num_tokens + self.num_observed


@dataclass
class Trajectory:
    """A completion with its reward, as the learner takes it."""

    prompt: tuple[int, ...]
    tokens: list[int]
    logprobs: list[float]
    """Of the tokens, as the engine reported them."""
    reward: float
    observed: Spans = ()
    """Which of the tokens are observations: the policy sees them, and learns from none of them."""
    turn_rewards: tuple[float, ...] = ()
    """What an environment gave for each turn; a part of the reward."""

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.logprobs), "every token has its log-probability"

    @property
    def num_tokens(self) -> int:
        """Of those that the policy wrote, which is what is learned from."""
        return len(self.tokens) - span_length(self.observed)

    @property
    def completion_length(self) -> int:
        return len(self.tokens)

    @property
    def turns(self) -> tuple[tuple[int, float], ...]:
        """As in `TrajectoryFacts`."""
        edges = [0, *(edge for span in self.observed for edge in span), len(self.tokens)]
        lengths = [last - first for first, last in zip(edges[::2], edges[1::2], strict=True)]
        return tuple(zip(lengths, self.turn_rewards, strict=True)) if self.turn_rewards else ()

    @property
    def written(self) -> list[int]:
        """Indices of the tokens that the policy wrote."""
        return outside(self.observed, len(self.tokens))

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt) + len(self.tokens)

    @property
    def facts(self) -> TrajectoryFacts:
        return TrajectoryFacts(len(self.prompt), self.num_tokens, self.reward, span_length(self.observed), self.turns)


Trajectories = Sequence[Trajectory | TrajectoryFacts]
"""All of a step, in the order of its groups: whole where a learner has them, else what is known of them."""


@dataclass
class Group:
    """A prompt and its completions, by request id."""

    sample: Sample
    prompt: tuple[int, ...]
    completions: dict[int, Completion] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    """Of the completions, decoded once when they are finished."""
    rewards: dict[int, float] = field(default_factory=dict)
    """Weighted sums of the values."""
    values: dict[int, dict[str, float]] = field(default_factory=dict)
    """Of each reward function, by its name."""
    turn_rewards: dict[int, list[float]] = field(default_factory=dict)
    """What an environment gave for each turn, weighted like the rest of the reward."""
    extras: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What reward functions have logged of a completion."""

    def add(self, completion: Completion, text: str) -> None:
        request = completion.request
        assert request.prompt == self.prompt and request.id not in self.completions, "a request of this group, once"
        self.completions[request.id] = completion
        self.texts[request.id] = text

    def set_reward(self, request_id: int, reward: float, values: dict[str, float]) -> None:
        assert request_id in self.completions, "a completion is finished before it is rewarded"
        self.rewards[request_id] = reward
        self.values[request_id] = values

    def trajectories(self) -> list[Trajectory]:
        """In the order of their ids, whichever was finished first."""
        out = []
        for i in sorted(self.completions):
            c = self.completions[i]
            by_turn = tuple(self.turn_rewards.get(i, ()))
            out.append(Trajectory(self.prompt, c.tokens, c.logprobs, self.rewards[i], c.observed, by_turn))
        return out


def span_length(spans: Spans) -> int:
    """Positions in them."""
    return sum(last - first for first, last in spans)


def moved(spans: Spans, by: int, length: int) -> Spans:
    """The same positions counted from elsewhere, as far as they lie from 0 to `length`."""
    ends = ((max(0, first + by), min(length, last + by)) for first, last in spans)
    return tuple((first, last) for first, last in ends if first < last)


def outside(spans: Spans, length: int) -> list[int]:
    """Positions below `length` that lie in none of the spans."""
    edges = [0, *(edge for span in spans for edge in span), length]
    return [i for first, last in zip(edges[::2], edges[1::2], strict=True) for i in range(first, last)]


def mix_seed(*parts: int | str) -> int:
    """One 63-bit seed from several parts, the same on every machine and in every process."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
