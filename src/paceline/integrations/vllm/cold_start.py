"""What vLLM is started with, so that its drafter can be trained: a drafter of ours, new if there is none yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.draft.eagle.files import load_drafter
from paceline.draft.eagle.model import NEW_WINDOW, DrafterShape, EagleModel, new_drafter
from paceline.draft.eagle.vocabulary import choose_tokens
from paceline.errors import UserError
from paceline.files.reading import inside, read_object
from paceline.integrations.vllm.drafter_folder import DrafterFolder
from paceline.integrations.vllm.features import FollowedPolicy, load_policy
from paceline.integrations.vllm.internals import EXTENSION, METHOD
from paceline.model.checkpoint import find_model

DRAFT_DEPTH = 5


def speculation(
    model: str | Path,
    folder: str | Path,
    *,
    drafter: str | Path = "new",
    depth: int = DRAFT_DEPTH,
    window: int = NEW_WINDOW,
    vocab: int | None = None,
    dtype: str = "auto",
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments for `LLM(model, ...)`, with which it drafts from `folder` and `DrafterTrainer` can train it.

    The newest version in `folder` is taken. If there is none, one is made: from the EAGLE-3 checkpoint `drafter` (of
    Paceline, SpecForge or the speculators library), or an untrained one, which looks back on `window` tokens and can
    propose `vocab` tokens (by default all of a small vocabulary). `dtype` is that of the weights in it, by default the
    model's. For that the model is read once, on the host."""
    if depth < 1:
        raise UserError(f"depth={depth} is not a number of draft tokens: it must be 1 or more")
    place = DrafterFolder(Path(folder))
    newest = place.newest()
    if newest is None:
        kind = _stored_dtype(str(model)) if dtype == "auto" else dtype
        policy = load_policy(str(model), kind, torch.device("cpu"))
        made = (
            load_drafter(Path(drafter), policy.decoder) if drafter != "new" else _untrained(policy, window, vocab, seed)
        )
        newest = (0, place.write(0, made))
        place.record({"version": 0, "published": True, "from": str(drafter)})
    return {
        "speculative_config": {"method": METHOD, "model": str(newest[1]), "num_speculative_tokens": depth},
        "worker_extension_cls": EXTENSION,
    }


def _stored_dtype(model: str) -> str:
    config = read_object(inside(find_model(model), "config.json"))
    stored = config.get("dtype") or config.get("torch_dtype")
    return "bfloat16" if stored in ("bfloat16", "float16") else "float32"


def _untrained(policy: FollowedPolicy, window: int, vocab: int | None, seed: int) -> EagleModel:
    decoder = policy.decoder
    tokens = choose_tokens(decoder, vocab)
    if len(decoder.layers):
        return new_drafter(decoder, window, seed, tokens)
    c = decoder.config  # of a model whose layers are not ours to begin with
    return EagleModel(decoder, DrafterShape(c.intermediate_size, min(window, c.max_positions)), tokens).init_weights(
        seed
    )
