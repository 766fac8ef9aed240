"""A request while the engine has it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from paceline.core import Completion, FinishReason, Request
from paceline.rollout.filters import Filters, filters_of


@dataclass(eq=False)
class Sequence:
    """Its tokens so far, and the KV pages that it owns or shares."""

    request: Request
    tokens: list[int]
    """Of the prompt and of what was generated."""
    logprobs: list[float] = field(default_factory=list)
    """Of the generated tokens."""
    pages: list[int] = field(default_factory=list)
    """Numbers of its KV pages, in the order of the tokens that they hold."""
    admitted: int = -1
    """Order of admission, -1 while it waits; the latest is preempted first when pages run out."""
    slot: int = -1
    """Row of the drafters' caches while it runs, else -1."""

    @classmethod
    def of(cls, request: Request) -> Sequence:
        return cls(request, list(request.prompt))

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def fresh(self) -> bool:
        """No token generated yet, so the prompt's pages can be shared with the rest of its group."""
        return self.generated == 0

    @cached_property
    def filters(self) -> Filters:
        return filters_of(self.request.sampling)

    def complete(self, reason: FinishReason) -> Completion:
        return Completion(self.request, self.tokens[len(self.request.prompt) :], self.logprobs, reason)
