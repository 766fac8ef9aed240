"""The tuner for vLLM without vLLM: on a simulated engine, with its settings, its file and its table of versions."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from enum import Enum
from importlib.util import find_spec
from itertools import pairwise
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from paceline.draft.decision import Choice
from paceline.errors import UserError
from paceline.integrations.vllm import configure, drafting, graphs, versions
from paceline.integrations.vllm.settings import STATE, TunerSettings, depth_ladder, depth_table
from paceline.integrations.vllm.state_file import StateFile
from paceline.integrations.vllm.steps import StepMeter
from paceline.integrations.vllm.tuning import MIXED_STEPS, DepthTuner, Envelope, StepPlan, chain

from .vllm_engine import Machine, Output, SimulatedEngine

DEPTHS = (0, 1, 2, 3, 5, 7)
MACHINE = Machine(knee=48, rate=0.8)


def tuner_for(max_batch: int = 64, most_rows: float = inf, depths: tuple[int, ...] = DEPTHS) -> DepthTuner:
    return DepthTuner(Envelope(depths, max_batch, most_rows), explore=0.01, margin=0.97)


def engine(tuner: DepthTuner, machine: Machine = MACHINE, slots: int = 64, overlap: bool = True) -> SimulatedEngine:
    return SimulatedEngine(StepMeter(tuner, always_drafts=True), machine, slots, overlap)


def static(batch: int, tokens: int, depth: int, machine: Machine = MACHINE, overlap: bool = True) -> float:
    found = SimulatedEngine(None, machine, batch, overlap, depth)
    for i in range(batch):
        found.add(f"s{i}", tokens)
    return found.run()


@pytest.mark.parametrize("overlap", [True, False], ids=["asynchronous", "synchronous"])
def test_depths_change_with_the_batch_and_speculation_is_off_where_that_wins(overlap: bool):
    """32 sequences of which some go on for long, twice; the first time the tuner knows nothing."""
    tuner = tuner_for(slots := 32)
    machine = Machine(knee=24, rate=0.8)
    simulated = engine(tuner, machine, slots, overlap)
    assert max(DEPTHS, key=lambda d: machine.speed(32, d)) == 0, "off wins for 32"
    assert max(DEPTHS, key=lambda d: machine.speed(2, d)) == 7, "depth wins for two"
    for turn in range(2):
        simulated.verified.clear()
        for i in range(slots):
            simulated.add(f"{turn} {i}", 1500 if i < 2 else 300)
        simulated.run()
    many, few = simulated.verified[32], simulated.verified[2]
    assert many[0] > 0.9 * many.total(), many
    assert sum(few[d] for d in (5, 7)) > 0.8 * few.total(), few


@pytest.mark.parametrize("batch", [1, 8, 32, 64])
def test_as_fast_as_the_best_depth_and_never_slower_than_without(batch: int):
    tuner = tuner_for()
    simulated = engine(tuner, slots=batch)
    for turn in range(2):
        for i in range(batch):
            simulated.add(f"{turn} {i}", 1500)
        seconds = simulated.run()
    best = max(DEPTHS, key=lambda d: MACHINE.speed(batch, d))
    found = {depth: static(batch, 1500, depth) for depth in {0, best}}
    assert seconds < 1.04 * found[best], (seconds, found, tuner.summary())
    assert seconds < 1.02 * found[0]


@pytest.mark.parametrize("overlap", [True, False], ids=["asynchronous", "synchronous"])
def test_a_batch_that_ends_with_its_slowest_request(overlap: bool):
    """Drafts are worth their while on average, but four requests have hardly any accepted, and all have as many
    tokens: from the second batch on it is known."""
    machine = Machine(knee=120, rate=0.8)
    tuner = tuner_for(64)
    simulated = engine(tuner, machine, 64, overlap)
    plain = static(64, 256, 0, machine, overlap)
    assert max(DEPTHS, key=lambda d: machine.speed(64, d)) > 0
    turns = []
    for turn in range(5):
        for i in range(64):
            simulated.add(f"{turn} {i}", 256, rate=0.03 if i < 4 else 0.9)
        turns.append(plain / simulated.run())
    assert turns[0] > 0.85 and min(turns[1:]) > 0.97, turns


def test_a_drafter_that_is_never_right_costs_next_to_nothing():
    machine = Machine(knee=48, rate=0.02)
    tuner = tuner_for()
    simulated = engine(tuner, machine, slots=8)
    for i in range(8):
        simulated.add(str(i), 3000)
    seconds = simulated.run()
    assert seconds < 1.03 * static(8, 3000, 0, machine)
    assert tuner.steps[0] > 0.95 * tuner.steps.total()


def test_only_depths_that_graphs_were_captured_for():
    tuner = tuner_for(64, most_rows=40)
    simulated = engine(tuner, Machine(knee=10**6, rate=0.9), slots=16)
    for i in range(16):
        simulated.add(str(i), 400 + 100 * i)
    simulated.run()
    assert simulated.rows <= 40
    assert max(d for d, n in simulated.verified[16].items() if n) == 1, "16 sequences, 32 tokens"
    assert simulated.verified[2][7] > simulated.verified[2][0]


def test_an_engine_whose_steps_all_take_prompts_along_is_tuned_too():
    tuner = tuner_for()
    simulated = engine(tuner, slots=4)
    count = 0

    def keep_coming() -> bool:
        nonlocal count
        count += 1
        while len(simulated.waiting) < 2:
            simulated.add(f"{len(simulated.requests)}", 6, prompt=4)
        return count > 3000

    simulated.run(keep_coming)
    assert sum(tuner.steps[d] for d in (3, 5, 7)) > 0.3 * tuner.steps.total(), tuner.steps


def step(drafts: dict[str, int], prompts: int = 0, new: int = 0) -> Output:
    scheduled = {name: 1 + count for name, count in drafts.items()}
    spec = {name: [-1] * count for name, count in drafts.items() if count}
    return Output(scheduled, sum(scheduled.values()) + prompts, spec, [""] * new)


class Recorder(DepthTuner):
    """Notes what it is told, and picks what it is given."""

    def __init__(self, *depths: int):
        super().__init__(Envelope(DEPTHS, 8, inf), 0.01, 0.97)
        self.told: list[tuple[StepPlan, float, dict[str, int], list[int]]] = []
        self.next = list(depths)

    def choose(self, batch: int, waiting: bool, arrived: bool) -> Choice:
        self.choice = Choice(chain(self.next.pop(0)))
        return self.choice

    def observe(self, plan, seconds, accepted, ended):
        self.told.append((plan, seconds, dict(accepted), list(ended)))


def test_what_a_step_tells():
    tuner = Recorder(5, 3, 3)
    meter = StepMeter(tuner, always_drafts=True)
    first, second, third = step({"a": 0, "b": 0}, prompts=7, new=2), step({"a": 5, "b": 5}), step({"a": 3, "b": 0})
    meter.scheduled(first, 1.0, False)
    meter.scheduled(second, 1.5, False)  # before the first is read
    meter.read(first, [[4], [4]], {"a": 0, "b": 1}, set())
    meter.done(first, 2.0, True, {})
    meter.scheduled(third, 2.5, False)
    meter.read(second, [[4, 4, 4], [4]], {"a": 0, "b": 1}, {"b"})
    meter.done(second, 3.25, True, {"b": 9})
    meter.read(third, [[4], []], {"a": 0, "b": 1}, set())
    meter.done(third, 60.0, False, {})
    plans = [told[0] for told in tuner.told]
    assert [(p.batch, p.verified.strategy.depth, p.drafted.strategy.depth) for p in plans] == [
        (2, 0, 5),
        (2, 5, 3),
        (2, 3, 3),
    ]
    assert [(p.prompts, p.uniform) for p in plans] == [(True, True), (False, True), (False, False)]
    assert [told[1] for told in tuner.told] == [1.0, 1.25, 56.75]
    assert [told[2] for told in tuner.told] == [{}, {"a": 2}, {"a": 0}], "b was aborted, then had no draft tokens"
    assert [told[3] for told in tuner.told] == [[], [9], []]


def test_requests_that_have_ended_or_were_aborted_are_forgotten():
    tuner = tuner_for()
    meter = StepMeter(tuner, always_drafts=True)
    names = ["a", "b", "c"]
    tuner.choice = Choice(chain(3))
    for now in range(3):
        one = step(dict.fromkeys(names, 3))
        meter.scheduled(one, now, False)
        meter.read(one, [[4, 4]] * 3, {name: row for row, name in enumerate(names)}, {"c"} if now == 2 else set())
        meter.done(one, now + 0.5, True, {"a": 8} if now == 2 else {})
        assert set(tuner._requests._counts) == ({"b"} if now == 2 else {"a", "b", "c"})


def test_time_in_which_the_engine_is_idle_or_paused_is_not_a_steps():
    tuner = Recorder(0, 0, 0)
    meter = StepMeter(tuner, always_drafts=True)
    for started, done in ((1.0, 2.0), (2.1, 3.0), (50.0, 51.5)):
        one = step({"a": 0})
        meter.scheduled(one, started, False)
        meter.done(one, done, True, {})
    assert [round(told[1], 3) for told in tuner.told] == [1.0, 1.0, 1.5], "0.1 between two steps belongs to the second"


def test_steps_that_are_never_read_are_forgotten():
    tuner = Recorder(0, 0)
    meter = StepMeter(tuner, always_drafts=True)
    lost, read = step({"a": 0}), step({"a": 0})
    meter.scheduled(lost, 1.0, False)
    meter.scheduled(read, 2.0, False)
    meter.done(read, 3.0, True, {})
    meter.done(lost, 4.0, True, {})
    assert len(tuner.told) == 1


def test_a_drafter_that_looks_for_matches_counts_where_it_finds_none():
    tuner = Recorder(3, 3)
    meter = StepMeter(tuner, always_drafts=False)
    meter.scheduled(step({"a": 0, "b": 0}), 1.0, False)
    found = step({"a": 3, "b": 0})
    meter.scheduled(found, 2.0, False)
    meter.read(found, [[4, 4], [4]], {"a": 0, "b": 1}, set())
    meter.done(found, 3.0, True, {})
    assert tuner.told[0][0].uniform and tuner.told[0][2] == {"a": 1, "b": 0}


def test_mixed_steps_are_measured_only_where_there_are_no_others():
    tuner = tuner_for()
    plan = StepPlan(4, Choice(chain(0)), Choice(chain(0)), prompts=True)
    for count in range(MIXED_STEPS + 1):
        assert not tuner.tuner._costs.plain, count
        tuner.observe(plan, 0.01, {}, [])
    assert tuner.tuner._costs.plain


@pytest.mark.parametrize("depth", range(1, 16))
def test_a_ladder_ends_with_off_and_every_depth_of_a_table_is_captured(depth: int):
    ladder = depth_ladder(depth)
    assert ladder[0] == 0 and ladder[-1] == depth and len(ladder) <= 8
    for most in (len(ladder), 16, 128, 1024):
        table = depth_table(ladder, most)
        assert [entry[2] for entry in table] == sorted(ladder, reverse=True)
        assert table[0][0] == 1 and table[-1][1] >= most and table[-1][0] <= most
        assert all(after[0] == before[1] + 1 and before[0] <= before[1] for before, after in pairwise(table))


def test_settings_and_what_is_wrong_with_them(monkeypatch, tmp_path):
    assert TunerSettings.of(None) == TunerSettings.of({"other": 1}) == TunerSettings()
    given = TunerSettings.of({"paceline": {"depths": [3, 0, 3], "state": str(tmp_path / "s"), "explore": 0}})
    assert given.depths == (0, 3) and given.state == tmp_path / "s" and given.explore == 0
    monkeypatch.setenv(STATE, str(tmp_path / "e"))
    assert TunerSettings.of({}).state == tmp_path / "e"
    for wrong in ({"depth": [3]}, {"explore": 2}, {"depths": []}, {"depths": "3"}, {"state": 3}, 5):
        with pytest.raises(UserError, match=r"additional_config\.paceline"):
            TunerSettings.of({"paceline": wrong})
    with pytest.raises(UserError, match=r"has 9, but num_speculative_tokens of the speculative config is 7"):
        TunerSettings(depths=(0, 9)).check(7)


def config(depth: int | None = 5, ranks: int = 1, rows: int = 512, **additional: object) -> SimpleNamespace:
    """What of vLLM's configuration is read."""
    table = [(1, 8, 5), (9, 16, 3), (17, 64, 1)]
    speculative = SimpleNamespace(
        num_speculative_tokens=depth, num_speculative_tokens_per_batch_size=table, method="eagle3", model="d"
    )
    return SimpleNamespace(
        speculative_config=speculative if depth else None,
        parallel_config=SimpleNamespace(data_parallel_size=ranks),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=rows),
        scheduler_config=SimpleNamespace(max_num_seqs=64),
        additional_config=additional,
    )


