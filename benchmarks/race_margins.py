"""Why two answers to one request differ where they first do: how close the race was, and how close top-p cut."""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class Sampling(NamedTuple):
    temperature: float
    top_p: float

    @property
    def name(self) -> str:
        return f"T={self.temperature:g}" + (f", top-p {self.top_p:g}" if self.top_p < 1 else "")


def why(
    model: Any, prompt: list[int], plain: list[int], other: list[int], sampling: Sampling, seed: int, margin: Any
) -> dict[str, Any]:
    """The first difference of two answers, in units of logits over the temperature."""
    from paceline.rollout.differences import exact_logits

    at = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if at is None:
        return {"position": None, "kind": "another end"}
    tokens = [*prompt, *plain[:at]]
    logits, rounding = exact_logits(model, tokens)
    scores = logits / sampling.temperature
    rounding /= sampling.temperature
    a, b = plain[at], other[at]
    gap = margin(scores, a, b, seed, len(tokens))
    edge = min(boundary(scores, token, sampling.top_p, rounding) for token in (a, b))
    kind = "near-tie" if gap <= 2 * rounding else "boundary" if edge <= 1 else "unexplained"
    found = {"position": at, "kind": kind, "gap": round(gap, 6), "rounding": round(rounding, 6)}
    return found | {"edge": round(edge, 3) if math.isfinite(edge) else None}


def boundary(scores: Any, token: int, top_p: float, rounding: float) -> float:
    """How far the probability ahead of a token is from where top-p cuts, over how far rounding can move it: scores that
    each move by at most r change a share c by at most 2 r c (1 - c)."""
    if top_p >= 1:
        return math.inf
    p = scores.softmax(-1)
    ahead = float(p[scores > scores[token]].sum())
    return abs(ahead - top_p) / (2 * rounding * top_p * (1 - top_p) + 1e-9)


def margin_first(scores: Any, a: int, b: int, seed: int, position: int) -> float:
    """Between two tokens with the noise of the first model runner, which is our own."""
    import torch

    from paceline.integrations.vllm.race import key_of_seed
    from paceline.kernels.noise import gumbel, position_keys

    key = position_keys(torch.tensor([key_of_seed(seed)]), torch.tensor([position]))
    raced = scores.cpu() + gumbel(key, len(scores), torch.float64)[0]
    return abs(float(raced[a] - raced[b]))


def margin_second(scores: Any, a: int, b: int, seed: int, position: int) -> float:
    """The same with the noise of the second one, from vLLM's own sampler: what has to be added to one of the tokens so
    that it wins, halved until it is known."""
    import torch

    from paceline.integrations.vllm.same_tokens import second_sampler

    device = scores.device
    sample = second_sampler()
    temperature = torch.ones(1, device=device)
    seeds = torch.tensor([seed], device=device)

    def winners(offsets: list[float]) -> list[int]:
        rows = torch.full((len(offsets), len(scores)), -torch.inf, device=device)
        rows[:, a] = 0.0
        rows[:, b] = float(scores[b] - scores[a]) + torch.tensor(offsets, device=device)
        states = torch.zeros(len(offsets), dtype=torch.int32, device=device)
        at = torch.full((len(offsets),), position - 1, device=device)
        return sample(rows, states, temperature, seeds, at, apply_temperature=False).tolist()

    low, high = -64.0, 64.0  # b loses and wins
    while high - low > 1e-5:
        offsets = [low + (high - low) * i / 32 for i in range(1, 32)]
        wins = [winner == b for winner in winners(offsets)]
        first = wins.index(True) if True in wins else len(offsets)
        low, high = ([low, *offsets][first], [*offsets, high][first])
    return abs(high)
