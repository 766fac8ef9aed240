"""A request while the engine has it."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import cached_property

from paceline.core import Completion, FinishReason, Observation, Request, Turn
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
    ahead: list[int] = field(default_factory=list)
    """What may follow its tokens: written under an earlier policy, and verified when it is admitted."""
    observed: list[tuple[int, int]] = field(default_factory=list)
    """Spans of the generated tokens that are observations."""
    turn: int = 0
    """Number of the turn that it is in."""
    suspended: bool = False
    """A turn has ended, and it has not been admitted since: it keeps its pages as long as nobody needs them."""
    cached: int = 0
    """While it is suspended: how many of its tokens are in its pages."""
    filled_from: int = 0
    """The first of its tokens that its last prefill ran over."""

    @classmethod
    def of(cls, request: Request, ahead: Many[int] = ()) -> Sequence:
        return cls(request, list(request.prompt), ahead=list(ahead))

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def fresh(self) -> bool:
        """No token generated yet."""
        return self.generated == 0

    @property
    def only_prompt(self) -> bool:
        """Whether its prompt is all that has to be prefilled, so that its pages can be shared with the rest of its
        group."""
        return self.fresh and not self.ahead

    @cached_property
    def filters(self) -> Filters:
        return filters_of(self.request.sampling)

    @property
    def turn_length(self) -> int:
        """Tokens of the turn that it is in."""
        return self.generated - (self.observed[-1][1] if self.observed else 0)

    def end_turn(self, reason: FinishReason) -> Turn:
        """It waits for an observation from now on."""
        self.suspended = True
        self.cached = len(self.tokens) - 1  # the last one is not in the KV cache yet
        return Turn(self.request.id, self.turn, self.tokens[len(self.tokens) - self.turn_length :], reason)

    def observe(self, observation: Observation) -> None:
        """What it goes on behind."""
        first = self.generated
        self.tokens += observation.tokens
        self.logprobs += [0.0] * len(observation.tokens)
        self.observed.append((first, self.generated))
        self.turn += 1

    def complete(self, reason: FinishReason) -> Completion:
        tokens = self.tokens[len(self.request.prompt) :]
        return Completion(self.request, tokens, self.logprobs, reason, tuple(self.observed))


def max_filters(sequences: Many[Sequence]) -> Filters:
    """What the passes of these sequences have to do beside the temperature."""
    return max((s.filters for s in sequences), default=Filters.NONE)
