"""The RL algorithms: one line each in `ALGORITHMS`. Its names are what `learn.algorithm` can be, its functions are what
the learner computes advantages by, and its other values are what settings of `learn` that are `null` become.

A new algorithm is a file with its advantage function and a line here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import UserError
from paceline.learn import advantages
from paceline.learn.advantages import TokenAdvantage, per_answer

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.learn.losses import Aggregate


@dataclass(frozen=True)
class Algorithm:
    advantage: TokenAdvantage
    aggregate: Aggregate
    """How token losses become one number, see `losses.token_weights`."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dynamic_sampling: bool = False
    overlong_buffer_share: float = 0.0
    """Of max_tokens."""
    kl_in_reward: bool = False
    """The KL divergence to the reference is subtracted from the reward of each token instead of added to the loss."""


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(per_answer(advantages.grpo), "sequence_mean"),
    "dr_grpo": Algorithm(per_answer(advantages.dr_grpo), "constant"),
    "dapo": Algorithm(
        per_answer(advantages.grpo), "token_mean", clip_high=0.28, dynamic_sampling=True, overlong_buffer_share=0.2
    ),
    "rloo": Algorithm(per_answer(advantages.rloo), "sequence_sum"),
    "reinforce_pp": Algorithm(advantages.reinforce_pp, "token_mean", kl_in_reward=True),
}


def check_algorithm(name: str) -> str:
    """The name of an algorithm, or a ValueError that lists them all."""
    if name not in ALGORITHMS:
        raise ValueError(f"it should be one of {', '.join(map(repr, ALGORITHMS))}")
    return name


def resolve(config: Config) -> Config:
    """The config with every `null` that the algorithm decides filled in."""
    learn = config.learn
    if config.environment.credit == "turn" and ALGORITHMS[learn.algorithm].kl_in_reward:
        raise UserError(
            f"environment.credit=turn compares turns within a group, and learn.algorithm={learn.algorithm} compares "
            "tokens of all groups: take grpo, dr_grpo, dapo or rloo, or environment.credit=outcome"
        )
    algorithm = ALGORITHMS[learn.algorithm]
    defaults = {
        "clip_low": algorithm.clip_low,
        "clip_high": algorithm.clip_high,
        "aggregate": algorithm.aggregate,
        "dynamic_sampling": algorithm.dynamic_sampling,
        "overlong_buffer": int(config.rollout.max_tokens * algorithm.overlong_buffer_share),
    }
    chosen = {k: v for k, v in defaults.items() if getattr(learn, k) is None}
    return config.model_copy(update={"learn": learn.model_copy(update=chosen)})
