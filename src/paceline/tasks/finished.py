"""A finished completion on its way to the rewards: decoded, once, and with its conversation if it had one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.tasks.environments.protocol import EndedEnvironment
from paceline.tasks.rewards import ENVIRONMENT, total

if TYPE_CHECKING:
    from paceline.config import RewardConfig
    from paceline.core import Completion, Group, Sample
    from paceline.model.tokenizer import Tokenizer
    from paceline.tasks.environments.conversations import Conversations
    from paceline.tasks.reward_pool import RewardPool
    from paceline.tasks.reward_process import RewardResult


class FinishedAnswers:
    def __init__(self, tokenizer: Tokenizer, rewards: RewardPool, conversations: Conversations | None):
        self.tokenizer = tokenizer
        self.rewards = rewards
        self.conversations = conversations
        """Where completions have turns."""

    def begin(self, step: int | None, sample_of: Callable[[int], Sample]) -> None:
        """A rollout begins; `step` is None for what belongs to none, and `sample_of` tells the sample of a request."""
        if self.conversations:
            self.conversations.begin(step, sample_of)

    def finish(self, completion: Completion, group: Group, size: int) -> None:
        """Enter it into its group of `size`, and have it rewarded: a conversation by its last turn, with what the
        environment gave in the column `environment_reward`."""
        text = self.tokenizer.decode(completion.tokens)
        group.add(completion, text)
        request = completion.request.id
        if self.conversations is None:
            self.rewards.submit(request, group.sample, text, completion.tokens, group.sample.index, size)
            return
        told = self.conversations.finish(completion)
        weight = sum(weight for name, weight in self.rewards.functions if name == ENVIRONMENT)
        group.turn_rewards[request] = [weight * given for given in told.rewards]
        columns: dict[str, Any] = {"environment_reward": told.reward, "num_turns": len(told.actions)}
        if told.results and self.conversations.pool.keeps_state:
            columns["environments"] = EndedEnvironment(told.results[-1].attributes)
        sample = replace(group.sample, columns=group.sample.columns | columns)
        last = told.actions[-1].text
        self.rewards.submit(request, sample, last, completion.tokens, sample.index, size, told.messages)

    def take(
        self, result: RewardResult, group: Group, config: RewardConfig, task: str, stop: Callable[[str], Exception]
    ) -> None:
        """The reward of one of the group's completions, or what went wrong: that is counted, or raised by `stop`."""
        request = result.request_id
        if result.error is None:
            group.set_reward(request, total(self.rewards.functions, result.values), result.values)
            group.extras[request] = result.extra
            return
        which = f"{group.sample.where} of {task} ({group.sample.short})"
        self.rewards.errors.add(result.kind or result.error, result.error, result.trace, which)
        if config.on_error == "stop":
            raise stop(f"{result.error} on {which}")
        group.set_reward(request, config.error_value, {"errors": 1.0})

    def metrics(self) -> dict[str, float]:
        """Since the last time: what reward functions logged, and what conversations were like."""
        return self.rewards.logged() | (self.conversations.metrics() if self.conversations else {})

    def close(self) -> None:
        self.rewards.close()
        if self.conversations:
            self.conversations.close()
