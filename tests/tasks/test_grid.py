"""Grid tasks: what is asked is a function of the index, what is right is what the power flow says."""

from __future__ import annotations

import pytest

pytest.importorskip("pandapower")

from paceline.config import load_config
from paceline.core import Sample
from paceline.errors import UserError
from paceline.tasks import make_task
from paceline.tasks.grid.environment import GridEnvironment
from paceline.tasks.grid.network import CASES, network
from paceline.tasks.grid.scenario import Scenario, scale_of, topologies
from paceline.tasks.grid.scores import WORST, parse_screening, score
from paceline.tasks.grid.task import LEVELS, Grid, reward
from paceline.tasks.rewards import load_reward


def grid(difficulty: str = "easy", style: str = "chat", split: str = "train", seed: int = 0, **options) -> Grid:
    return Grid("screening", options, difficulty, style, split, seed)


def answer(truth: dict[str, float]) -> str:
    named = ", ".join(f"{name}: {severity:.0f}" for name, severity in truth.items() if severity > 100)
    return f"So: <answer>{named or 'none'}</answer>"


@pytest.mark.parametrize("difficulty", LEVELS)
def test_a_sample_is_a_function_of_its_index(difficulty):
    first, again = grid(difficulty), grid(difficulty)
    samples = [first.sample(i) for i in (0, 1, 2)]
    assert [again.sample(i) for i in (2, 0)] == [samples[2], samples[0]]
    assert len({str(s.columns) for s in samples}) == 3
    assert grid(difficulty, seed=1).sample(0).columns != samples[0].columns
    case, count = LEVELS[difficulty]
    assert all(s.columns["case"] == case and len(s.columns["candidates"]) == count for s in samples)


@pytest.mark.parametrize("case", CASES)
def test_parts_have_topologies_of_their_own(case):
    train, test = topologies(case, "train"), topologies(case, "test")
    assert "" in train and not set(train) & set(test) and len(test) >= 3
    assert set(train) | set(test) == {"", *network(case).outages()}


def test_the_truth_is_the_power_flow_itself():
    """Run by pandapower on a net of its own, set up by hand."""
    import numpy as np
    import pandapower
    import pandapower.networks

    sample = grid("medium", split="test").sample(3)
    scenario = Scenario.of(sample.columns)
    for name in scenario.candidates:
        net = pandapower.networks.case30()
        pandapower.runpp(net, numba=False)
        usual = net.res_bus.vm_pu.to_numpy(copy=True)
        limit = np.maximum(net.line.max_i_ka.to_numpy(), 1.05 * net.res_line.i_ka.to_numpy())
        scale = scale_of(30, scenario.level, scenario.seed)
        weights = np.abs(net.load.p_mw.to_numpy()) + 1e-9
        net.gen["p_mw"] *= np.average(scale, weights=weights)
        net.load["p_mw"] *= scale
        net.load["q_mvar"] *= scale
        for line in (scenario.out, name):
            a, b = (int(bus) - 1 for bus in line.split("-"))
            net.line.loc[(net.line.from_bus == a) & (net.line.to_bus == b), "in_service"] = False
        pandapower.runpp(net, numba=False)
        loading = np.nanmax(100 * net.res_line.i_ka.to_numpy() / limit)
        voltage = 100 * np.abs(net.res_bus.vm_pu.to_numpy() - usual).max() / 0.045
        assert scenario.truth()[name] == pytest.approx(min(200, max(loading, voltage)), rel=1e-6)


def test_the_order_of_flows_changes_nothing():
    scenario = Scenario.of(grid("hard").sample(1).columns)
    net = network(57)
    scale = scale_of(57, scenario.level, scenario.seed)
    forth = [net.flow(scale, (name,)).severity for name in scenario.candidates]
    back = [net.flow(scale, (name,)).severity for name in reversed(scenario.candidates)]
    assert forth == pytest.approx(back[::-1])


