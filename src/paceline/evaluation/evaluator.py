"""An evaluation: prompts are answered by the workers that roll out, with the same engines and drafters, and rewarded by
reward processes while others are still decoding. Nothing of it is learned from, neither by the policy nor by a
drafter.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.cluster.lengths import Lengths
from paceline.cluster.messages import RolloutMode
from paceline.errors import UserError
from paceline.evaluation.prompts import STRIDE, EvalSet, index_of, is_greedy
from paceline.evaluation.scores import EvalScores, PromptScores
from paceline.rollout.stats import EngineStats
from paceline.tasks.finished import FinishedAnswers
from paceline.tasks.rewards import total

if TYPE_CHECKING:
    from paceline.cluster.cluster import Cluster
    from paceline.config import Config
    from paceline.core import Group
    from paceline.model.tokenizer import Tokenizer
    from paceline.process.stopping import Stopping
    from paceline.tasks.environments.conversations import Conversations
    from paceline.tasks.reward_pool import RewardPool
    from paceline.tasks.reward_process import RewardResult

WITHOUT_LEARNING = RolloutMode(learn=False)


@dataclass
class EvalResult:
    scores: EvalScores
    groups: list[Group]
    """With completions, texts and rewards."""
    seconds: float
    stats: EngineStats = field(default_factory=EngineStats)


@dataclass
class Evaluator:
    config: Config
    eval_set: EvalSet
    rewards: RewardPool
    shared_rewards: bool
    """Whether the reward processes are those of the run, and closed by it."""
    cluster: Cluster
    tokenizer: Tokenizer
    stopping: Stopping
    note: Callable[[str], None]
    conversations: Conversations | None = None
    """Where completions have turns; those of the run, which closes them."""
    on_progress: Callable[[int, int], None] = lambda finished, tokens: None
    """Called after every round with the completions that are finished and the tokens of all."""

    def __post_init__(self) -> None:
        self._lengths = Lengths(self.eval_set.sampling.max_tokens / 2)
        # The training's own lengths are left alone: they decide who decodes what, and what is recorded of it.
        e = self.config.eval
        known = ["mean", *(f"{kind}@{k}" for k in e.ks for kind in ("pass", "best") if kind == "pass" or k > 1)]
        known += ["greedy"] if e.greedy else []
        known += [name for name, _ in self.rewards.functions]
        if e.best is not None and e.best not in known:
            raise UserError(f"eval.best = '{e.best}' is no number of the evaluation; there are: {', '.join(known)}")

    @property
    def fingerprint(self) -> str:
        """Two evaluations with the same one have the same prompts, dice and rewards: they can be compared in pairs."""
        functions = "".join(f" {name} {weight:g}" for name, weight in self.rewards.functions)
        return hashlib.blake2b((self.eval_set.fingerprint + functions).encode(), digest_size=12).hexdigest()

    def run(self, step: int, fail: Callable[[str], Exception]) -> EvalResult:
        """Evaluate the policy as it is after a step; `fail` makes an error of what is wrong with a reward."""
        started = time.perf_counter()
        groups = {group.sample.index: group for group in self.eval_set.fresh()}
        requests = self.eval_set.requests()
        expected = {r.id: self._lengths.expect(r.prompt) for r in requests}
        finished = 0
        answers = FinishedAnswers(self.tokenizer, self.rewards, self.conversations)
        answers.begin(None, lambda request: groups[index_of(request)].sample)
        for completions in self.cluster.rollout(
            step, requests, expected, WITHOUT_LEARNING, False, STRIDE, answers=self.conversations
        ):
            for completion in completions:
                group = groups[index_of(completion.request.id)]
                answers.finish(completion, group, self.eval_set.answers)
            finished += len(completions)
            self._take(self.rewards.collect(), groups, fail)
            self.on_progress(finished, self.cluster.tokens)
            self.stopping.check()
        while self.rewards.open:
            with self.stopping.at_once():
                results = self.rewards.collect(block=True)
            self._take(results, groups, fail)
        answers.metrics()  # of what belongs to no step
        stats = sum((outcome.stats for outcome in self.cluster.end().values()), EngineStats())
        for group in groups.values():
            self._lengths.learn(group.prompt, [len(c.tokens) for c in group.completions.values()])
        done = list(groups.values())
        return EvalResult(self._score(done), done, time.perf_counter() - started, stats)

    def _take(self, results: list[RewardResult], groups: dict[int, Group], fail: Callable[[str], Exception]) -> None:
        reward = self.config.reward
        for result in results:
            group = groups[index_of(result.request_id)]
            if result.error is None:
                group.set_reward(result.request_id, total(self.rewards.functions, result.values), result.values)
                continue
            where = f"{group.sample.where} of the evaluation on {self.eval_set.task.name} ({group.sample.short})"
            error = f"{result.error} on {where}"
            if reward.on_error == "stop":
                raise fail(error)
            self.note(f"{error}; counted as {reward.error_value:g}")
            group.set_reward(result.request_id, reward.error_value, {"errors": 1.0})

    def _score(self, groups: list[Group]) -> EvalScores:
        pairs = zip(groups, self.eval_set.data, strict=True)
        e = self.config.eval
        return EvalScores([_prompt_scores(group, data) for group, data in pairs], e.ks, e.pass_reward)

    def close(self) -> None:
        if not self.shared_rewards:
            self.rewards.close()


def _prompt_scores(group: Group, data: str) -> PromptScores:
    sampled = [i for i in sorted(group.completions) if not is_greedy(i)]
    greedy = [group.rewards[i] for i in group.completions if is_greedy(i)]
    names = sorted({name for i in sampled for name in group.values[i]} - {"errors"})
    return PromptScores(
        data,
        rewards=[group.rewards[i] for i in sampled],
        lengths=[len(group.completions[i].tokens) for i in sampled],
        cut=sum(group.completions[i].finish_reason == "length" for i in sampled),
        values={name: [group.values[i].get(name) for i in sampled] for name in names},
        greedy=greedy[0] if greedy else None,
    )
