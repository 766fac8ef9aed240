"""An algorithm that Paceline does not have, as somebody would write it: this file, and a line in the table."""

from __future__ import annotations

from torch import Tensor

from paceline.learn.advantages import per_answer
from paceline.learn.algorithms import Algorithm


def max_baseline(rewards: Tensor) -> Tensor:
    """A_i = r_i - max(r), over the group: the best answer stays as it is, the others become less likely."""
    return rewards - rewards.max(-1, keepdim=True).values


ALGORITHM = Algorithm(per_answer(max_baseline), "token_mean", clip_high=0.3)
