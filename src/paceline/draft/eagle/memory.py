"""What the EAGLE drafter will take of a device's memory, from its config alone."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field

from paceline.draft.base import DrafterMemory, MemoryRequest
from paceline.draft.eagle.checkpoint import WINDOW, BlockSection
from paceline.draft.eagle.files import find_drafter
from paceline.draft.eagle.model import NEW_WINDOW, DrafterShape, EagleModel
from paceline.draft.eagle.vocabulary import draft_vocab_size
from paceline.errors import UserError
from paceline.files import reading
from paceline.model.config import DecoderConfig

_Size: Any = Annotated[int, Field(ge=1, le=2**24)]


def plan_memory(request: MemoryRequest) -> DrafterMemory | None:
    """None without a drafter, and for one that cannot be read: whoever loads it says what is wrong with it."""
    settings = request.settings
    shape = request.policy.config
    if settings.mode == "plain" or settings.drafter in (None, "none"):
        return None
    try:
        sizes = _sizes(settings.drafter, request.model_path, shape)
    except (UserError, OSError):
        return None
    if sizes is None:
        return None
    width, window, vocab, block = sizes
    window = min(window, shape.max_positions)
    with torch.device("meta"):
        model = EagleModel(request.policy, DrafterShape(width, window, False, *block))
    parameters = sum(p.numel() for p in model.parameters())
    head = vocab if vocab < shape.vocab_size else 0  # rows of the policy's head that are copied
    slots = request.max_batch + 1
    ring = slots * window * len(shape.tap_layers) * shape.hidden_size
    cache = slots * window * 2 * shape.kv_heads * shape.head_dim
    size = request.policy.dtype.itemsize
    return DrafterMemory((parameters + head * shape.hidden_size) * size, (ring + cache) * size, parameters, vocab)


def _sizes(
    name: str | None, model_path: str, shape: DecoderConfig
) -> tuple[int, int, int, tuple[int, int, bool]] | None:
    """Intermediate size, window, tokens that can be drafted, and what `DrafterShape` says of a block; None if there is
    no drafter."""
    if name == "new":
        return shape.intermediate_size, NEW_WINDOW, draft_vocab_size(shape.vocab_size), (0, 0, False)
    folder = find_drafter(name, model_path)
    if folder is None:
        return None
    config = reading.read_object(folder / "config.json")
    own = reading.check(dict, config.get("paceline") or {}, "paceline")
    width = reading.check(_Size, config.get("intermediate_size", shape.intermediate_size), "intermediate_size")
    window = reading.check(_Size, own.get("window", WINDOW), "window")
    vocab = reading.check(_Size, config.get("draft_vocab_size") or shape.vocab_size, "draft_vocab_size")
    found = own.get("block")
    block = reading.check(BlockSection, found, "paceline.block") if found else None
    of_block = (block.tokens, 0, block.sequential) if block else (0, 0, False)
    return width, window, min(vocab, shape.vocab_size), of_block
