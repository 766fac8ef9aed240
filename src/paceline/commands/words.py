"""The words of `paceline train`, `plan` and `compare`: a recipe, then settings as key=value."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Sequence

from paceline.errors import UserError
from paceline.files.reading import shorten

UNKNOWN_OPTIONS = {"ignore_unknown_options": True}
"""For a command's context: what looks like an option and is none comes as a word, and is explained here."""


def split_words(words: Sequence[str] | None, options: Sequence[str] = ()) -> tuple[str | None, list[str]]:
    """The recipe, if one was named, and the overrides. `options` are those that the command has."""
    recipe = None
    overrides = []
    rest = list(words or [])
    for i, word in enumerate(rest):
        if word.startswith("-"):
            raise UserError(_not_an_option(word, rest[i + 1] if i + 1 < len(rest) else None, options))
        if "=" in word:
            overrides.append(word)
        elif recipe is None:
            recipe = word
        else:
            raise UserError(f"two recipes were named, {recipe} and {word}; a run has one")
    return recipe, overrides


def _not_an_option(word: str, following: str | None, options: Sequence[str]) -> str:
    """Options are how other trainers take their settings: `--steps 5` is steps=5 here."""
    from paceline.config import did_you_mean, setting_names
    from paceline.config.foreign import as_setting, find_foreign, plain_name

    name, eq, value = word.partition("=")
    shown = shorten(word)
    if close := difflib.get_close_matches(name, options, n=1, cutoff=0.75):
        return f"{shown} is not an option; did you mean {close[0]}?"
    if not eq and following is not None and "=" not in following and not following.startswith("-"):
        value = following
        shown = f"{shown} {shorten(following)}"
    theirs = find_foreign(name)
    if theirs is not None and as_setting(theirs) not in setting_names():
        instead = f"write {theirs.here}" if theirs.here else theirs.note
        return f"{shown} is not an option: {theirs.library}'s {theirs.name} is not a setting here; {instead}"
    key = as_setting(theirs) if theirs else did_you_mean(plain_name(name))
    if key is None or key not in setting_names():
        return f"{shown} is not an option: settings are written as key=value; `paceline settings WORD` finds one"
    note = f" ({theirs.note})" if theirs and theirs.note else ""
    return f"{shown} is not an option: settings are written as key=value, here {key}={shorten(value) or '...'}{note}"


def for_terminal(text: str, width: int) -> str:
    """A sentence wrapped between words; the command that it tells to type has lines of its own, to be copied."""
    lines = []
    for part in text.replace(": paceline ", ":\npaceline ").split("\n"):
        lines += textwrap.wrap(part, width, break_long_words=False, break_on_hyphens=False) or [part]
    return "\n".join(lines)
