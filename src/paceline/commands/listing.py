"""`paceline settings`, `paceline recipes` and `paceline runs`: what there is, as text or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from paceline.config import did_you_mean, find_settings, read_recipes, translate
from paceline.config.foreign import ENGINES
from paceline.errors import UserError
from paceline.files.reading import shorten


def print_settings(word: str, as_json: bool) -> None:
    found = find_settings(word)
    if not found:
        meant = did_you_mean(word)
        hint = translate(word) or (f"did you mean '{meant}'?" if meant else "`paceline settings` lists them all")
        raise UserError(f"no setting has '{shorten(word)}' in its name or description; {hint}")
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=2))
        return
    console = Console(highlight=False)
    for one in found:
        console.print(Text.assemble((one.name, "bold"), " = ", one.default, (f"   {one.type}", "dim")), soft_wrap=True)
        theirs = [name for name in one.elsewhere if not name.startswith(ENGINES)]
        also = f" ({'; '.join(theirs)})" if theirs and word else ""
        console.print(Padding(Text(one.description + also), (0, 0, 0, 4)))


def print_recipes(as_json: bool) -> None:
    recipes = read_recipes()
    if as_json:
        print(json.dumps([asdict(one) for one in recipes], indent=2))
        return
    console = Console(highlight=False)
    for one in recipes:
        console.print(Text.assemble((one.name, "bold"), f"   {one.about}"), soft_wrap=True)
        console.print(Padding(Text(f"needs {one.needs}"), (0, 0, 0, 4)))
    console.print("\npaceline train NAME [key=value ...]", markup=False)


def print_runs(folder: Path, as_json: bool) -> None:
    from paceline.run.state import find_runs

    runs = find_runs(folder)
    if as_json:
        print(json.dumps([asdict(one) for one in runs], indent=2))
        return
    console = Console(highlight=False)
    if not runs:
        console.print(f"no runs in {folder}", markup=False)
    colours = {"finished": "green", "running": "cyan", "failed": "red"}
    for run in runs:
        reward = "" if run.reward is None else f"   reward {run.reward:.3f}"
        steps = f"   step {run.step} of {run.steps}" if run.steps else ""
        state = (run.state, colours.get(run.state, "yellow"))
        console.print(Text.assemble((run.folder, "bold"), "   ", state, steps, reward), soft_wrap=True)
        if run.why:
            console.print(Padding(Text(run.why), (0, 0, 0, 4)))