@pytest.mark.parametrize(
    ("given", "table", "said"),
    [
        (config(depth=None), False, "there is no drafter"),
        (config(ranks=2), False, "one engine per rank"),
        (config(), False, "VLLM_PLUGINS"),
    ],
)
def test_where_depths_cannot_change_one_sentence_says_why(given, table, said, caplog):
    with caplog.at_level(logging.WARNING, "vllm.paceline"):
        assert configure.make_tuning(given, table) is None
    assert len(caplog.messages) == 1 and said in caplog.messages[0] and "\n" not in caplog.messages[0]


def test_the_envelope_is_vllms_table_and_its_graphs():
    assert configure.envelope_of(config()) == Envelope((0, 1, 3, 5), 64, 512)
    assert configure.envelope_of(config(depth=4, rows=0)) == Envelope((0, 1, 3, 4), 64, inf)
    tuning = configure.make_tuning(config(paceline={"explore": 0.1, "log_s": 0}), True)
    assert tuning.tuner.tuner.explore == 0.1 and tuning.file is None


ENGINE = {"model": "m", "drafter": "d"}


def trained() -> DepthTuner:
    tuner = tuner_for(16)
    simulated = engine(tuner, slots=8)
    for i in range(8):
        simulated.add(str(i), 500)
    simulated.run()
    return tuner


