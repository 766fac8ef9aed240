"""What a person reads while a run goes on."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from paceline.commands.words import for_terminal
from paceline.config import load_config
from paceline.observe.live import LiveView, wrapped
from paceline.observe.phase import Phase
from paceline.observe.step_text import fitted_line, line_of
from paceline.observe.summary import summary

STEP = {
    "critic/rewards/mean": 0.5,
    "response_length/mean": 155.0,
    "response_length/p50": 120.0,
    "response_length/p99": 660.0,
    "rollout/tok_s": 4356.0,
    "timing_s/step": 6.4,
    "timing_s/gen": 2.3,
    "timing_s/reward": 0.002,
    "timing_s/end_rollout": 0.04,
    "timing_s/update_actor": 3.9,
    "timing_s/merge_drafter": 0.1,
    "timing_s/save_checkpoint": 0.0,
}
TWO = {"cluster/workers": 2.0, "cluster/lost": 0.0, "cluster/idle_s": 0.2, "cluster/training_s": 1.3}
LEARNED = {"groups/mixed": 0.5, "response_length/clip_ratio": 0.25, "actor/entropy": 0.41, "actor/grad_norm": 0.7}


def test_a_line_leaves_out_what_took_no_time():
    assert line_of(3, 21, STEP) == (
        "step  3/21  reward 0.500  length 155 (p99 660)  4,356 tokens/s  6.4 s = gen 2.3 + update_actor 3.9 "
        "+ merge_drafter 0.1"
    )
    short = {name: 0.01 if name.startswith("timing_s") else value for name, value in STEP.items()}
    assert line_of(1, 1, short).endswith("4,356 tokens/s  0.0 s")


def test_a_line_says_what_workers_did():
    assert line_of(3, 21, STEP | TWO).endswith("+ merge_drafter 0.1  2 workers, 1.3 s of drafter training in idle time")
    alone = TWO | {"cluster/workers": 1.0, "cluster/lost": 1.0, "cluster/training_s": 0.0}
    assert line_of(3, 21, STEP | alone).endswith("  1 worker, 1 lost")


def test_a_line_fits_the_terminal():
    lines = {width: fitted_line(3, 21, STEP | TWO | LEARNED, width) for width in (40, 80, 120, 400)}
    assert lines[40] == "step  3/21  reward 0.500  6.4 s"
    assert lines[80] == "step  3/21  reward 0.500  length 155  4,356 tokens/s  6.4 s  mixed 50%"
    assert "update_actor 3.9  gen 2.3" in lines[120] and "mixed 50%  cut 25%" in lines[120]
    assert lines[400].endswith("grad 0.70  2 workers, 1.3 s of drafter training in idle time")
    assert all(len(line) <= width for width, line in lines.items())


def test_the_table_at_the_end_says_what_workers_did():
    console = Console(file=StringIO(), width=120)
    console.print(summary([STEP | TWO, STEP | TWO | {"cluster/lost": 1.0}]))
    assert "2, 1 lost, 2.6 s of drafter training in idle time" in console.file.getvalue()


def test_the_phase_and_how_far_it_is():
    now = [0.0]
    phase = Phase(lambda: now[0])
    phase.begin("loading", "the model")
    now[0] = 2.0
    assert phase.words() == "loading  the model  2.0 s"
    phase.begin("gen")
    phase.count(32)
    phase.done, phase.tokens = 8, 1000
    now[0] = 4.0
    assert phase.words() == "rollout  " + "━" * 5 + "╌" * 15 + "  8/32 answers  500 tokens/s"
    phase.begin("update_actor")
    now[0] = 8.0
    assert phase.words() == "update  4.0 s", "nobody knows how long it takes"
    phase.begin("gen")
    phase.begin("update_actor")
    now[0] = 9.0
    assert phase.words() == "update  " + "━" * 5 + "╌" * 15 + "  1.0 of about 4.0 s"
    phase.begin("save_checkpoint")
    assert phase.words().startswith("saving  ")


@pytest.mark.parametrize("width", [60, 80])
def test_lines_on_a_terminal_end_between_words(width):
    console = Console(file=StringIO(), width=width, force_terminal=True, color_system=None)
    view = LiveView(load_config(None, ["steps=2"]), console)
    text = "prompts that are too long are left out: 3 of 40, the first one is line 7 of /a/folder/data.jsonl"
    view.note(text)
    view.say(text)
    view.step_done(1, STEP | TWO | LEARNED)
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines) and len(lines) == 5
    assert " ".join(" ".join(lines[:2]).split()) == f"note {text}"
    assert lines[2:4] == wrapped(text, width).split("\n") and lines[4].startswith("step 1/2  reward 0.500")
    console.print(view)
    assert console.file.getvalue().splitlines()[-1].startswith("━" * 10 + "╌" * 10 + "  about 6 s left  reward ▁")


def test_where_there_is_no_terminal_a_message_is_a_line():
    console = Console(file=StringIO(), width=40)
    view = LiveView(load_config(None, ["steps=2"]), console)
    view.note("word " * 30)
    view.step_done(1, STEP)
    assert len(console.file.getvalue().splitlines()) == 2


def test_a_command_to_type_has_a_line_of_its_own():
    text = f"paceline: stopped after step 3; resume with: paceline train --resume {'runs/' + 'x' * 20}"
    assert for_terminal(text, 50).split("\n") == [
        "paceline: stopped after step 3; resume with:",
        f"paceline train --resume runs/{'x' * 20}",
    ]
