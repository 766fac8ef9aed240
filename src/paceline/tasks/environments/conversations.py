"""The driver's side of conversations: turns of requests that act go to the environments, observations come back.

A worker that is lost takes nothing with it: what a turn has led to is kept here until the rollout is over, and whoever
writes the same turn again gets the same answer. What is recorded outlives the driver too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.core import Completion, Observation, Sample, Turn
from paceline.tasks.environments.chat import Chat
from paceline.tasks.environments.messages import Action, JobDone
from paceline.tasks.environments.pool import EnvironmentPool
from paceline.tasks.environments.protocol import Messages, StepResult
from paceline.tasks.environments.records import TurnRecords, key_of


@dataclass
class Conversation:
    """Of one completion, as far as it is."""

    sample: Sample
    """As the task has it."""
    is_chat: bool
    """Whether the policy was given messages."""
    actions: list[Action] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    answers: list[Observation] = field(default_factory=list)
    last: bool = False
    """Whether nothing follows the turn that is open."""

    @property
    def reward(self) -> float | None:
        """The sum of what the environment gave; None if it gave nothing."""
        given = [result.reward for result in self.results if result.reward is not None]
        return sum(given) if given else None

    @property
    def rewards(self) -> list[float]:
        """Of each turn."""
        return [result.reward or 0.0 for result in self.results]

    @property
    def messages(self) -> Messages:
        """As TRL's reward functions get it: turns of the assistant, and between them what it was told."""
        out: Messages = []
        for i, action in enumerate(self.actions):
            out.append({"role": "assistant", "content": action.text})
            if i + 1 < len(self.actions):
                seen = self.results[i].observation
                out += [{"role": "user", "content": seen}] if isinstance(seen, str) else seen
        return out


class Conversations:
    def __init__(self, pool: EnvironmentPool, chat: Chat, records: TurnRecords, max_turns: int, ends_on_error: bool):
        self.pool = pool
        self.chat = chat
        self.records = records
        self.max_turns = max_turns
        self.ends_on_error = ends_on_error
        self._finished: list[Conversation] = []  # since metrics were asked for
        self._open: dict[int, Conversation] = {}
        self._jobs: dict[int, int] = {}  # number of a job -> its request
        self._ready: deque[Observation] = deque()
        self._sample_of: Callable[[int], Sample] = lambda request: Sample(request, "")
        self._step: int | None = None

    def prepare(self, sample: Sample) -> Sample:
        """With the prompt that the policy is given: the environment's or the task's, with the tools."""
        prompt = self.chat.offered(self.pool.prompt(sample) if self.pool.keeps_state else sample.prompt)
        return sample if prompt == sample.prompt else replace(sample, prompt=prompt, task_prompt=sample.prompt)

    def begin(self, step: int | None, sample_of: Callable[[int], Sample]) -> None:
        """A rollout begins, whose results are recorded if it has a step. `sample_of` tells the sample of a request."""
        self._step = step
        self._sample_of = sample_of
        self._open = {}
        self._jobs = {}
        self._ready.clear()
        self.pool.forget()

    # As the cluster asks

    def take(self, turn: Turn) -> None:
        conversation = self._open.get(turn.request_id)
        if conversation is None:
            sample = self._sample_of(turn.request_id)
            own = sample if sample.task_prompt is None else replace(sample, prompt=sample.task_prompt, task_prompt=None)
            is_chat = not isinstance(sample.prompt, str)
            conversation = self._open[turn.request_id] = Conversation(own, is_chat)
        if turn.number < len(conversation.answers):  # written again after a worker was lost
            self._ready.append(conversation.answers[turn.number])
            return
        if turn.number < len(conversation.actions):  # it is being answered
            return
        assert turn.number == len(conversation.actions), "turns come in order"
        conversation.actions.append(self.chat.action(turn.tokens))
        conversation.last = turn.finish_reason == "length" or turn.number + 1 >= self.max_turns
        actions = tuple(conversation.actions)
        known = None
        if self._step is not None:
            known = self.records.find(key_of(self._step, turn.request_id, conversation.sample, actions))
        if known is not None:
            self._answer(turn.request_id, *known)
            return
        number = self.pool.submit(turn.request_id, conversation.sample, actions, conversation.last)
        self._jobs[number] = turn.request_id

    def answers(self) -> list[Observation]:
        for done in self.pool.collect():
            request = self._jobs.pop(done.number, None)
            if request is not None:  # otherwise of a rollout that was given up
                self._done(request, done)
        ready = list(self._ready)
        self._ready.clear()
        return ready

    def _done(self, request: int, done: JobDone) -> None:
        result = done.result
        failed = result is None
        if result is None:
            result = StepResult(self.chat.failure(f"error: {done.error}"), None, self.ends_on_error, errors=1)
        conversation = self._open[request]
        if self._step is not None:
            key = key_of(self._step, request, conversation.sample, tuple(conversation.actions))
            self.records.write(key, self._step, request, len(conversation.answers), result, failed)
        self._answer(request, result, failed)

    def _answer(self, request: int, result: StepResult, failed: bool) -> None:
        conversation = self._open[request]
        turn = len(conversation.answers)
        action = conversation.actions[turn]
        if failed:
            conversation.actions[turn] = replace(action, failed=True)
        conversation.results.append(result)
        ends = result.done or conversation.last or (self.ends_on_error and result.errors > 0)
        tokens = [] if ends else self.chat.observation(action.end, result.observation, conversation.is_chat)
        observation = Observation(request, turn, tokens, ends)
        conversation.answers.append(observation)
        self._ready.append(observation)

    def finish(self, completion: Completion) -> Conversation:
        """What there was of a completion that is complete."""
        conversation = self._open.pop(completion.request.id)
        self._finished.append(conversation)
        return conversation

    def metrics(self) -> dict[str, float]:
        """Of the conversations that were finished since the last time."""
        done = self._finished
        self._finished = []
        if not done:
            return {}
        results = [result for conversation in done for result in conversation.results]
        turns = [len(conversation.actions) for conversation in done]
        metrics: dict[str, Any] = {
            "acting/turns/mean": sum(turns) / len(turns),
            "acting/turns/max": max(turns),
            "acting/tool_calls": sum(result.calls for result in results),
            "acting/tool_errors": sum(result.errors for result in results),
            "acting/tool_s": sum(result.seconds for result in results),
            "acting/longest_tool_s": max(sum(r.seconds for r in conversation.results) for conversation in done),
        }
        return {name: float(value) for name, value in metrics.items()}

    def close(self) -> None:
        self.pool.close()