def test_the_state_is_saved_and_restored(tmp_path, caplog):
    tuner, file = trained(), tmp_path / "deep" / "state.json"
    StateFile(file, ENGINE).save(tuner)
    again = tuner_for(16)
    with caplog.at_level(logging.INFO, "vllm.paceline"):
        StateFile(file, ENGINE).restore(again)
    assert again.tuner.state() == json.loads(json.dumps(tuner.tuner.state())) and "goes on from" in caplog.text
    other = tuner_for(16)
    StateFile(file, ENGINE | {"model": "n"}).restore(other)
    assert other.tuner.round == 0 and "another model" in caplog.text


def test_the_state_is_saved_when_the_engine_runs_dry(tmp_path):
    """`vllm serve` ends its engine's process without telling the scheduler."""
    file = tmp_path / "state.json"
    state = StateFile(file, ENGINE)
    state.save_if_due(tuner := trained(), idle=False)
    assert not file.exists(), "a minute has not gone by"
    state.save_if_due(tuner, idle=True)
    assert file.exists()
    file.unlink()
    state.save_if_due(tuner, idle=True)
    assert not file.exists(), "it was saved just now"


@pytest.mark.parametrize("text", ["", "{", '{"engine": {}}', '["a"]', "\udcff"])
def test_a_file_that_is_something_else_is_left_alone(text, tmp_path, caplog):
    file = tmp_path / "notes.json"
    file.write_text(text, errors="surrogateescape")
    before = file.read_bytes()
    state, tuner = StateFile(file, ENGINE), trained()
    state.restore(tuner)
    state.save(tuner)
    assert file.read_bytes() == before
    assert len(caplog.messages) == 1 and "starts anew" in caplog.messages[0]


