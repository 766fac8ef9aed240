"""Engine, Drafter and Trainer from Python."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from paceline import Drafter, Engine, Trainer, per
from paceline.core import Sample
from paceline.errors import RunError, UserError
from paceline.tasks.countdown import Countdown

PROMPTS = [str(Countdown("easy", "search", 5).sample(i).prompt) for i in range(4)]
SMALL = {
    "rollout.prompts": 2, "rollout.samples": 2, "rollout.max_tokens": 24, "log.tensorboard": False, "model.threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(dtype="float64", max_batch=8)


def test_importing_is_light():
    code = "import sys, paceline; print([m for m in ('torch', 'transformers', 'pydantic') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
    with pytest.raises(ImportError, match="Enginge"):
        exec("from paceline import Enginge")


# Engine


def tokens(answers):
    return [[answer.tokens for answer in group] for group in answers]


def test_answers_by_prompt_and_sample(engine):
    answers = engine.generate(PROMPTS, samples=2, max_tokens=40, seed=3)
    assert [len(group) for group in answers] == [2, 2, 2, 2]
    assert all(len(a.tokens) == len(a.logprobs) <= 40 for group in answers for a in group)
    assert all(a.finish_reason == ("stop" if len(a.tokens) < 40 else a.finish_reason) for g in answers for a in g)
    plain = Engine(dtype="float64", drafter=None, settings={"speculation.mode": "plain"})
    others = plain.generate(PROMPTS, samples=2, max_tokens=40, seed=3)
    assert tokens(others) == tokens(answers), "a drafter changes nothing"
    assert others[0][0].logprobs == pytest.approx(answers[0][0].logprobs, abs=1e-9)
    alone = engine.generate(PROMPTS[:1], samples=2, max_tokens=40, seed=3)
    assert tokens(alone)[0] == tokens(answers)[0], "neither does what else is in the batch"
    assert tokens(engine.generate(PROMPTS, samples=2, max_tokens=40, seed=4)) != tokens(answers)


def test_a_stream_that_is_left_alone(engine):
    for _, _, answer in engine.stream(PROMPTS, samples=2, max_tokens=30):
        assert answer.tokens
        break
    assert engine._engine.unfinished == 0
    assert len(engine.generate(PROMPTS, max_tokens=5)) == 4


def test_stops_and_greedy(engine):
    (answer,) = engine.generate(PROMPTS[:1], temperature=0, max_tokens=60, stop=["</think>"])[0]
    assert answer.text.endswith("</think>") and answer.finish_reason == "stop"
    messages = engine.generate([[{"role": "user", "content": PROMPTS[0]}]], temperature=0, max_tokens=8)
    assert messages[0][0].tokens == answer.tokens[:8], "its template takes messages as they are"


def test_token_ids_as_prompts(engine):
    ids = [list(engine.tokenizer.encode_prompt(text)) for text in PROMPTS]
    assert tokens(engine.generate(ids, max_tokens=20)) == tokens(engine.generate(PROMPTS, max_tokens=20))
    first = engine.generate(ids[:1], max_tokens=20)[0][0].tokens
    again = engine.generate(ids[:1], max_tokens=20, stop_token_ids=[first[4]])[0][0]
    assert again.tokens == first[: first.index(first[4]) + 1] and again.finish_reason == "stop"


MISTAKES = {
    "one prompt": (lambda e: e.generate("Make 3 from 1 2.\n"), "put it in brackets"),
    "one conversation": (lambda e: e.generate([{"role": "user", "content": "hi"}]), "put it in brackets"),
    "empty": (lambda e: e.generate(["x", ""]), r"prompts\[1\] has an empty prompt"),
    "unknown": (lambda e: e.generate(PROMPTS, temprature=1.0), "no argument 'temprature'; did you mean 'temperature'"),
    "of transformers": (lambda e: e.generate(PROMPTS, max_new_tokens=9), "'max_new_tokens' is 'max_tokens' here"),
    "of vLLM": (lambda e: e.stream(PROMPTS, n=2), "'n' is 'samples' here"),
    "greedy": (lambda e: e.generate(PROMPTS, do_sample=False), r"'do_sample' is 'temperature' here \(0 is greedy\)"),
    "one prompt of tokens": (lambda e: e.generate([5, 6]), "put it in brackets"),
    "tokens that are none": (lambda e: e.generate([[5, -1]]), r"prompts\[0\] holds -1, but the ids of this model's"),
    "impossible": (lambda e: e.generate(PROMPTS, top_p=0.0), "top_p"),
}


@pytest.mark.parametrize(("call", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes(engine, call, message):
    with pytest.raises(UserError, match=message):
        call(engine)


# Drafter


def test_a_drafter_is_trained_examined_saved_and_used(tmp_path):
    seen = []
    drafter = Drafter.train(
        "embedded",
        PROMPTS,
        seconds=0.1,
        samples=2,
        max_tokens=24,
        window=32,
        vocab=64,
        report=lambda f: seen.append(f.steps),
    )
    assert seen and drafter.fitted.steps == seen[-1]
    assert len(drafter.neural.vocab) == 64
    measured = drafter.examine(PROMPTS, max_tokens=24)
    assert measured["accept_length"] >= 1.0 and len(measured["accept_rates"]) == 7
    folder = drafter.save(tmp_path / "drafter")
    again = Drafter("embedded", folder)
    assert again.examine(PROMPTS, max_tokens=24) == measured
    engine = Engine(drafter=drafter)
    assert engine.model is drafter.neural.policy
    assert Drafter("embedded").examine(PROMPTS, max_tokens=24)["accept_length"] > measured["accept_length"]


def test_drafters_that_are_not_there(tmp_path):
    with pytest.raises(UserError, match="no prompts"):
        Drafter.train("embedded", [])
    with pytest.raises(UserError, match="no drafter at"):
        Drafter("embedded", tmp_path / "nothing")


# Trainer


def short(completions, **_):
    return [1.0 / (1 + len(text)) for text in completions]


def test_rows_and_functions(tmp_path):
    seen = []

    def count(prompts, completions, weight, **_):
        seen.append((prompts[0], weight[0]))
        return [float(one) for one in weight]

    rows = [{"prompt": text, "weight": i} for i, text in enumerate(PROMPTS)]
    rewards = [
        (count, 2.0),
        short,
        (lambda completions: [None for _ in completions]),
        per("completion")(lambda completions: [1.0]),
    ]
    done = Trainer("embedded", iter(rows), rewards, steps=2, run_dir=tmp_path / "run", settings=SMALL).train()
    assert sorted(set(seen)) == sorted((text, i) for i, text in enumerate(PROMPTS)) and len(seen) == 4, (
        "once for a group"
    )
    row = done.metrics[0]
    assert {"reward/count", "reward/short", "reward/<lambda>-2"} <= row.keys()
    assert row["critic/rewards/mean"] == pytest.approx(
        2 * row["reward/count"] + row["reward/short"] + row["reward/<lambda>-2"]
    )
    assert done.checkpoint == tmp_path / "run" / "checkpoints" / "step-000002"
    assert len(done.rewards) == 2
    assert Engine(done.checkpoint, drafter=None).generate(PROMPTS[:1], max_tokens=4)[0][0].tokens


def test_a_task_of_ones_own_and_named_rewards(tmp_path):
    class Ask:
        name, reward = "ask", None

        def sample(self, index):
            return Sample(index, PROMPTS[index % 4], {"answer": "x"})

    done = Trainer("embedded", Ask(), "exact_match", steps=1, run_dir=tmp_path / "run", settings=SMALL).train()
    assert "reward/exact_match" in done.metrics[0]


def test_a_function_that_fails_is_named_and_the_run_goes_on_later(tmp_path):
    def broken(completions, **_):
        raise RuntimeError("no idea")

    rows = [{"prompt": text} for text in PROMPTS]
    with pytest.raises(RunError, match="the reward broken raised RuntimeError: no idea"):
        Trainer("embedded", rows, broken, steps=1, run_dir=tmp_path / "run", settings=SMALL).train()
    done = Trainer.resume(tmp_path / "run", rows, short).train()
    assert len(done.metrics) == 1


def test_callbacks_log_and_stop(tmp_path):
    seen = []

    def watch(info):
        seen.append(
            (info.step, info.steps, len(info.groups), sorted(info.groups[0].texts) == sorted(info.groups[0].rewards))
        )
        info.log("mine/double", 2 * info.metrics["critic/rewards/mean"])

    def enough(info):
        if info.step == 2:
            info.stop("it is enough")

    rows = [{"prompt": text} for text in PROMPTS]
    run = tmp_path / "run"
    done = Trainer("embedded", rows, short, steps=5, run_dir=run, settings=SMALL, callbacks=[watch, enough]).train()
    assert seen == [(1, 5, 2, True), (2, 5, 2, True)]
    assert [row["mine/double"] for row in done.metrics] == [2 * reward for reward in done.rewards]
    assert done.checkpoint.name == "step-000002", "it is saved"
    assert done.report().name == "report.html" and done.report(tmp_path / "page.html").exists()
    assert len(Trainer.resume(run, rows, short, settings={"steps": 3}).train().metrics) == 3


def test_a_callback_that_fails_is_told_and_the_run_is_saved(tmp_path):
    def broken(info):
        raise ValueError("no idea")

    rows = [{"prompt": text} for text in PROMPTS]
    with pytest.raises(
        RunError, match=r"the callback broken raised ValueError: no idea; the run is saved after step 1"
    ):
        Trainer("embedded", rows, short, steps=2, run_dir=tmp_path / "run", settings=SMALL, callbacks=[broken]).train()
    assert "raise ValueError" in (tmp_path / "run" / "errors.log").read_text()
    assert len(Trainer.resume(tmp_path / "run", rows, short).train().metrics) == 2


def test_an_async_reward_where_a_loop_runs_already(tmp_path):
    """As in a notebook."""

    async def later(completions, **_):
        await asyncio.sleep(0)
        return [float(len(text)) for text in completions]

    async def cell():
        rows = [{"prompt": text} for text in PROMPTS]
        return Trainer("embedded", rows, later, steps=1, run_dir=tmp_path / "run", settings=SMALL).train()

    assert asyncio.run(cell()).rewards[0] > 0


def test_in_a_thread_with_progress(tmp_path, capsys):
    rows = [{"prompt": text} for text in PROMPTS]
    trainer = Trainer("embedded", rows, short, steps=2, run_dir=tmp_path / "run", settings=SMALL, progress=True)
    done = []
    thread = threading.Thread(target=lambda: done.append(trainer.train()))
    thread.start()
    thread.join(120)
    assert len(done[0].metrics) == 2 and "step 2/2" in capsys.readouterr().out


@pytest.mark.parametrize("take", [Trainer, Engine])
def test_a_model_that_is_an_object_is_refused(take, engine):
    with pytest.raises(UserError, match=r"not a Decoder: save it with model.save_pretrained\(FOLDER\)"):
        take(engine.model)


WRONG = {
    "reward": ({"reward": 3.0}, "3.0 is not a reward"),
    "signature": ({"reward": lambda text: 1.0}, "takes"),
    "column": ({"data": [{"question": "x"}]}, "no column 'prompt'"),
    "setting": ({"settings": {"learn.lrr": 1}}, "did you mean 'learn.lr'"),
    "no rows": ({"data": []}, "no samples"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_cannot_work_is_said_at_once(changes, message):
    with pytest.raises(UserError, match=message):
        Trainer(**{"data": [{"prompt": "x"}], "reward": short} | changes)
