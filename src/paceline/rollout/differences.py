"""Where two rollouts of the same requests differ, and how close the scores of the two tokens were there."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core import Completion
from paceline.kernels.noise import gumbel, position_keys, request_key
from paceline.kernels.positions import rotations
from paceline.model.attention import PackedAttention
from paceline.model.decoder import Decoder, rms_norm
from paceline.model.rope import rotation_constants

WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64, torch.float64: torch.float64}
LATEST = 32  # positions over which the effect of rounding is measured


@dataclass
class Difference:
    """Where two rollouts of a request first sampled different tokens, and how close their scores were."""

    request: int
    position: int
    gap: float
    rounding: float
    near_tie: bool


def explain(model: Decoder, pairs: list[tuple[Completion, Completion]]) -> list[Difference]:
    """Run the policy once more over what each two have in common, and compare the scores of the tokens that differ.

    The pass is run in the model's precision and in a wider one. Their largest difference, over all tokens of the
    vocabulary at the latest positions, is what rounding does to a score. A near-tie is a pair of tokens whose scores
    lie closer together than twice that: each of the two may have been moved."""
    if not pairs:
        return []
    return [_explain(model, a, b) for a, b in pairs]


def _explain(model: Decoder, a: Completion, b: Completion) -> Difference:
    shared = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y), None)
    if shared is None:
        raise AssertionError(f"request {a.request.id} ended differently after the same tokens")
    tokens = [*a.request.prompt, *a.tokens[:shared]]
    temperature = a.request.sampling.temperature
    logits, rounded = exact_logits(model, tokens)
    rounding = rounded / (temperature or 1.0)
    scores = logits / (temperature or 1.0)
    if temperature:
        key = torch.tensor([request_key(a.request.seed, a.request.id)], device=model.device)
        position = torch.tensor([len(tokens)], device=model.device)
        scores = scores + gumbel(position_keys(key, position), len(scores), torch.float64)[0]
    gap = abs(float(scores[a.tokens[shared]] - scores[b.tokens[shared]]))
    return Difference(a.request.id, shared, gap, rounding, gap <= 2 * rounding)


def exact_logits(model: Decoder, tokens: list[int]) -> tuple[Tensor, float]:
    """Of the next token, float64 [V], from a pass in the wider precision; and the most that the model's own precision
    has changed a logit by at the latest positions."""
    exact = _exact_logits(model, tokens)
    return exact[-1], float((exact - _latest_logits(model, tokens)).abs().max())


@torch.no_grad()
def _latest_logits(model: Decoder, tokens: list[int]) -> Tensor:
    """float64 [positions, V], the last row being what the next token is drawn from."""
    attention = PackedAttention([len(tokens)], model.device)
    hidden, _ = model(torch.tensor(tokens, device=model.device), attention.positions(), attention)
    return model.logits(hidden[-LATEST:]).double()


@torch.no_grad()
def _exact_logits(model: Decoder, tokens: list[int]) -> Tensor:
    """The same in the wider precision. One layer is widened at a time: beside a learner there is no room for two
    models."""
    wide = WIDER[model.dtype]
    c = model.config
    device = model.device
    attention = PackedAttention([len(tokens)], device)
    turned = rotations(attention.positions(), *rotation_constants(c.rope, c.head_dim, device, wide), wide)
    x = model.embed(torch.tensor(tokens, device=device)).to(wide)
    for layer in model.layers:
        x = copy.deepcopy(layer).to(wide).forward(x, *turned, attention)
    hidden = rms_norm(x[-LATEST:], model.norm.to(wide), c.norm_eps)
    return F.linear(hidden, model.head.weight.to(wide)).double()
