"""Countdown: combine the numbers with + - * / so that they make the target, each number exactly once.

Problems are generated from a seed, so there is no data to ship, and checked exactly, so there is nothing to game.
"""

from __future__ import annotations

import ast
import random
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from paceline.core import Prompt, Sample, mix_seed
from paceline.errors import UserError
from paceline.tasks.sample import SampleOrder, text_of

Style = Literal["search", "chat", "text"]


@dataclass(frozen=True)
class Level:
    counts: tuple[int, ...]
    """How many numbers a problem has; drawn evenly."""
    largest: int
    """The numbers lie between 1 and this."""
    targets: tuple[int, int]
    """Smallest and largest target. Large ones need products, which are hard to see coming."""


LEVELS = {
    "easy": Level((3,), 20, (1, 100)),
    "medium": Level((4,), 99, (1, 500)),
    "hard": Level((4,), 50, (100, 500)),
    "expert": Level((5, 6), 99, (100, 999)),
}
# Mostly quick, now and then very long: a step of 16 prompts has one problem that hardly any search solves.
_QUICK = (LEVELS["easy"], LEVELS["medium"]) * 3 + (LEVELS["easy"],)
TAIL = (*_QUICK, Level((5,), 99, (100, 999)), LEVELS["medium"], *_QUICK[:6], Level((6,), 99, (200, 999)))
CYCLES = {name: (level,) for name, level in LEVELS.items()} | {"tail": TAIL}
"""The levels of each difficulty, one problem after the other: all stretches of that length are of the same mix."""

CHAT = (
    "Using each of the numbers {numbers} exactly once, and only + - * / and parentheses, write an expression that "
    "equals {target}. Think step by step inside <think> </think>, then give the expression inside <answer> </answer>, "
    "for example <answer>(1 + 2) / 3</answer>."
)


@dataclass(frozen=True)
class Problem:
    numbers: tuple[int, ...]
    """In ascending order."""
    target: int


class Countdown:
    name = "countdown"
    reward = "countdown"

    def __init__(self, difficulty: str = "medium", style: Style = "search", seed: int = 0, problems: int | None = None):
        if difficulty not in CYCLES:
            raise UserError(f"task.difficulty = '{difficulty}' is none of {', '.join(CYCLES)}")
        self.levels = CYCLES[difficulty]
        self.style = style
        self.seed = mix_seed(seed, "countdown", difficulty)
        self.order = SampleOrder(problems, self.seed) if problems else None

    def sample(self, index: int) -> Sample:
        which = self.order.at(index) if self.order else index
        level = self.levels[which % len(self.levels)]
        problem = make_problem(level, random.Random(mix_seed(self.seed, which)))
        columns = {"numbers": list(problem.numbers), "target": problem.target}
        return Sample(index, prompt_of(problem, self.style), columns)


def prompt_of(problem: Problem, style: Style) -> Prompt:
    if style == "search":
        return f"Make {problem.target} from {' '.join(map(str, problem.numbers))}.\n"
    text = CHAT.format(numbers=", ".join(map(str, problem.numbers)), target=problem.target)
    return [{"role": "user", "content": text}] if style == "chat" else text + "\n"


def make_problem(level: Level, r: random.Random) -> Problem:
    """A random problem that has a solution: combine random numbers at random and take what comes out as the target."""
    while True:
        numbers = [r.randint(1, level.largest) for _ in range(r.choice(level.counts))]
        pool = list(numbers)
        while len(pool) > 1:
            i, j = r.sample(range(len(pool)), 2)
            high, low = max(pool[i], pool[j]), min(pool[i], pool[j])
            values = [high + low, high - low, high * low] + ([high // low] if low and high % low == 0 else [])
            pool = [x for k, x in enumerate(pool) if k not in (i, j)] + [r.choice(values)]
        if level.targets[0] <= pool[0] <= level.targets[1] and pool[0] not in numbers:
            return Problem(tuple(sorted(numbers)), pool[0])


ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")"})
LONGEST_EXPRESSION = 200  # characters; longer ones are wrong answers and not parsed


def solves(text: str, numbers: list[int], target: int) -> bool:
    """Whether the last <answer> in `text` makes the target from the numbers, each exactly once, exactly."""
    answers = ANSWER.findall(text)
    if not answers:
        return False
    expression = answers[-1].translate(SIGNS).split("=")[0].strip()
    if len(expression) > LONGEST_EXPRESSION:
        return False
    try:
        used: list[int] = []
        value = _evaluate(ast.parse(expression, mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False  # not an expression of the four operations: a wrong answer, not an error
    return sorted(used) == sorted(numbers) and value == target


def _evaluate(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp):
        a = _evaluate(node.left, used)
        b = _evaluate(node.right, used)
        match node.op:
            case ast.Add():
                return a + b
            case ast.Sub():
                return a - b
            case ast.Mult():
                return a * b
            case ast.Div():
                return a / b
    raise ValueError("only whole numbers and + - * / count")


def reward(completions: list[Any], numbers: list[list[int]], target: list[int], **_: Any) -> list[float]:
    """1 for an answer that solves its problem, else 0."""
    return [float(solves(text_of(c), n, t)) for c, n, t in zip(completions, numbers, target, strict=True)]
