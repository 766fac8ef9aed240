"""Whether two samples of tokens have one law: the chi-square test of homogeneity."""

from __future__ import annotations

from collections import Counter

RARE = 5  # expected counts below this are pooled


def homogeneity(one: list[int], other: list[int]) -> tuple[float, int]:
    """p-value of the two having one law, tokens that are too rare pooled; and how many kinds there are."""
    counts = [Counter(one), Counter(other)]
    share = min(len(one), len(other)) / (len(one) + len(other))
    tokens = set(one) | set(other)
    common = [t for t in tokens if (counts[0][t] + counts[1][t]) * share >= RARE]
    table = [[c[t] for t in common] for c in counts]
    for row, drawn in zip(table, (one, other), strict=True):
        if len(common) < len(tokens):
            row.append(len(drawn) - sum(row))
    totals = [sum(column) for column in zip(*table, strict=True)]
    statistic = 0.0
    for row, drawn in zip(table, (one, other), strict=True):
        expected = [total * len(drawn) / (len(one) + len(other)) for total in totals]
        statistic += sum((seen - e) ** 2 / e for seen, e in zip(row, expected, strict=True))
    return (chi_square_tail(statistic, len(totals) - 1) if len(totals) > 1 else 1.0), len(totals)


def chi_square_tail(statistic: float, freedom: int) -> float:
    import torch

    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
