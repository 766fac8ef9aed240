"""What the answers to each prompt got, and the numbers made of that: mean reward, pass@k, best@k.

pass@k is the probability that at least one of k answers passes. With n answers of which c pass, its unbiased estimate
is 1 - C(n - c, k) / C(n, k): the share of all subsets of k answers that have one that passes. best@k is the same for
rewards of any size: the mean over all subsets of k answers of the best reward in each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import comb
from statistics import fmean

MEAN = "mean"
GREEDY = "greedy"
TOLERANCE = 1e-9  # of weights that should add up to eval.pass_reward: 0.7 + 0.2 + 0.1 is less than 1


@dataclass(frozen=True)
class PromptScores:
    """The answers to one prompt, in the order of their request ids."""

    data: str
    """The data set that it belongs to, as metrics call it."""
    rewards: list[float]
    """Of the sampled answers."""
    lengths: list[int]
    """Tokens of the sampled answers."""
    cut: int = 0
    """Sampled answers that ended because they had max_tokens."""
    values: dict[str, list[float | None]] = field(default_factory=dict)
    """Of the sampled answers, by reward function; None where it had no opinion."""
    greedy: float | None = None
    """Reward of the greedy answer, if there is one."""

    def passing(self, pass_reward: float) -> int:
        return sum(reward >= pass_reward - TOLERANCE for reward in self.rewards)


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate of pass@k from n answers of which c pass."""
    assert 0 <= c <= n and 1 <= k <= n, "k answers are drawn from n"
    return 1.0 - comb(n - c, k) / comb(n, k)


def best_of_k(rewards: Sequence[float], k: int) -> float:
    """The unbiased estimate of the mean best reward of k answers: the i-th smallest of n rewards is the largest one of
    C(i - 1, k - 1) of the C(n, k) subsets."""
    assert 1 <= k <= len(rewards), "k answers are drawn from all"
    weights = ((comb(i, k - 1), reward) for i, reward in enumerate(sorted(rewards)))
    return math.fsum(weight * reward for weight, reward in weights) / comb(len(rewards), k)


@dataclass(frozen=True)
class EvalScores:
    """The scores of all prompts, in their order."""

    prompts: list[PromptScores]
    ks: list[int]
    """The k of pass@k and best@k."""
    pass_reward: float = 1.0
    """From which reward on an answer passes."""

    @property
    def samples(self) -> int:
        """Sampled answers per prompt."""
        return len(self.prompts[0].rewards)

    def of(self, data: str) -> EvalScores:
        """Those of one data set."""
        return EvalScores([p for p in self.prompts if p.data == data], self.ks, self.pass_reward)

    @property
    def data(self) -> list[str]:
        return sorted({p.data for p in self.prompts})

    @property
    def functions(self) -> list[str]:
        """Reward functions that had an opinion on any answer."""
        return sorted({name for p in self.prompts for name in p.values})

    def names(self) -> list[str]:
        """All numbers that there are: mean, pass@k, best@k, greedy, and the mean of each reward function."""
        greedy = [GREEDY] if self.prompts[0].greedy is not None else []
        by_k = [f"{kind}@{k}" for k in self.ks for kind in ("pass", "best") if kind == "pass" or k > 1]
        return [MEAN, *by_k, *greedy, *self.functions]

    def per_prompt(self, name: str) -> list[float]:
        """A number for each prompt; NaN where a reward function had no opinion on any answer to it."""
        return [self._read(name)(p) for p in self.prompts]

    def _read(self, name: str) -> Callable[[PromptScores], float]:
        kind, _, k = name.partition("@")
        if name == MEAN:
            return lambda p: fmean(p.rewards)
        if name == GREEDY:
            return lambda p: math.nan if p.greedy is None else p.greedy
        if kind == "pass" and k.isdigit():
            return lambda p: pass_at_k(len(p.rewards), p.passing(self.pass_reward), int(k))
        if kind == "best" and k.isdigit():
            return lambda p: best_of_k(p.rewards, int(k))
        return lambda p: _mean_known(p.values.get(name, []))

    def value(self, name: str) -> float:
        """The mean over prompts."""
        return _mean_known(self.per_prompt(name))

    def summary(self) -> dict[str, float]:
        return {name: self.value(name) for name in self.names()}

    @property
    def tokens(self) -> int:
        """Of the sampled answers."""
        return sum(sum(p.lengths) for p in self.prompts)

    @property
    def mean_length(self) -> float:
        return self.tokens / (len(self.prompts) * self.samples)

    @property
    def clip_ratio(self) -> float:
        """Share of the sampled answers that were cut at max_tokens."""
        return sum(p.cut for p in self.prompts) / (len(self.prompts) * self.samples)


def _mean_known(values: Sequence[float | None]) -> float:
    known = [v for v in values if v is not None and math.isfinite(v)]
    return fmean(known) if known else math.nan
