"""The commands. Each reads its settings, calls the package that does the work and prints the result. Imports stand in
the commands, so that help and bad settings do not wait for torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from paceline.commands.draft_app import draft_app
from paceline.commands.eval_options import eval_options
from paceline.commands.words import UNKNOWN_OPTIONS, for_terminal, split_words
from paceline.errors import RenamedSetting, RunError, Stopped, UserError
from paceline.process.waiting import choose_waiting


class Commands(TyperGroup):
    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as err:  # Ctrl-C where nothing is to be saved, or a second one
            stopped = Stopped(str(err) or "stopped")
            stopped.exit_code = getattr(err, "exit_code", stopped.exit_code)
            raise stopped from err


app = typer.Typer(
    cls=Commands,
    help="Reinforcement learning for reasoning language models without waiting for the slowest answer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
DECODING = ("train", "compare", "generate", "eval", "draft")
"""Commands that decode, on a CPU with several threads."""
Words = Annotated[
    list[str] | None, typer.Argument(help="A recipe (a .yaml file or a name), then settings as key=value.")
]


def _show_version(wanted: bool) -> None:
    if wanted:
        from paceline.version import __version__

        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of `paceline` itself."""


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@app.command(context_settings=UNKNOWN_OPTIONS)
def train(
    words: Words = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this directory.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Train a policy. Without arguments: the embedded reasoner on Countdown."""
    from paceline.commands.trained import print_summary
    from paceline.config import describe_recipe, load_config
    from paceline.observe.live import LiveView

    recipe, overrides = split_words(words, ("--resume", "--quiet", "--help"))
    if resume and recipe:
        raise UserError(f"--resume takes settings to change, as key=value, and no recipe: leave out {recipe}")
    console = Console(highlight=False, quiet=quiet)
    run_before = None
    if resume:
        from paceline.config import COMMAND_LINE, read_overrides
        from paceline.run import Run

        run_before = Run.open(resume, read_overrides(overrides), COMMAND_LINE)
        config = run_before.config
    else:
        config = load_config(recipe, overrides)
        console.print(describe_recipe(recipe, overrides), soft_wrap=True, markup=False)
    with LiveView(config, console) as view:
        view.loading("PyTorch")
        from paceline.loop import train as run_training  # after the settings are checked

        try:
            run_training(config, run_before, view)
        finally:  # also of a run that was stopped, before the sentence that says how to resume it
            view.stop()
            if view.rewards and view.folder:
                print_summary(view, view.folder)


@app.command()
def generate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|RUN", help="A folder, a hub id, 'embedded', or a run: its newest policy.")
    ],
    prompt: Annotated[str, typer.Option(help="What to answer.")],
    system: Annotated[str | None, typer.Option(help="A system message before it.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0)] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    min_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1)] = 1024,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    samples: Annotated[int, typer.Option(min=1, help="How many answers.")] = 1,
    raw: Annotated[bool, typer.Option(help="Take the prompt as it is, without the chat template.")] = False,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt. The same seed gives the same answers."""
    from paceline.commands.generate import generate_command

    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "max_tokens": max_tokens}
    generate_command(model, prompt, system, raw, as_json, samples, seed, sampling)


@app.command(context_settings=UNKNOWN_OPTIONS)
def compare(words: Words = None, as_json: AsJson = False) -> None:
    """Roll out every step of a recipe with and without speculation: how much faster is it, are the tokens the same?"""
    from paceline.config import describe_recipe, load_config

    config = load_config(*split_words(words, ("--json", "--help")))
    from paceline.commands.compare import run_comparison

    console = Console(highlight=False, stderr=as_json)
    console.print(describe_recipe(*split_words(words)), soft_wrap=True, markup=False)
    run_comparison(config, console, as_json)


@app.command(context_settings=UNKNOWN_OPTIONS)
def plan(
    words: Words = None,
    compare: Annotated[bool, typer.Option(help="For `paceline compare`, which has an engine for each mode.")] = False,
) -> None:
    """Show the device memory that a run would need, part by part, and whether it fits."""
    from paceline.config import describe_recipe, load_config

    config = load_config(*split_words(words))
    from paceline.setup.engines import refuse_other_engines
    from paceline.setup.memory import show_plan

    console = Console(highlight=False)
    refuse_other_engines(config, "paceline plan")
    table = show_plan(config, compare)
    console.print(describe_recipe(*split_words(words)), soft_wrap=True, markup=False)
    console.print(table)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The run's directory; it may still be going on.")],
    out: Annotated[Path | None, typer.Option(help="Where to put the page; RUN/report.html by default.")] = None,
) -> None:
    """Show a run as one page: where the time went, how it learned, whether speculation was worth it."""
    from paceline.report.lost_workers import describe_losses, find_losses
    from paceline.report.page import write_report
    from paceline.report.rundata import read_run
    from paceline.report.savings_text import full_answer, short_answer
    from paceline.report.wall_clock import describe_wall_clock

    try:
        page, savings = write_report(run, out)
    except OSError as err:
        raise UserError(f"the report cannot be written to {out or run}: {err.strerror}") from err
    console = Console(highlight=False)
    found = read_run(run)
    if headline := describe_wall_clock(found, savings):
        console.print(headline, style="bold")
    console.print(short_answer(savings))
    for sentence in [*full_answer(savings), *describe_losses(find_losses(found))]:
        console.print(sentence, markup=False)
    console.print(f"report: {page}", soft_wrap=True, markup=False)


