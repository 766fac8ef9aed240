"""Growing a model in depth and vocabulary without changing its outputs: the cost of a large model with the behaviour of
one that was trained in minutes.

A layer whose output projections are zero adds nothing to the residual stream (`Layer.is_idle`), so such layers can be
inserted anywhere. A drafter reads the stream at three depths (`DecoderConfig.tap_layers`), and should read the same in
the grown model: as many active layers come before each tap as before. The shallowest model for which that works has
three idle layers after the active ones, and a drafter that was trained on it fits all models that are grown from it.

Tokens that the tokenizer never writes get copies of the last row of the vocabulary. Before training, the model is given
a direction that all hidden states share and that this row points away from (`lean_away`); during training, the row
counts in the softmax as often as it will be copied (`push_down`). The grown model then has the probabilities that were
trained, and never samples such a token.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from paceline.model.config import DecoderConfig
from paceline.model.decoder import Decoder, Layer

IDLE_LAYERS = 3  # after the last tap
AWAY = 50.0  # -logit of the last token at first, for hidden states of norm sqrt(width), about 0.7 of it in common
MARGIN = 12.0  # nats by which the logits of unused tokens are lowered beyond what the loss itself would do


def active_indices(active: int, layers: int) -> list[int]:
    """The indices of `active` layers among `layers`: as many of them before the first tap, between taps, and before the
    last one as in a model that has them all first and then `IDLE_LAYERS`."""
    assert active + IDLE_LAYERS >= 7, "below seven layers the taps are elsewhere"
    chosen: list[int] = []
    for (first, last), (start, end) in zip(
        pairwise((0, *_taps(active + IDLE_LAYERS))), pairwise((0, *_taps(layers))), strict=True
    ):
        count, available = last - first, end - start
        assert count <= available, f"{layers} layers are too few for {active} active ones"
        chosen += [start + i * available // count for i in range(count)]
    return chosen


def _taps(layers: int) -> tuple[int, int, int]:
    return 2, layers // 2, layers - 3


def active_layers(model: Decoder) -> list[int]:
    """Indices of the layers that add something to the residual stream."""
    return [i for i, layer in enumerate(model.layers) if not cast(Layer, layer).is_idle()]


@torch.no_grad()
def grow(model: Decoder, layers: int, vocab_size: int | None = None, seed: int = 0) -> Decoder:
    """The same function with `layers` layers and `vocab_size` tokens. Idle layers that the model has are made anew."""
    active = active_layers(model)
    vocab_size = vocab_size or model.config.vocab_size
    assert vocab_size >= model.config.vocab_size, "a vocabulary cannot shrink"
    changes = {"num_hidden_layers": layers, "vocab_size": vocab_size}
    with torch.device("meta"):
        grown = Decoder(DecoderConfig.from_hf(model.config.hf | changes))
    grown = grown.to(model.dtype).to_empty(device=model.device)
    if grown.config.tied:
        grown.head.weight = grown.embed.weight
    source = dict(zip(active_indices(len(active), layers), active, strict=True))
    generator = torch.Generator(model.device).manual_seed(seed)
    for i, layer in enumerate(grown.layers):
        if i in source:
            layer.load_state_dict(model.layers[source[i]].state_dict())
        else:
            _make_idle(layer, generator)
    grown.norm.copy_(model.norm)
    _repeat_last(grown.embed.weight, model.embed.weight)
    if not grown.config.tied:
        _repeat_last(grown.head.weight, model.head.weight)
    return grown.requires_grad_(False)


def _make_idle(layer: torch.nn.Module, generator: torch.Generator) -> None:
    """Fresh weights, but zeros for the output projections."""
    assert isinstance(layer, Layer)
    for name, param in layer.named_parameters():
        if name in ("qkv", "gate_up"):
            param.normal_(0, 0.02, generator=generator)
        else:
            param.fill_(1.0 if name.endswith("norm") else 0.0)


def _repeat_last(target: Tensor, source: Tensor) -> None:
    target[: len(source)] = source
    target[len(source) :] = source[-1]


@torch.no_grad()
def lean_away(model: Decoder, seed: int = 0) -> Decoder:
    """Make the last token of a fresh model very unlikely in any context: without biases, that takes a direction which
    all hidden states have in common."""
    generator = torch.Generator("cpu").manual_seed(seed)
    common = torch.empty(model.config.hidden_size).normal_(0, 1, generator=generator).to(model.embed.weight)
    common *= model.embed.weight.std()
    model.embed.weight += common
    model.head.weight[-1] = -AWAY / common.numel() ** 0.5 * common / common.norm()
    return model


def push_down(logits: Tensor, unused: int) -> Tensor:
    """Logits [N, V] for the loss of a model that is to grow by `unused` tokens, all with the last row of the head:
    log(1 + unused) + MARGIN is added to the last token's, so that sampling will never draw one of them."""
    extra = torch.zeros(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    extra[-1] = math.log1p(unused) + MARGIN
    return logits + extra
