"""What goes wrong in a tool or an environment is told to the model as text, or ends the answer: never the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.core import Sample
from paceline.errors import UserError
from paceline.tasks.environments.messages import Action, JobDone, ToolboxSpec
from paceline.tasks.environments.pool import EnvironmentPool

WORLD = Path(__file__).parent / "world.py"
SAMPLE = Sample(3, "?", {"start": 5})
TOOLS = ("add", "upper", "raises", "leaves", "hangs", "megabyte", "raw", "nothing", "dies", "killed", "killed_once")


@contextmanager
def pool_of(spec: ToolboxSpec, workers: int = 1, timeout_s: float = 20.0) -> Iterator[EnvironmentPool]:
    pool = EnvironmentPool(spec, workers, timeout_s)
    try:
        pool.ready()
        yield pool
    finally:
        pool.close()


@pytest.fixture(scope="module")
def tools() -> Iterator[EnvironmentPool]:
    with pool_of(ToolboxSpec(tools=tuple(f"{WORLD}:{name}" for name in TOOLS), max_chars=100)) as pool:
        yield pool


def results(pool: EnvironmentPool, count: int, seconds: float = 120) -> dict[int, JobDone]:
    done: dict[int, JobDone] = {}
    end = time.monotonic() + seconds
    while len(done) < count:
        assert time.monotonic() < end, "no answer"
        done |= {one.number: one for one in pool.collect()}
        time.sleep(0.005)
    return done


def turn(text: str) -> tuple[Action, ...]:
    return (Action(text, text),)


def call(name: str, arguments: str = "{}") -> tuple[Action, ...]:
    return turn(f'<tool>{{"name": "{name}", "arguments": {arguments}}}</tool>')


def told(pool: EnvironmentPool, *turns: tuple[Action, ...]) -> list[JobDone]:
    numbers = [pool.submit(i, SAMPLE, actions, False) for i, actions in enumerate(turns)]
    done = results(pool, len(numbers))
    return [done[number] for number in numbers]


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("add", '{"a": 2, "b": 40}', "42"),
        ("add", '{"a": 2}', "3"),
        ("add", '{"a": "2"}', "3"),
        ("upper", '{"text": "a"}', '{"text": "A"}'),
        ("nothing", "{}", ""),
        ("add", '{"a": "two"}', "error: the arguments do not fit: a: "),
        ("add", '{"a": 1, "c": 1}', "error: the arguments do not fit: c: "),
        ("subtract", "{}", "error: there is no tool 'subtract'; there are: add, "),
        ("raises", '{"text": "way"}', "error: ValueError: no way"),
        ("leaves", "{}", "error: SystemExit: 3"),
        ("raw", "{}", "error: the result is 3 bytes that are no text"),
        ("add", "[1]", "error: the arguments are no JSON object"),
        ("add", '{"a": ', "error: the call is not JSON"),
    ],
)
def test_what_the_model_is_told(tools, name, arguments, text):
    (done,) = told(tools, call(name, arguments))
    assert done.result and not done.error and not done.result.done and done.result.calls == 1
    assert done.result.text.startswith(text) if text else done.result.text == ""
    assert done.result.errors == text.startswith("error")


def test_a_megabyte_is_cut(tools):
    (done,) = told(tools, call("megabyte"))
    assert done.result and done.result.text == "x" * 100 + "... (cut: 1,048,576 characters)"


def test_without_a_call_it_is_over(tools):
    (done,) = told(tools, turn("The answer is 4."))
    assert done.result and done.result.done and done.result.reward is None and not done.result.calls


def test_the_last_turn_calls_nothing(tools):
    number = tools.submit(0, SAMPLE, call("dies"), True)
    assert results(tools, 1)[number].result.done


def test_one_that_ends_its_process_is_found_among_others(tools):
    """All are in it at the same time; only the one that does it is told so."""
    turns = [call("hangs", '{"seconds": 0.5}'), call("dies"), call("hangs", '{"seconds": 0.6}'), call("killed")]
    slept, dead, slept_too, shot = told(tools, *turns)
    assert slept.result and slept_too.result and slept.result.text == slept_too.result.text == "woke up"
    assert dead.error == "ended its process (exit code 7)" and shot.error == "ended its process (signal SIGKILL)"


def test_one_whose_process_was_killed_by_others_is_run_again(tools, tmp_path):
    (done,) = told(tools, call("killed_once", f'{{"file": "{tmp_path / "mark"}"}}'))
    assert done.result and done.result.text == "still here"


def test_a_slow_one_blocks_no_other(tools):
    """Thirty that wait for half a second each are done in less than three seconds, in one process."""
    done = told(tools, *[call("hangs", '{"seconds": 0.5}')] * 30)
    assert all(one.result and one.result.text == "woke up" for one in done)
    assert sum(one.result.seconds for one in done if one.result) > 14  # they overlapped, or this took as long
    assert max(one.result.seconds for one in done if one.result) < 10


def test_one_that_hangs_is_answered_and_others_are_not_lost():
    spec = ToolboxSpec(tools=(f"{WORLD}:hangs", f"{WORLD}:add"))
    with pool_of(spec, timeout_s=2.0) as pool:
        hung, added = told(pool, call("hangs"), call("add", '{"a": 1}'))
        assert hung.error == "took longer than 2 s" and added.result and added.result.text == "2"
        (after,) = told(pool, call("add", '{"a": 2}'))
        assert after.result and after.result.text == "3"


def test_an_episode_is_caught_up_in_another_process():
    """Its process is killed between two turns: the environment does again what it has done."""
    spec = ToolboxSpec(environment=f"{WORLD}:Counting", options={"turns": 9})
    actions = tuple(Action(text, text) for text in ("a", "b", "c"))

    def play(pool: EnvironmentPool, kill_before: int) -> list[str]:
        seen = []
        for count in range(1, 4):
            if count == kill_before:
                for process in pool._processes:
                    process.child.process.kill()
            number = pool.submit(0, SAMPLE, actions[:count], False)
            result = results(pool, 1)[number].result
            assert result is not None
            seen.append(result.text)
        return seen

    with pool_of(spec) as pool:
        undisturbed = play(pool, kill_before=0)
        pool.forget()
        for moment in (2, 3):
            assert play(pool, kill_before=moment) == undisturbed
            pool.forget()


def test_an_environment_like_trls():
    with pool_of(ToolboxSpec(environment=f"{WORLD}:Counter")) as pool:
        assert pool.prompt(Sample(0, [{"role": "user", "content": "Count."}], {"start": 5})) == [
            {"role": "user", "content": "Count. You begin at 5."}
        ]
        (schema,) = pool.imported.schemas
        assert schema["function"]["name"] == "increment"
        assert schema["function"]["parameters"]["properties"]["step"] == {"type": "integer", "description": "How much."}
        first = call("increment", '{"step": 3}')
        number = pool.submit(0, SAMPLE, first, False)
        assert results(pool, 1)[number].result.text == "8"
        number = pool.submit(0, SAMPLE, (*first, *turn("Done.")), False)
        done = results(pool, 1)[number].result
        assert done.done and done.reward == 8.0


def test_five_values_and_no_prompt():
    with pool_of(ToolboxSpec(environment=f"{WORLD}:Steps")) as pool:
        assert pool.prompt(SAMPLE) == SAMPLE.prompt
        short, long = told(pool, turn("abc"), turn("a" * 30))
        assert (short.result.text, short.result.reward, short.result.done) == ("3", 1.0, False) and long.result.done


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (ToolboxSpec(tools=("nowhere.py:f",)), "no file at"),
        (ToolboxSpec(tools=(f"{WORLD}:subtract",)), "has no function 'subtract', which the tool"),
        (ToolboxSpec(environment="somewhere"), "environment.name = 'somewhere' names nothing"),
        (ToolboxSpec(environment=f"{WORLD}:Counting", options={"x": 1}), "unexpected keyword argument 'x'"),
        (ToolboxSpec(tools=(f"{WORLD}:add", f"{WORLD}:add")), "two tools are called 'add'"),
        (ToolboxSpec(environment="pathlib:PurePosixPath.x"), "has no function"),
    ],
)
def test_what_cannot_be_imported_is_said(spec, sentence):
    with pytest.raises(UserError, match=sentence.replace("(", r"\(")), pool_of(spec):
        pass