FULL_DISK = """
import logging, resource, signal, sys
from pathlib import Path
logging.basicConfig()
from tests.integrations.test_vllm_tuning import ENGINE, StateFile, trained
tuner = trained()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
state = StateFile(Path(sys.argv[1]), ENGINE)
state.save(tuner)
state.save(tuner)
print("goes on")
"""


def test_a_full_disk_costs_a_sentence(tmp_path):
    file = tmp_path / "state.json"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(file)], capture_output=True, text=True, cwd=root, timeout=300
    )
    assert done.stdout == "goes on\n", done.stderr
    said = [line for line in done.stderr.splitlines() if "cannot be saved" in line]
    assert len(said) == 1 and "the engine goes on" in said[0] and not file.exists() and not list(tmp_path.iterdir())


def test_versions_and_one_sentence_for_others():
    assert versions.names_of("0.26.0") == (versions.VERSIONS[0, 26], None)
    assert versions.names_of("0.33.1rc2.dev3") == (versions.VERSIONS[0, 33], None)
    for unknown, like in (("0.40.0", "0.33"), ("0.9.2", "0.26"), ("9.9", "0.33")):
        names, said = versions.names_of(unknown)
        assert f"treated like {like}" in said and "\n" not in said
        assert names == versions.VERSIONS[tuple(map(int, like.split(".")))]


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_one_sentence():
    with pytest.raises(UserError, match="vLLM is not installed; install it"):
        from paceline.integrations.vllm import TunedScheduler  # noqa: F401
    with pytest.raises(ImportError):
        from paceline.integrations.vllm import Nothing  # noqa: F401


