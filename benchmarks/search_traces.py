"""How the embedded reasoner learned to think: depth-first search for Countdown, written down move by move.

A line is a move and the numbers it leaves, `33+32=65: 3 17 65`; with two numbers left, results are tried in a row,
`65-14=51,65+14=79,`, until one is the target (`!`). Searchers differ in how many moves they consider, how well they
order them, and how soon they give up, so the model that learns from their traces has better and worse habits to choose
from: what reinforcement learning then sorts out. Answers have a long tail, because search does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.tasks.countdown import Problem

MAX_RESULT = 999  # larger products are not pursued
Number = tuple[int, str]  # a value and the expression that made it


@dataclass(frozen=True)
class Searcher:
    breadth: int
    """Moves considered before going back."""
    noise: float
    """0 orders moves by how near they can come to the target in one more move; more is more random."""
    patience: int
    """Results tried before giving up."""

    @classmethod
    def draw(cls, r: random.Random, patience: tuple[float, float] = (1.5, 7.0)) -> Searcher:
        """`patience` is the range of its binary logarithm: many give up soon, a few go on for very long."""
        return cls(r.choice((3, 4, 6, 8)), r.choice((0.3, 2.0, 5.0)), int(2 ** r.uniform(*patience)))

    @classmethod
    def draw_patient(cls, r: random.Random, numbers: int) -> Searcher:
        """One whose patience grows with the problem: up to about 7500 characters for six numbers."""
        return cls.draw(r, {5: (4.0, 8.0), 6: (5.0, 9.0)}.get(numbers, (1.5, 7.0)))


def write_trace(problem: Problem, searcher: Searcher, r: random.Random) -> tuple[str, str | None]:
    """The text of a search, and the expression that it found, if any."""
    lines: list[str] = []
    search = _Search(problem.target, searcher, r, lines)
    found = search.run([(x, str(x)) for x in problem.numbers])
    return "".join(lines), found


def full_answer(problem: Problem, searcher: Searcher, r: random.Random) -> str:
    thoughts, found = write_trace(problem, searcher, r)
    return f"<think>\n{thoughts}</think>\n<answer>{found or '?'}</answer>"


class _Search:
    def __init__(self, target: int, searcher: Searcher, r: random.Random, lines: list[str]):
        self.target = target
        self.searcher = searcher
        self.r = r
        self.lines = lines
        self.tried = 0

    def run(self, numbers: list[Number]) -> str | None:
        numbers = sorted(numbers)
        last = len(numbers) == 2
        moves = sorted(_moves(numbers), key=lambda move: self._distance(move, last))
        for a, sign, b, value, rest in moves[: 4 if last else self.searcher.breadth]:
            if self.tried >= self.searcher.patience:
                return None
            self.tried += 1
            made = (value, f"{_bracket(a[1])}{sign}{_bracket(b[1])}")
            self.lines.append(f"{a[0]}{sign}{b[0]}={value}")
            if last:
                if value == self.target:
                    self.lines.append("!\n")
                    return made[1]
                self.lines.append(",")
                continue
            left = sorted([*rest, made])
            self.lines.append(f": {' '.join(str(x) for x, _ in left)}\n")
            found = self.run(left)
            if found:
                return found
        if last:
            self.lines.append("\n")
        return None

    def _distance(self, move: tuple[Number, str, Number, int, list[Number]], last: bool) -> float:
        value, rest = move[3], move[4]
        near = abs(value - self.target)
        if last:
            return near + self.searcher.noise * self.r.random() * (near + 20)
        for other, _ in rest:
            for result in (value + other, abs(value - other), value * other):
                near = min(near, abs(result - self.target))
        return near + self.searcher.noise * self.r.random() * 60


def _moves(numbers: list[Number]) -> Iterator[tuple[Number, str, Number, int, list[Number]]]:
    """Two numbers combined, the larger first, each way once, leaving out what gains nothing."""
    seen = set()
    for i, a in enumerate(numbers):
        for j, b in enumerate(numbers[:i]):
            high, low = a[0], b[0]
            if (high, low) in seen:
                continue
            seen.add((high, low))
            rest = [x for k, x in enumerate(numbers) if k not in (i, j)]
            yield a, "+", b, high + low, rest
            if high > low:
                yield a, "-", b, high - low, rest
            if low > 1:
                if high * low <= MAX_RESULT:
                    yield a, "*", b, high * low, rest
                if high % low == 0:
                    yield a, "/", b, high // low, rest


def _bracket(expression: str) -> str:
    return expression if expression.isdigit() else f"({expression})"
