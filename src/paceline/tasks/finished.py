"""A finished completion on its way to the rewards: decoded, once, and with its conversation if it had one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.core import Completion, Group, Sample
    from paceline.model.tokenizer import Tokenizer
    from paceline.tasks.environments.conversations import Conversations
    from paceline.tasks.reward_pool import RewardPool


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
        group.turn_rewards[request] = told.rewards
        columns: dict[str, Any] = {"environment_reward": told.reward, "num_turns": len(told.actions)}
        sample = replace(group.sample, columns=group.sample.columns | columns)
        last = told.actions[-1].text
        self.rewards.submit(request, sample, last, completion.tokens, sample.index, size, told.messages)

    def metrics(self) -> dict[str, float]:
        """Since the last time: what reward functions logged, and what conversations were like."""
        return self.rewards.logged() | (self.conversations.metrics() if self.conversations else {})

    def close(self) -> None:
        self.rewards.close()
        if self.conversations:
            self.conversations.close()
