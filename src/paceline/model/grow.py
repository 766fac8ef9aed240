"""Growing a model in depth and vocabulary without changing what it says: the cost of a large model with the behaviour
of one that was trained in minutes.

A layer whose output projections are zero adds nothing to the residual stream, whatever it computes on the way, so such
layers can be put anywhere. A drafter reads the stream at three depths, and should read the same in the grown model: so
the layers that do something keep their place between the taps. The shallowest model for which that works has three idle
layers behind the others, and a drafter that was trained on it fits all models that are grown from it.

Tokens that no text has get the last row of the vocabulary, over and over. Before it is trained, the model is given a
direction that all hidden states share and that this row points away from (`lean_away`); while it is trained, the row
counts in the loss as often as it will be there (`push_down`). What is grown then has the probabilities that were
trained, and never draws such a token.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from paceline.model.config import DecoderConfig
from paceline.model.decoder import Decoder, Layer

IDLE = 3  # layers behind the last tap
AWAY = 50.0  # a hidden state has the size of the square root of its width, and shares about 0.7 of that
MARGIN = 12.0  # nats by which unused tokens are pushed down further than the loss itself would


def places(active: int, layers: int) -> list[int]:
    """Where `active` layers go among `layers`: the same number of them before the first tap, between taps, and before
    the last one as in a model that has them all in front and `IDLE` layers behind."""
    assert active + IDLE >= 7, "below seven layers taps lie elsewhere"
    chosen: list[int] = []
    for (first, last), (start, end) in zip(
        pairwise((0, *_taps(active + IDLE))), pairwise((0, *_taps(layers))), strict=True
    ):
        count, room = last - first, end - start
        assert count <= room, f"{layers} layers are too few for {active} that do something"
        chosen += [start + i * room // count for i in range(count)]
    return chosen


def _taps(layers: int) -> tuple[int, int, int]:
    return 2, layers // 2, layers - 3


def active_layers(model: Decoder) -> list[int]:
    """The layers that do something."""
    return [i for i, layer in enumerate(model.layers) if not _idle(layer)]


def _idle(layer: torch.nn.Module) -> bool:
    own = dict(layer.named_parameters())
    return not any(bool(own[name].any()) for name in ("o", "down", "o_bias", "down_bias") if name in own)


@torch.no_grad()
def grow(model: Decoder, layers: int, vocab_size: int | None = None, seed: int = 0) -> Decoder:
    """The same function with so many layers and tokens. Idle layers that the model has already are made anew."""
    active = active_layers(model)
    vocab_size = vocab_size or model.config.vocab_size
    assert vocab_size >= model.config.vocab_size, "a vocabulary cannot shrink"
    changes = {"num_hidden_layers": layers, "vocab_size": vocab_size}
    with torch.device("meta"):
        grown = Decoder(DecoderConfig.from_hf(model.config.hf | changes))
    grown = grown.to(model.dtype).to_empty(device=model.device)
    if grown.config.tied:
        grown.head.weight = grown.embed.weight
    source = dict(zip(places(len(active), layers), active, strict=True))
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
    """As a fresh layer, but that nothing of it gets out."""
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
    """Make the last token of a fresh model very unlikely whatever the text: without biases, that takes something which
    all hidden states have in common."""
    generator = torch.Generator("cpu").manual_seed(seed)
    common = torch.empty(model.config.hidden_size).normal_(0, 1, generator=generator).to(model.embed.weight)
    common *= model.embed.weight.std()
    model.embed.weight += common
    model.head.weight[-1] = -AWAY / common.numel() ** 0.5 * common / common.norm()
    return model


def push_down(logits: Tensor, unused: int) -> Tensor:
    """Logits [N, V] for the loss of a model that is to grow by `unused` tokens, all with the last row: in the sum over
    tokens it counts as often, and for `MARGIN` more, so that sampling will never meet one."""
    extra = torch.zeros(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    extra[-1] = math.log1p(unused) + MARGIN
    return logits + extra
