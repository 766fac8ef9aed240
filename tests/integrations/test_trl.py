"""Paceline inside TRL's trainer: the same answers as it would ask for itself, in its order, under its settings."""

from __future__ import annotations

import importlib.util
import json
import random
import sys

import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig
from scipy import stats
from transformers import AutoTokenizer

from paceline.errors import UserError
from paceline.integrations.trl import PacelineRollout
from paceline.model.checkpoint import EMBEDDED
from tests.integrations.grpo import Reward, data, make

PLAIN = {"speculation.mode": "plain"}


def two_lines(folder, dtype=torch.float32, rollout=None, reward=None, **changes):
    """The script with the two lines."""
    rollout = rollout or PacelineRollout()
    return make(folder, reward or Reward(), dtype, rollout_func=rollout, callbacks=[rollout], **changes)


@torch.no_grad()
def check_logprobs(trainer, out, which=0) -> None:
    """What the engine says of an answer is what the trainer's own model says."""
    text = torch.tensor([out["prompt_ids"][which] + out["completion_ids"][which]])
    logprobs = torch.tensor(out["logprobs"][which], dtype=torch.float64)
    own = trainer._get_per_token_logps_and_entropies(trainer.model, text, torch.ones_like(text), len(logprobs))[0][0]
    assert torch.allclose(logprobs, own.double(), atol=1e-5)


def metrics(trainer, name):
    return [row[name] for row in trainer.state.log_history if name in row]


# What comes out


def test_answers_come_in_the_trainers_order_with_their_logprobs(tmp_path):
    rollout = PacelineRollout()
    trainer = two_lines(tmp_path, torch.float64, rollout)
    trainer.model.train()
    prompts = [row["prompt"] for row in data(6) for _ in range(3)]
    random.Random(0).shuffle(prompts)  # repeated, but not side by side
    out = rollout(prompts, trainer)
    tokenizer = trainer.processing_class
    assert [tokenizer.decode(ids) for ids in out["prompt_ids"]] == prompts
    assert len(out["completion_ids"]) == len(prompts)
    assert len({tuple(ids) for ids in out["completion_ids"]}) > 6, "repeated prompts get answers of their own"
    for which in range(len(prompts)):
        check_logprobs(trainer, out, which)
    once = sum(len(tokenizer(p)["input_ids"]) for p in set(prompts))
    assert trainer._metrics["train"]["paceline/prefill_tokens"] == [once], "each prompt is computed once"


def test_speculation_changes_no_answer_and_evaluation_no_training(tmp_path):
    """The seed decides, not how tokens are drafted, and not what was evaluated in between."""
    rollouts = [PacelineRollout(), PacelineRollout("none", settings=PLAIN)]
    trainers = [two_lines(tmp_path, torch.float64, r) for r in rollouts]
    prompts = [row["prompt"] for row in data(2) for _ in range(4)]
    answers = []
    for rollout, trainer in zip(rollouts, trainers, strict=True):
        trainer.model.train()
        first = rollout(prompts, trainer)["completion_ids"]
        if rollout is rollouts[1]:
            trainer.model.eval()
            assert rollout(prompts, trainer)["completion_ids"] != first
            trainer.model.train()
        answers.append((first, rollout(prompts, trainer)["completion_ids"]))
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1], "the next step draws anew"


def test_greedy_answers_are_those_of_transformers(tmp_path):
    prompts = [row["prompt"] for row in data(8)]
    settings = {"generation_kwargs": {"do_sample": False}, "max_completion_length": 40}
    theirs = make(tmp_path, Reward(), torch.float64, **settings)
    wanted = theirs._generate(prompts)[1]
    rollout = PacelineRollout()
    trainer = two_lines(tmp_path, torch.float64, rollout, **settings)
    assert rollout(prompts, trainer)["completion_ids"] == wanted


