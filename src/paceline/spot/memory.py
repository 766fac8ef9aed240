"""Bytes of drafter training."""

from __future__ import annotations

import torch

from paceline.spot.step_size import FIRST_STEP_TOKENS_GPU, MAX_STEP_TOKENS, MIN_STEP_TOKENS

LOSS_DEPTH = 5  # draft tokens ahead that a training step scores
SCORE_BYTES = 12  # per score: float32 logit, its softmax and its gradient


def drafter_training_bytes(
    parameters: int, vocab_size: int, hidden_size: int, tokens: int, dtype: torch.dtype, cuda: bool
) -> int:
    """A copy of the drafter and its gradients, its master weights, both moments and merged weights in float32, the
    scores of one step, and hidden states (three tapped layers and the last) of `tokens` that the learner hands over."""
    step = MAX_STEP_TOKENS if cuda else max(MIN_STEP_TOKENS, FIRST_STEP_TOKENS_GPU)
    scores = step * vocab_size * SCORE_BYTES * LOSS_DEPTH
    features = tokens * 4 * hidden_size * dtype.itemsize
    return parameters * (2 * dtype.itemsize + 4 * 4) + scores + features
