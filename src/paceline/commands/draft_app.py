"""The options of `paceline draft train` and `paceline draft eval`; torch is loaded when one of them runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

draft_app = typer.Typer(help="Train and evaluate drafters.", no_args_is_help=True)


@draft_app.command("train")
def draft_train(
    model: Annotated[str, typer.Option(help="The policy: a folder, a hub id, or 'embedded'.")] = "embedded",
    task: Annotated[
        str, typer.Option(help="The task whose prompts it answers: as task.name in the settings.")
    ] = "countdown",
    out: Annotated[Path, typer.Option(help="Where to put the drafter.")] = Path("drafter"),
    minutes: Annotated[float, typer.Option(min=0.01, help="How long to train.")] = 10.0,
    answers: Annotated[int, typer.Option(min=16, help="Answers to train on.")] = 1024,
    loss: Annotated[str, typer.Option(help="Training loss: soft or overlap.")] = "soft",
    window: Annotated[int, typer.Option(min=8, help="Context of the drafter, in tokens.")] = 512,
    vocab: Annotated[
        int | None,
        typer.Option(
            min=16,
            help="Draft vocabulary, in tokens. Default: all, or of a large one those that cover 99.5 % of answers.",
        ),
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            help="chain: draft tokens one after the other. block: all from one pass, each told the one before it. "
            "parallel: all from one pass, as serving engines can do it."
        ),
    ] = "chain",
    settings: Annotated[list[str] | None, typer.Option("--set", help="Settings as key=value.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, as the last line.")] = False,
) -> None:
    """Let the policy answer prompts, and train a drafter on the answers."""
    from paceline.commands.draft import train_command

    train_command(model, task, out, minutes, answers, loss, window, vocab, settings or [], as_json, kind)


@draft_app.command("eval")
def draft_eval(
    drafter: Annotated[
        str, typer.Argument(help="Folder of the drafter; 'auto' for the one beside the model.")
    ] = "auto",
    model: Annotated[str, typer.Option(help="The policy: a folder, a hub id, or 'embedded'.")] = "embedded",
    task: Annotated[str, typer.Option(help="The task whose prompts it answers.")] = "countdown",
    prompts: Annotated[int, typer.Option(min=1)] = 64,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Settings as key=value.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, as the last line.")] = False,
) -> None:
    """Measure the acceptance of a drafter: by depth, by position in the answer, by temperature."""
    from paceline.commands.draft import eval_command

    eval_command(drafter, model, task, prompts, settings or [], as_json)
