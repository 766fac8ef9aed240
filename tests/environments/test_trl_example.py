"""The example of TRL's documentation, as it is written there: an environment whose methods are tools, a reward function
that looks at environments, and functions with Google docstrings as tools. Here a scripted policy calls them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from paceline.core import Completion, Group, Request, Sample, Turn
from paceline.model.tokenizer import load_tokenizer
from paceline.tasks.environments.chat import Chat
from paceline.tasks.environments.conversations import Conversations
from paceline.tasks.environments.messages import ToolboxSpec
from paceline.tasks.environments.records import TurnRecords
from paceline.tasks.finished import FinishedAnswers
from paceline.tasks.reward_pool import RewardPool

from ..tied import make_tied
from .test_pool import pool_of

WORLD = Path(__file__).parent / "world.py"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokenizer = load_tokenizer(str(make_tied(tmp_path_factory.mktemp("tied") / "model")))
    tokenizer.hf.add_tokens(list('{}"[]_|;'))  # which JSON takes, and its model has never seen
    tokenizer.vocab_size = None
    return tokenizer


def play(conversations: Conversations, tokenizer, texts: list[str], request: int = 0) -> list[int]:
    """Write these turns -> all tokens behind the prompt."""
    tokens: list[int] = []
    for number, text in enumerate(texts):
        turn = [*tokenizer.encode_text(text), 1]
        tokens += turn
        conversations.take(Turn(request, number, turn, "stop"))
        end = time.monotonic() + 60
        answers = []
        while not answers:
            assert time.monotonic() < end
            answers = conversations.answers()
            time.sleep(0.002)
        tokens += answers[0].tokens
        assert answers[0].done == (number + 1 == len(texts))
    return tokens


def call(name: str, **arguments) -> str:
    return f"<tool>{json.dumps({'name': name, 'arguments': arguments})}</tool>"


def rewarded(tokenizer, conversations, sample: Sample, tokens: list[int], functions: list[tuple[str, float]]) -> Group:
    rewards = RewardPool(functions, workers=1)
    try:
        rewards.ready()
        finished = FinishedAnswers(tokenizer, rewards, conversations)
        group = Group(sample, (3,))
        completion = Completion(Request(0, (3,), acts=True), tokens, [0.0] * len(tokens), "stop")
        finished.finish(completion, group, 1)
        results = []
        while not results:
            results = rewards.collect(block=True)
        assert results[0].error is None, results[0].error
        group.values[0] = results[0].values
        return group
    finally:
        rewards.close()


def test_an_environment_whose_methods_are_tools(tokenizer):
    sample = Sample(0, [{"role": "user", "content": "Count to 9."}], {"start": 2})
    with pool_of(ToolboxSpec(environment=f"{WORLD}:Counter")) as pool:
        chat = Chat(tokenizer, pool.imported.schemas, describe=True)
        conversations = Conversations(pool, chat, TurnRecords(None), 8, False)
        prepared = conversations.prepare(sample)
        assert prepared.prompt[-1]["content"] == "Count to 9. You begin at 2." and prepared.task_prompt == sample.prompt
        assert "increment(step: integer)" in prepared.prompt[0]["content"]
        conversations.begin(1, lambda request: prepared)
        texts = [call("increment", step=3), call("increment", step="4"), call("decrement"), "Done."]
        tokens = play(conversations, tokenizer, texts)
        shown = tokenizer.decode(tokens, skip_special=False)
        assert ">5<|im_end|><|assistant|>" in shown and ">9<|im_end|><|assistant|>" in shown
        assert "there is no tool 'decrement'" in shown
        functions = [(f"{WORLD.parent / 'letters.py'}:counted", 1.0), ("environment", 1.0)]
        group = rewarded(tokenizer, conversations, prepared, tokens, functions)
        assert group.values[0] == {functions[0][0]: 9.0, "environment": 9.0}
        assert group.turn_rewards[0] == [0.0, 0.0, 0.0, 9.0]
        metrics = conversations.metrics()
        assert metrics["acting/turns/mean"] == 4 and metrics["acting/tool_calls"] == 3
        assert metrics["acting/tool_errors"] == 1


def test_functions_as_tools_and_messages_for_rewards(tokenizer):
    sample = Sample(0, [{"role": "user", "content": "What is 2 + 3, in capitals?"}], {"answer": "FIVE"})
    with pool_of(ToolboxSpec(tools=(f"{WORLD}:add", f"{WORLD}:upper"))) as pool:
        chat = Chat(tokenizer, pool.imported.schemas, describe=True)
        conversations = Conversations(pool, chat, TurnRecords(None), 8, False)
        conversations.begin(1, lambda request: conversations.prepare(sample))
        texts = [call("add", a=2, b=3), call("upper", text="five") + call("add", a=1), "FIVE"]
        tokens = play(conversations, tokenizer, texts)
        functions = [(f"{WORLD.parent / 'letters.py'}:messages_seen", 1.0), ("exact_match", 1.0)]
        group = rewarded(tokenizer, conversations, sample, tokens, functions)
        # The last turn is what is compared, and the messages are those of TRL: one for each call.
        assert group.values[0] == {functions[0][0]: 6.0, "exact_match": 1.0}
