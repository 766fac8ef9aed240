"""Bytes of the neural drafter that the settings name, before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field

from paceline.config import Config
from paceline.draft.eagle.model import WINDOW, DrafterShape, EagleModel
from paceline.draft.eagle.vocabulary import guessable
from paceline.errors import UserError
from paceline.files import reading
from paceline.model.decoder import Decoder
from paceline.setup.build import NEW_WINDOW, find_drafter

_Size: Any = Annotated[int, Field(ge=1, le=2**24)]


@dataclass(frozen=True)
class DrafterMemory:
    shared_bytes: int
    """Weights, once for each worker."""
    engine_bytes: int
    """Caches, for each engine."""
    parameters: int
    """That training changes."""
    vocab_size: int
    """Tokens that a training step scores."""


def plan_drafter(policy: Decoder, config: Config, batch: int) -> DrafterMemory | None:
    """None if there is none, or none that can be read: whoever loads it says what is wrong with it."""
    shape = policy.config
    form = _read_form(config, shape.intermediate_size, shape.vocab_size)
    if form is None:
        return None
    width, window, vocab_size = form
    window = min(window, shape.max_positions)
    with torch.device("meta"):
        drafter = EagleModel(policy, DrafterShape(width, window))
    parameters = sum(p.numel() for p in drafter.parameters())
    head = vocab_size * shape.hidden_size if vocab_size < shape.vocab_size else 0  # rows copied of the policy's head
    ring = (batch + 1) * window * 3 * shape.hidden_size  # hidden states of three layers
    cache = (batch + 1) * window * 2 * shape.kv_heads * shape.head_dim
    size = policy.dtype.itemsize
    return DrafterMemory((parameters + head) * size, (ring + cache) * size, parameters, vocab_size)


def _read_form(config: Config, width: int, vocab_size: int) -> tuple[int, int, int] | None:
    """MLP width, window and tokens of its vocabulary; as the policy's where the drafter does not say."""
    name = config.speculation.drafter
    if config.speculation.mode == "plain" or name is None or name == "none":
        return None
    if name == "new":
        return width, NEW_WINDOW, min(guessable(vocab_size), vocab_size)
    try:
        folder = find_drafter(name, config.model.path)
        if folder is None:
            return None
        own = reading.read_object(folder / "config.json")
        ours = reading.check(dict, own.get("paceline") or {}, "paceline")
        width = reading.check(_Size, own.get("intermediate_size", width), "intermediate_size")
        window = reading.check(_Size, ours.get("window", WINDOW), "window")
        count = reading.check(_Size, own.get("draft_vocab_size") or vocab_size, "draft_vocab_size")
    except (UserError, OSError):
        return None
    return width, window, min(count, vocab_size)
