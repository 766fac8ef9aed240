"""What a person reads while a run goes on."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from paceline.config import load_config
from paceline.observe.live import LiveView
from paceline.observe.step_text import line_of
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


def test_the_live_view_and_the_table_at_the_end_say_it_too():
    console = Console(file=StringIO(), width=120)
    view = LiveView(load_config(None, ["steps=2"]), console)
    view.step_done(1, STEP | TWO)
    console.print(view._render())
    console.print(summary([STEP | TWO, STEP | TWO | {"cluster/lost": 1.0}], "RUN"))
    said = console.file.getvalue()
    assert said.count("2 workers, 1.3 s of drafter training in idle time") == 2
    assert "2, 1 lost, 2.6 s of drafter training in idle time" in said
