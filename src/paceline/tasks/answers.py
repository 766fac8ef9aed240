"""Where the final answer stands in a text: in <answer> tags, in a LaTeX box, behind GSM8K's ####, behind "the answer
is"."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
HASHED = re.compile(r"####[ \t]*([^\n]+)")
STATED = re.compile(r"answer(?:\*\*)?(?: is|:)(?:\*\*)?:?[ \t]*(?=\S)", re.IGNORECASE)
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
SENTENCE_END = re.compile(r"[.!?](?:\s|$)")
AROUND = " \t*`'\"$.,;:!"
"""Stripped from both ends of an answer: what is around it in a sentence, in Markdown or in LaTeX."""
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")
MAX_DIGITS = 400  # characters; longer numbers are compared as text


def final_answer(text: str) -> str | None:
    """The last one that is marked as such; tags go before everything else. None if nothing is."""
    tagged = TAGGED.findall(text)
    if tagged:
        return tagged[-1].strip()
    found = [(match.start(), match[1]) for match in HASHED.finditer(text)]
    found += [(match.start(), _first_sentence(text[match.end() :])) for match in STATED.finditer(text)]
    found += [(match.start(), boxed) for match in BOX.finditer(text) if (boxed := _in_braces(text, match.end()))]
    if not found:
        return None
    answer = max(found)[1].strip()
    box = BOX.search(answer)  # "the answer is $\boxed{72}$": the box has begun later, but is looked at whole
    return (box and _in_braces(answer, box.end())) or answer


def gold_answer(text: str) -> str:
    """The right answer of a row: behind #### or in a box where a solution leads to it, else all of it."""
    hashed = HASHED.findall(text)
    if hashed:
        return hashed[-1].strip()
    boxes = [boxed for match in BOX.finditer(text) if (boxed := _in_braces(text, match.end()))]
    return boxes[-1] if boxes else text


def same_answer(a: str, b: str) -> bool:
    """Equal up to spaces, case and what is around an answer in a sentence; numbers by value, 1,234.0 as 1234."""
    x, y = _number(a), _number(b)
    if x is not None and y is not None:
        return x == y
    return _plain(a) == _plain(b)


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).strip(AROUND)


def _number(text: str) -> Decimal | None:
    plain = text.strip(AROUND.replace(".", "")).removeprefix("$").rstrip(".%")
    plain = plain.replace("$", "").replace("\\", "")
    if len(plain) > MAX_DIGITS or not NUMBER.fullmatch(plain):
        return None
    try:
        return Decimal(plain.replace(",", ""))
    except InvalidOperation:
        return None


def _first_sentence(text: str) -> str:
    """Of its first line: up to a full stop that is no decimal point."""
    text = text.partition("\n")[0]
    end = SENTENCE_END.search(text)
    return text[: end.start()] if end else text


def _in_braces(text: str, start: int) -> str | None:
    """From behind an opening brace to the one that closes it; None if none does."""
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position].strip()
    return None