SETTINGS = {
    "temperature": {"temperature": 0.5},
    "filters": {"top_k": 3, "top_p": 0.8, "min_p": 0.1},
    "hot": {"temperature": 1.5, "top_p": 0.9},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_first_tokens_follow_the_law_of_the_settings(tmp_path, settings):
    """Against transformers' own filters, over many answers to one prompt."""
    rollout = PacelineRollout(settings=PLAIN)
    trainer = two_lines(tmp_path, rollout=rollout, max_completion_length=1, **settings)
    prompt = data(1)[0]["prompt"] + "<think>\n3"  # where the next token is open
    ids = trainer.processing_class(prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = trainer.model(ids).logits[:, -1]
    for processor in trainer.model._get_logits_processor(trainer.generation_config, 1, ids, None, []):
        logits = processor(ids, logits)
    law = logits.softmax(-1)[0]
    drawn = [tokens[0] for tokens in rollout([prompt] * 1024, trainer)["completion_ids"]]
    counts = torch.bincount(torch.tensor(drawn), minlength=len(law)).double()
    assert counts[law == 0].sum() == 0, "a token that the filters drop was drawn"
    expected = law.double() * len(drawn)
    common = expected >= 5
    seen = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    seen, wanted = seen[wanted > 1e-6], wanted[wanted > 1e-6]
    assert stats.chisquare(seen.numpy(), (wanted * seen.sum() / wanted.sum()).numpy()).pvalue > 1e-4


def test_lengths_and_stops(tmp_path):
    settings = {"generation_kwargs": {"stop_strings": ["</think>"], "min_new_tokens": 12}, "max_completion_length": 30}
    rollout = PacelineRollout()
    trainer = two_lines(tmp_path, rollout=rollout, **settings)
    answers = rollout([row["prompt"] for row in data(16)], trainer)["completion_ids"]
    texts = [trainer.processing_class.decode(ids) for ids in answers]
    assert all(12 <= len(ids) <= 30 for ids in answers)
    assert any(text.endswith("</think>") for text in texts) and any(len(ids) == 30 for ids in answers)
    assert all(text.count("</think>") <= 1 and "<answer>" not in text for text in texts)


# Training with it


def test_metrics_are_in_the_trainers_log(tmp_path):
    trainer = two_lines(tmp_path, rollout=PacelineRollout("new", share=0.3), max_steps=2)
    trainer.train()
    names = ("accept_length", "tokens_per_s", "rollout_s", "drafter_seconds", "drafter_steps", "drafter_version")
    for name in names:
        assert len(metrics(trainer, f"paceline/{name}")) == 2, name
    shares = zip(*(metrics(trainer, f"paceline/share/{d}") for d in ("plain", "suffix", "neural")), strict=True)
    assert all(sum(row) == pytest.approx(1) for row in shares)
    assert sum(metrics(trainer, "paceline/drafter_steps")) > 0
    assert metrics(trainer, "paceline/drafter_loss")[0] > 0


def test_resumes_from_the_trainers_checkpoint(tmp_path):
    """The step after a resume is that of a run that was never stopped: the same answers, the same rewards."""
    whole, rest = Reward(), Reward()
    settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    straight = two_lines(tmp_path, torch.float64, PacelineRollout(share=0.15), whole, **settings)
    straight.train()
    checkpoint = tmp_path / "checkpoint-2"
    state = json.loads((checkpoint / "paceline" / "state.json").read_text())
    assert state["requests"] == {"train": 16, "eval": 0} and state["tuner"]["costs"]
    training = json.loads((checkpoint / "paceline" / "drafter" / "training.json").read_text())

    rollout = PacelineRollout(share=0.15, resume=checkpoint)  # needed only because the output goes elsewhere
    resumed = two_lines(tmp_path / "elsewhere", torch.float64, rollout, rest, **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert rest.completions == whole.completions[16:]
    assert rest.values == whole.values[16:]
    assert metrics(resumed, "loss")[-1] == pytest.approx(metrics(straight, "loss")[-1], rel=1e-6)
    assert rollout._sidecar.updates == 3
    assert rollout._sidecar.learning.trainer._optimizer.steps >= training["trainer"]["steps"] > 0


def test_a_resume_that_finds_nothing_says_so(tmp_path):
    settings = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_completion_length": 8}
    make(tmp_path, Reward(), **settings).train()  # without Paceline
    with pytest.warns(UserWarning, match="no checkpoint with a folder 'paceline'"):
        two_lines(tmp_path, **settings | {"max_steps": 2}).train(resume_from_checkpoint=True)


def test_lora(tmp_path):
    """The engine follows the adapters, and the trainer's own weights stay its own."""
    rollout = PacelineRollout()
    lora = LoraConfig(r=8, target_modules="all-linear")
    trainer = two_lines(
        tmp_path,
        torch.float64,
        rollout,
        peft_config=lora,
        learning_rate=3e-3,
        save_strategy="steps",
        save_steps=1,
        max_steps=1,
    )
    base = {n: p.clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    frozen = {n: p for n, p in trainer.model.named_parameters() if not p.requires_grad}
    assert all(torch.equal(base[n], p) for n, p in frozen.items())
    assert any(bool(p.detach().any()) for n, p in trainer.model.named_parameters() if "lora_B" in n)
    check_logprobs(trainer, rollout([data(1)[0]["prompt"]], trainer))
    rollout = PacelineRollout()
    again = two_lines(tmp_path, torch.float64, rollout, peft_config=lora, max_steps=2)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == rollout._sidecar.updates == 2


def test_a_model_that_moves_is_followed(tmp_path):
    rollout = PacelineRollout()
    trainer = two_lines(tmp_path, torch.float64, rollout)
    prompts = [row["prompt"] for row in data(2)]
    rollout(prompts, trainer)
    known = rollout._sidecar.tuner.round
    for param in trainer.model.parameters():
        param.data = param.data.clone()
    with torch.no_grad():
        trainer.model.model.norm.weight.mul_(2.0)
    check_logprobs(trainer, rollout(prompts, trainer))
    assert rollout._sidecar.tuner.round > known, "what was learned about strategies is kept"


# Tools: TRL's own loop over turns, each of them written by our engine

TEMPLATE = """{% for m in messages %}{% if m.role == 'tool' %}
{{ m.content }}
{% elif m.role == 'assistant' %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% for k, v in
c.function.arguments.items() %}{{ k }}{{ v }}{% endfor %}{% endfor %}<eos>{% else %}{{ m.content }}{% endif %}{% endfor
%}"""
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": ".\n",  # where a question ends
    "fields": {
        "tool_calls": {
            "open_pattern": "<answer>",
            "close_pattern": "</answer>",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "check", "arguments": {"expression": "{content}"}}},
        },
        "content": {"close_pattern": "<eos>|$", "content": "text"},
    },
}


class Examiner:
    """An environment: what the model answers are calls of its tool, which asks for another number."""

    asked: list[str] = []  # noqa: RUF012 (by all of them together)

    def reset(self, **_):
        return None

    def check(self, expression: str) -> str:
        """Look at an expression.

        Args:
            expression: What was found.
        """
        Examiner.asked.append(expression)
        return "Make 10 from 3 7."


def check(expression: str) -> str:
    """Look at an expression.

    Args:
        expression: What was found.
    """
    return Examiner().check(expression)


@pytest.mark.parametrize("how", [{"tools": [check]}, {"environment_factory": Examiner}], ids=["tool", "environment"])
def test_several_turns(tmp_path, how):
    if Version(transformers.__version__) < Version("5.13"):
        pytest.skip("with transformers below 5.13 TRL reads calls of tools in another way, or not at all")
    Examiner.asked = []
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE
    rows = data(4).map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    reward = lambda completions, **_: [float(len(c)) for c in completions]  # noqa: E731
    settings = how | {
        "tokenizer": tokenizer, "train_dataset": rows, "max_completion_length": 160, "max_steps": 1,
        "max_tool_calling_iterations": 2,
    }  # fmt: skip
    trainer = make(tmp_path, reward, **settings)
    rollout = PacelineRollout().attach(trainer)
    trainer.train()
    assert len(Examiner.asked) > 8, "second turns called it too"
    row = trainer.state.log_history[0]
    assert row["tools/call_frequency"] > 1 and row["tools/failure_frequency"] == 0
    assert metrics(trainer, "paceline/tokens_per_s") and rollout._requests["train"] > 8

    rollout = PacelineRollout()
    wrong = make(tmp_path, reward, rollout_func=rollout, callbacks=[rollout], **settings)
    with pytest.raises(UserError, match=r"attach\(trainer\)"):
        wrong.train()


# What is refused


REFUSED = {
    "beams": ({"generation_kwargs": {"num_beams": 4}}, "num_beams=4"),
    "penalties": ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
    "processors": ({"generation_kwargs": {"bad_words_ids": [[3]]}}, "bad_words_ids"),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_settings_that_cannot_be_honoured(tmp_path, settings, message):
    rollout = PacelineRollout()
    trainer = two_lines(tmp_path, rollout=rollout, **settings)
    with pytest.raises(UserError, match=message):
        rollout([data(1)[0]["prompt"]], trainer)


def test_two_engines_at_once(tmp_path):
    trainer = make(tmp_path, Reward())
    trainer.args.use_vllm = True
    with pytest.raises(UserError, match="use_vllm"):
        PacelineRollout().attach(trainer)


def test_forgotten_callback(tmp_path):
    rollout = PacelineRollout()
    with pytest.raises(UserError, match=r"callbacks=\[rollout\]"):
        make(tmp_path, Reward(), rollout_func=rollout).train()
    attached = two_lines(tmp_path, rollout=rollout)
    with pytest.raises(UserError, match="not both"):
        rollout.attach(attached)


WRONG = {
    "the trainer's": ({"settings": {"rollout.temperature": 0.5}}, "GRPOConfig"),
    "not ours here": ({"settings": {"learn.lr": 1e-3}}, "no meaning beside TRL"),
    "unknown": ({"settings": {"rollout.max_bach": 3}}, "did you mean 'rollout.max_batch'"),
    "share": ({"share": 2.0}, "between 0 and 1"),
    "drafter": ({"settings": {"speculation.drafter": "x"}}, "first argument"),
    "resume": ({"resume": "nowhere"}, "no checkpoint to resume from"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG.keys())
def test_options_that_do_not_work(options, message):
    with pytest.raises(UserError, match=message):
        PacelineRollout(**options)


def test_without_trl(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    spec = importlib.util.find_spec("paceline.integrations.trl")
    with pytest.raises(UserError, match=r"pip install 'paceline\[trl\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_no_drafter_there(tmp_path):
    rollout = PacelineRollout(tmp_path / "nothing")
    trainer = two_lines(tmp_path, rollout=rollout)
    with pytest.raises(UserError, match="no drafter at"):
        rollout([data(1)[0]["prompt"]], trainer)
