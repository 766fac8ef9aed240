"""Bytes of the learner: the optimizer's state, and what a forward and backward pass keeps."""

from __future__ import annotations

import torch

from paceline.config import LearnConfig
from paceline.kernels.adam import ADAM_CHUNK
from paceline.learn.logprobs import LOGITS_AT_ONCE
from paceline.learn.shards import COPIES
from paceline.lora.memory import adapter_dtype, adapter_sizes, base_bytes, merge_bytes
from paceline.lora.shape import LoraShape
from paceline.model.config import DecoderConfig
from paceline.model.memory import layer_elements

LOGIT_BYTES = 20  # per logit: itself, its float32, log-softmax, entropy, gradient
STEP_TENSORS = 5  # float32 temporaries of a step of the plain AdamW: weight, both moments, gradient, update


def learner_parts(
    learn: LearnConfig, shape: DecoderConfig, sizes: list[int], dtype: torch.dtype, workers: int, cuda: bool
) -> dict[str, int]:
    """What is kept for learning besides the policy's weights, by what it is for; `sizes` are those of its tensors."""
    weights = sum(sizes) * dtype.itemsize
    lora = LoraShape.of(learn.lora)
    if lora is None:
        return {
            "gradients": weights,
            "optimizer": optimizer_bytes(learn, sum(sizes), dtype, workers),
            "reference": weights if learn.kl_coef else 0,
        }
    wide = adapter_dtype(dtype)
    count = sum(adapter_sizes(lora, shape))
    return {
        "base": base_bytes(lora, shape, dtype) if learn.lora.base == "device" or not cuda else 0,
        "adapters": count * wide.itemsize,
        "gradients": count * wide.itemsize,
        "optimizer": optimizer_bytes(learn, count, wide, workers),
        "reference": count * wide.itemsize if learn.lora.path and learn.kl_coef else 0,
    }


def update_bytes(learn: LearnConfig, shape: DecoderConfig, sizes: list[int], dtype: torch.dtype, cuda: bool) -> int:
    """Temporaries of an optimizer step, and of merging adapters."""
    lora = LoraShape.of(learn.lora)
    if lora is None:
        return optimizer_step_bytes(max(sizes), cuda)
    return max(optimizer_step_bytes(max(adapter_sizes(lora, shape)), cuda), merge_bytes(lora, shape, dtype))


def optimizer_bytes(learn: LearnConfig, parameters: int, dtype: torch.dtype, workers: int) -> int:
    """State of one worker's AdamW: two moments and a master copy of its share of the parameters, which is
    min(1, COPIES / workers)."""
    if dtype == torch.float64:
        each = 2 * 8
    else:
        moments = 2 * (2 if learn.optimizer_dtype == "bfloat16" else 4)
        each = moments + (4 if learn.master_weights and dtype.itemsize < 4 else 0)
    return int(each * parameters * min(1.0, COPIES / workers))


def optimizer_step_bytes(largest: int, cuda: bool) -> int:
    """Temporaries of an optimizer step over a parameter of so many elements; a GPU has a kernel that needs none."""
    return 0 if cuda else min(ADAM_CHUNK, largest) * 4 * STEP_TENSORS


def learner_pass_bytes(learn: LearnConfig, shape: DecoderConfig, tokens: int, dtype: torch.dtype) -> int:
    """A forward and backward pass over so many tokens: activations, and logits of as many tokens as are made at
    once."""
    logits = min(LOGITS_AT_ONCE, tokens * shape.vocab_size) * LOGIT_BYTES
    return activation_elements(shape, tokens, learn.activation_checkpointing) * dtype.itemsize + logits


def activation_elements(shape: DecoderConfig, tokens: int, recompute: bool) -> int:
    """Elements that a pass over so many tokens keeps for the backward pass, and those of the layer that the backward
    pass is in (its gradients: half as many again)."""
    layer = layer_elements(shape)
    kept = shape.hidden_size if recompute else layer
    return int(tokens * (shape.layers * kept + 1.5 * layer + 4 * shape.hidden_size))
