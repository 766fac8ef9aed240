"""Damage, drawn from a seed: to text, to bytes, to values, and to the files of a folder."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

SCALARS: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 10**6, 10**12, 2**31, 2**63, 2**64, 10**30, 10**350, -(10**350), 0.0, -0.5, 0.5,
    1e-300, 1e300, "", " ", "a", "auto", "none", "plain", "1e5", "nan", "../x", "/etc/hostname", "a\nb", "é", "\u2028",
    "\x07", "x" * 3000, [], {}, [[]], [None], {"a": 1},
]  # fmt: skip
ODD_TEXT = [
    "\x00", "\t", "\r", "\n", "\x85", "\u2028", "\ufeff", "\ud800", "\udcff", "é", "🙂", "'", '"', "[", "]", "{", "}",
    ":", "- ", "? ", "&a ", "*a", "!!", "%", "@", "`", "|", ">", "#", "<<: ", "---\n", "...\n", "~", "=", ",", "\\",
]  # fmt: skip
ODD_BYTES = [b"\xff", b"\x00", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\xfe\xff", b"\n", b'"', b"{", b"]", b"NaN"]
TOO_LONG = 10
"""Seconds after which something is said to hang."""


class Hang(Exception):
    """It took too long."""


@contextmanager
def watchdog(seconds: int = TOO_LONG) -> Iterator[None]:
    """Turns a hang of this process into a failure; main thread only."""

    def bark(number: int, frame: FrameType | None) -> None:
        raise Hang(f"still at it after {seconds} s")

    before = signal.signal(signal.SIGALRM, bark)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


_secrets: set[str] = set()
_read: list[str] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    """Python tells of every file that is about to be opened."""
    if event == "open" and _secrets and isinstance(args[0], str | bytes | os.PathLike):
        through_links = not (args[2] or 0) & os.O_NOFOLLOW
        path = os.path.realpath(os.fsdecode(args[0])) if through_links else ""
        if path in _secrets:
            _read.append(os.fsdecode(args[0]))


sys.addaudithook(_audit)


@contextmanager
def untouched(secret: Path) -> Iterator[None]:
    """Fails if a file outside is opened, under whatever name."""
    _read.clear()
    _secrets.add(os.path.realpath(secret))
    try:
        yield
    finally:
        _secrets.clear()
    assert not _read, f"{_read[0]} leads out of the folder, and was opened"


def mutate_text(dice: random.Random, text: str) -> str:
    """A few cuts, repetitions and odd characters."""
    for _ in range(dice.choice((1, 1, 2, 5))):
        at = dice.randrange(len(text) + 1)
        end = min(len(text), at + dice.choice((1, 2, 8, 40)))
        act = dice.randrange(7)
        if act == 0:
            text = text[:at] + dice.choice(ODD_TEXT) + text[at:]
        elif act == 1:
            text = text[:at] + text[end:]
        elif act == 2:
            text = text[:at]
        elif act == 3:
            text = text[:end] + text[at:end] * dice.choice((1, 3, 50)) + text[end:]
        elif act == 4:
            text = text[:at] + chr(dice.choice((dice.randrange(128), dice.randrange(0x3000)))) + text[at + 1 :]
        elif act == 5:
            text = text[:at] + dice.choice("[{") * dice.choice((3, 120, 3000)) + text[at:]
        else:
            text = text[:at] + dice.choice("0123456789") * dice.choice((3, 400, 5000)) + text[at:]
    return text


def mutate_bytes(dice: random.Random, data: bytes) -> bytes:
    for _ in range(dice.choice((1, 1, 3))):
        at = dice.randrange(len(data) + 1)
        act = dice.randrange(6)
        if act == 0:
            data = data[:at]
        elif act == 1:
            data = data[:at] + dice.choice(ODD_BYTES) + data[at:]
        elif act == 2:
            data = data[:at] + bytes([dice.randrange(256)]) + data[at + 1 :]
        elif act == 3:
            data = data[:at] + data[at + dice.choice((1, 9, 200)) :]
        elif act == 4:
            data = data[:at] + bytes(dice.choice((1, 64, 4096))) + data[at:]
        else:
            data = data[at:] + data[:at]
    return data


def mutate_value(dice: random.Random, value: Any) -> Any:
    """Another value in one place of a nest of lists and dicts: something else, nothing, or one too many."""
    holders = [(None, None), *_places(value)]
    holder, key = dice.choice(holders)
    new = dice.choice(SCALARS)
    if dice.random() < 0.05:
        for _ in range(dice.choice((30, 150))):
            new = [new] if dice.random() < 0.5 else {"a": new}
    if holder is None:
        return new if dice.random() < 0.2 else value
    act = dice.randrange(4)
    if act == 0 and isinstance(holder, dict):
        del holder[key]
    elif act == 1 and isinstance(holder, dict):
        holder[dice.choice(("", "step", "odd", str(key) + "x"))] = new
    elif act == 2 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] = dice.choice((-holder[key], holder[key] + 1, holder[key] * 10**9, str(holder[key]), [holder[key]]))
    else:
        holder[key] = new
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    stack = [value]
    while stack:
        one = stack.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else []
        for key in keys:
            yield one, key
            stack.append(one[key])


def json_text(dice: random.Random, value: Any) -> str:
    """JSON, now and then with constants that it does not have."""
    text = json.dumps(value)
    if dice.random() < 0.1:
        numbers = [part for part in ("0", "1", "0.5", "null") if f": {part}" in text]
        if numbers:
            text = text.replace(f": {dice.choice(numbers)}", f": {dice.choice(('NaN', 'Infinity', '-Infinity'))}", 1)
    return text


def damage(dice: random.Random, file: Path, secret: Path) -> str:
    """Spoil a file -> what was done to it. `secret` is a file outside, to which links are made."""
    acts: list[Callable[[random.Random, Path, Path], str]] = [_bytes, _bytes, _in_place]
    if file.suffix in (".json", ".jsonl", ".yaml") and file.is_file():
        acts += [_values] * 5
    try:
        return dice.choice(acts)(dice, file, secret)
    except (ValueError, yaml.YAMLError):  # a file without values any more: it was spoiled before
        return _bytes(dice, file, secret)


def _bytes(dice: random.Random, file: Path, secret: Path) -> str:
    data = file.read_bytes()
    near = data[:4096] if dice.random() < 0.5 else data
    file.write_bytes(mutate_bytes(dice, near) + data[len(near) :])
    return f"bytes of {file.name}"


def _values(dice: random.Random, file: Path, secret: Path) -> str:
    text = file.read_text()
    if file.suffix == ".yaml":
        file.write_text(json_text(dice, mutate_value(dice, yaml.safe_load(text))))
    elif file.suffix == ".json" and not text.startswith("[\n"):
        file.write_text(json_text(dice, mutate_value(dice, json.loads(text))))
    else:  # a value per line
        lines = text.splitlines()
        at = dice.choice([i for i, line in enumerate(lines) if line.startswith("{")] or [0])
        comma = "," if lines and lines[at].endswith(",") else ""
        if lines:
            lines[at] = json_text(dice, mutate_value(dice, json.loads(lines[at].rstrip(",")))) + comma
        act = dice.randrange(6)
        if act == 0 and lines:
            lines.insert(at, lines[-1 - at])
        elif act == 1 and lines:
            del lines[at]
        file.write_text("\n".join(lines) + ("\n" if dice.random() < 0.8 else ""))
    return f"a value of {file.name}"


def _in_place(dice: random.Random, file: Path, secret: Path) -> str:
    """Something else where the file was."""
    data = file.read_bytes()
    file.unlink()
    kind = dice.choice(
        ("nothing", "empty", "folder", "pipe", "dangling link", "link out", "link to itself", "unreadable")
    )
    if kind == "empty":
        file.touch()
    elif kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "dangling link":
        file.symlink_to(file.parent / "nowhere")
    elif kind == "link out":
        secret.write_bytes(data)
        file.symlink_to(secret)
    elif kind == "link to itself":
        file.symlink_to(file)
    elif kind == "unreadable":
        file.write_bytes(data)
        file.chmod(0)
    return f"{kind} for {file.name}"