def test_no_outage_makes_an_island():
    for case in CASES:
        net = network(case)
        assert net.outages() and all(net.connected((name,)) for name in net.outages())
    assert not network(14).connected(("7-8",))  # the only branch of bus 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<answer>4-5: 118, 2-3: 104.5%</answer>", {"4-5": 118.0, "2-3": 104.5}),
        ("I think 1-2 holds.\n4-5=120 9-10=101", {"4-5": 120.0, "9-10": 101.0}),
        ("<answer>none</answer>", {}),
        ("No line does. None", {}),
        ("<answer>4-5</answer>", None),
        ("<answer>4-5: 118, 4-5: 104</answer>", None),
        ("", None),
    ],
)
def test_answers(text, said):
    assert parse_screening(text) == said


def test_scores():
    truth = {"1-2": 80.0, "2-3": 130.0, "4-5": 110.0}
    assert score({"2-3": 130.0, "4-5": 110.0}, truth) == 1.0
    assert score({"2-3": 130.0}, truth) == pytest.approx(0.7 * 2 / 3 + 0.3 / 2)
    assert score({"2-3": 115.0, "4-5": 110.0}, truth) == pytest.approx(0.7 + 0.3 * 0.75)
    assert score({"1-2": 130.0}, truth) == score({}, truth) == 0.0
    assert score({"1-2": 130.0, "2-3": 130.0, "4-5": 110.0}, truth) == pytest.approx(0.7 * 0.8 + 0.3)
    assert score(None, truth) == score({"9-10": 120.0}, truth) == WORST
    assert score({}, {"1-2": 99.0}) == 1.0 and score({"1-2": 101.0}, {"1-2": 99.0}) == 0.0


def test_the_reward_and_a_right_answer():
    task = grid("easy")
    samples = [task.sample(i) for i in range(6)]
    columns = {name: [s.columns[name] for s in samples] for name in samples[0].columns}
    truths = [Scenario.of(s.columns).truth() for s in samples]
    assert any(max(t.values()) > 100 for t in truths) and any(min(t.values()) <= 100 for t in truths)
    right = reward([answer(truth) for truth in truths], **columns)
    assert all(value > 0.98 for value in right)  # severities are rounded
    assert reward(["?"] * 6, **columns) == [WORST] * 6
    assert load_reward("grid").name == "grid"


def test_the_settings_name_it():
    task = make_task(load_config(None, ["task.name=grid:screening", "task.difficulty=easy"]).task, 0, "text")
    assert isinstance(task, Grid) and task.reward == "grid"
    assert task.sample(0).prompt.startswith("The IEEE grid with 14")
    small = grid(style="search").sample(0).prompt
    assert small.startswith("14 ") and small.count("\n") == 1
    for wrong, sentence in (
        ({"difficulty": "tail"}, "has no difficulty 'tail'"),
        ({"split": "later"}, "by topology"),
        ({"case": 15}, "is no case"),
        ({"lines": 3}, "task.options.lines"),
    ):
        with pytest.raises(UserError, match=sentence):
            grid(**wrong)


def test_a_limited_number_of_power_flows():
    sample = grid("easy").sample(0)
    scenario = Scenario.of(sample.columns)
    tool = GridEnvironment(flows=2)
    prompt = tool.reset(sample)
    assert isinstance(prompt, list) and "up to 2 outages" in prompt[-1]["content"]
    first, second, third = (tool.step(f"Let me see. run {name}") for name in scenario.candidates[:3])
    severities = [round(scenario.outage(name).severity) for name in scenario.candidates[:2]]
    assert f": {severities[0]} (" in first[0] and "1 left" in first[0] and first[1:] == (None, False)
    assert f": {severities[1]} (" in second[0] and "no power flow is left" in third[0]
    assert "none of the lines" in GridEnvironment.step(_fresh(sample), "run 99-100")[0]
    assert tool.step(answer(scenario.truth()))[2] and tool.step("I do not know.")[2]
    text = GridEnvironment().reset(grid("easy", style="text").sample(0))
    assert isinstance(text, str) and "run " in text
    assert GridEnvironment().reset(grid("easy", style="search").sample(0)) is None


def _fresh(sample: Sample) -> GridEnvironment:
    tool = GridEnvironment()
    tool.reset(sample)
    return tool