app.command("eval")(eval_options)
app.add_typer(draft_app, name="draft")


@app.command()
def export(
    what: Annotated[str, typer.Argument(metavar="RUN|DRAFTER", help="A run, a checkpoint, a drafter, or 'embedded'.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    form: Annotated[str, typer.Option("--format", help="vllm, sglang, speculators or paceline.")] = "vllm",
    policy: Annotated[bool, typer.Option("--policy", help="Export the policy instead of its drafter.")] = False,
    adapter: Annotated[bool, typer.Option(help="Export the LoRA adapters alone, in PEFT's form.")] = False,
    model: Annotated[str | None, typer.Option(help="The policy of a drafter that does not lie beside it.")] = None,
    policy_name: Annotated[
        str | None, typer.Option(help="What engines will call the policy: a folder or a hub id.")
    ] = None,
    depth: Annotated[int, typer.Option(min=1, help="Draft tokens per verification in the config for the engine.")] = 5,
    measure: Annotated[bool, typer.Option("--measure", help="Measure the accept length for the card.")] = False,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to measure on.")] = 64,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Settings for measuring, as key=value.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a drafter as vLLM, SGLang or speculators load it, or a policy or its LoRA adapters as Hugging Face's
    libraries do."""
    from paceline.integrations.export import export_command

    export_command(
        what,
        out,
        policy,
        adapter,
        form=form,
        model=model,
        policy_name=policy_name,
        depth=depth,
        measure=prompts if measure else 0,
        settings=settings,
        as_json=as_json,
    )


@app.command()
def doctor() -> None:
    """Show the hardware and packages of this machine, and what Paceline uses them for."""
    from paceline.observe.doctor import check_machine

    table = Table("", "", "found", "used for", box=None, padding=(0, 2, 0, 0))
    for f in check_machine():
        table.add_row("[green]✓[/]" if f.good else "[yellow]–[/]", f.name, f.found, f.used_for.replace("[", r"\["))
    Console(highlight=False).print(table)


@app.command()
def simulate(
    run: Annotated[Path, typer.Argument(help="The run's directory: its costs, lengths and rounds are taken.")],
    workers: Annotated[str | None, typer.Option(help="How many, as 1,2,8; as many as the run had by default.")] = None,
    weak: Annotated[
        bool, typer.Option("--weak", help="As many requests per worker as in the run, not in all.")
    ] = False,
    gpu: Annotated[str | None, typer.Option(help="On another GPU: its name, such as H100.")] = None,
    measured_on: Annotated[str | None, typer.Option(help="The GPU that the run was made on; --gpu needs it.")] = None,
    tokens_per_flip: Annotated[
        float | None, typer.Option(min=1.0, help="Tokens that neighbouring policies write alike.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what the steps of a run would take on other workers, and what each technique gives there."""
    from paceline.commands.simulate import SimOptions, parse_workers, simulate_command

    options = SimOptions(parse_workers(workers), weak, gpu, measured_on, tokens_per_flip)
    simulate_command(run, options, as_json)


@app.command()
def settings(
    word: Annotated[str, typer.Argument(help="Only those that have this in their name, text or name elsewhere.")] = "",
    as_json: AsJson = False,
) -> None:
    """List settings with their types, defaults and choices, and what TRL, verl and vLLM call them."""
    from paceline.commands.listing import print_settings

    print_settings(word, as_json)


@app.command()
def recipes(as_json: AsJson = False) -> None:
    """List the recipes that ship with Paceline, and what each needs: `paceline train NAME` runs one."""
    from paceline.commands.listing import print_recipes

    print_recipes(as_json)


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="Where runs are.")] = Path("runs"), as_json: AsJson = False
) -> None:
    """List runs with their state: finished, running, stopped at a step, or failed."""
    from paceline.commands.listing import print_runs

    print_runs(folder, as_json)


def main() -> None:
    warnings.formatwarning = _format_warning
    if sys.argv[1:2] and sys.argv[1] in DECODING:
        choose_waiting()  # before torch is loaded
    try:
        app()
    except (UserError, RunError) as err:
        _say_last(f"paceline: {err}")
        sys.exit(err.exit_code)


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Python's own form names a line of code, which is of no use for a setting on the command line or in a recipe."""
    if issubclass(category, RenamedSetting):
        return f"paceline: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _say_last(text: str) -> None:
    """To a terminal that may be closed: the exit code must be right all the same."""
    try:
        if sys.stderr.isatty():
            text = for_terminal(text, shutil.get_terminal_size().columns)
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), sys.stderr.fileno())


if __name__ == "__main__":
    main()