class Speculator:
    """The parts of vLLM's that drafting is bounded by."""

    def __init__(self, fused: bool = False):
        self.num_speculative_steps = 7
        self.use_fused_multi_step_decode = fused

    def propose(self, broken: bool = False, dummy_run: bool = False) -> int:
        if broken:
            raise ValueError("broken")
        return self.num_speculative_steps


@pytest.mark.parametrize(
    ("depth", "fused", "passes"),
    [(None, False, 7), (0, False, 1), (3, False, 3), (9, False, 7), (3, True, 7), (1, True, 1)],
)
def test_the_drafter_makes_as_many_passes_as_are_wanted(depth, fused, passes):
    runner = SimpleNamespace(speculator=Speculator(fused))
    propose = drafting.drafting_to_depth(Speculator.propose)
    execute = drafting.noting_depth(lambda self, output: propose(self.speculator))
    assert execute(runner, SimpleNamespace(paceline_depth=depth)) == passes
    assert propose(runner.speculator, dummy_run=True) == 7
    with pytest.raises(ValueError, match="broken"):
        propose(runner.speculator, broken=True)
    assert runner.speculator.num_speculative_steps == 7
    assert execute(runner, SimpleNamespace()) == 7, "steps of somebody else's scheduler"


def test_graphs_of_drafting_are_listed_without_the_table_in_engines_of_ours():
    seen = graphs.without_table(lambda self: self.vllm_config.speculative_config)
    for scheduler, passes, found in (
        ("paceline.integrations.vllm.TunedScheduler", 8, "a table"),
        ("paceline.integrations.vllm.TunedScheduler", 1, None),
        (None, 1, "a table"),
        (Speculator, 1, "a table"),
    ):
        ours = SimpleNamespace(scheduler_cls=scheduler)
        config = SimpleNamespace(speculative_config="a table", scheduler_config=ours)
        manager = SimpleNamespace(decode_query_len=passes, vllm_config=config)
        assert seen(manager) == found and manager.vllm_config is config


class Mode(Enum):
    PIECEWISE = 1
    FULL = 2


class Graph(NamedTuple):
    """The fields of vLLM's BatchExecutionDescriptor that are read."""

    num_tokens: int
    num_reqs: int | None
    uniform_token_count: int | None
    num_active_loras: int = 0


def test_a_pass_finds_the_next_larger_graph_of_its_own_depth():
    """As vLLM 0.26 lists them: each size rounded up to a multiple of a sequence's tokens; piecewise ones for any."""
    sizes = [1, 2, 4, *range(8, 65, 8)]
    whole = {Graph(up := -(-size // each) * each, up // each, each) for size in sizes for each in (1, 2, 3, 4, 6, 8)}
    by_mode = {
        Mode.PIECEWISE: [Graph(size, None, None) for size in reversed(sizes)],
        Mode.FULL: sorted((g for g in whole if g.num_tokens <= 64), reverse=True),
    }
    ours = SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls="paceline.integrations.vllm.TunedScheduler"))
    manager = SimpleNamespace(vllm_config=ours, _capture_descs=by_mode, _candidates=None)
    graphs.at_every_size(lambda self: None)(manager)
    found = manager._candidates
    for each in (1, 2, 3, 4, 6, 8):
        for batch in range(1, 64 // each + 1):
            fits = [g for g in found[batch * each, 0] if g.uniform_token_count == each and g.num_reqs >= batch]
            largest = max(g.num_tokens for g in whole if g.uniform_token_count == each and g.num_tokens <= 64)
            assert len(fits) == (batch * each <= largest), (each, batch)
            if fits:
                assert fits[0].num_tokens - batch * each < 8 + each
    assert found[33, 0][-1] == Graph(40, None, None) and (65, 0) not in found
