"""The options of `paceline eval`; torch is loaded when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def eval_options(
    what: Annotated[str, typer.Argument(metavar="MODEL|RUN", help="A folder, a hub id, 'embedded', or a run.")],
    task: Annotated[
        str | None, typer.Option(help="What to evaluate on, as eval.task in the settings; a run may have its own.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Of a run: newest, best, or the number of a step; 0 is the model it began with.")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(help="Compare with this too: a checkpoint of the same run, a model or a run. Can be repeated."),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Sampled answers per prompt.")] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Prompts; all of a data set by default.")] = None,
    greedy: Annotated[bool | None, typer.Option("--greedy/--no-greedy", help="A greedy answer per prompt too.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Of the samples; 0 is greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Other settings as key=value.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write everything as JSON to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Evaluate a model or a checkpoint, or compare several on equal dice: the same prompts with the same noise."""
    given = {
        "eval.task": task,
        "eval.samples": samples,
        "eval.prompts": prompts,
        "eval.greedy": None if greedy is None else str(greedy).lower(),
        "eval.temperature": temperature,
        "eval.max_tokens": max_tokens,
    }
    words = [*(settings or []), *(f"{key}={value}" for key, value in given.items() if value is not None)]
    from paceline.commands.evaluate import eval_command

    eval_command(what, checkpoint, against or [], words, Console(highlight=False), as_json, out)
