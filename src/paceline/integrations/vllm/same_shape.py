"""Whether a drafter can take the place of another one in a running engine, from their files' headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.draft.eagle.checkpoint import HEAD, IGNORED, is_drafter
from paceline.files.reading import inside, read_object, shorten
from paceline.model.weights import inventory

NESTED = ("transformer_layer_config", "eagle_config", "paceline")
"""Sections of config.json in which one dialect or another keeps what is compared."""
SAME = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "rope_theta",
    "sliding_window",
    "eagle_aux_hidden_state_layer_ids",
)
"""What the engine has built its drafter by, besides the shapes of tensors."""


def difference(new: Path, running: Path) -> str | None:
    """Why the drafter at `new` cannot take the place of the one that the engine was started with, in one sentence; None
    if it can."""
    config = read_object(inside(new, "config.json"))
    if not is_drafter(config):
        return f"{new} holds {shorten(str(config.get('architectures')))}, not a drafter"
    theirs, ours = _flat(config), _flat(read_object(inside(running, "config.json")))
    for name in SAME:
        if theirs.get(name) != ours.get(name):
            return _refused(new, f"{name} {shorten(str(theirs.get(name)))}", shorten(str(ours.get(name))))
    shapes, wanted = _shapes(new), _shapes(running)
    # The head may be missing where it is the policy's own.
    for name in sorted((shapes.keys() ^ wanted.keys()) - {HEAD}):
        has = "the tensor" if name in shapes else "no tensor"
        return _refused(new, f"{has} {shorten(name)}", "none" if name in shapes else "one")
    if HEAD in shapes and HEAD not in wanted:
        return _refused(new, "a head of its own", "the policy's")
    for name, shape in shapes.items():
        if shape != wanted[name]:
            return _refused(new, f"{name} of shape {list(shape)}", str(list(wanted[name])))
    return None


def _refused(new: Path, theirs: str, ours: str) -> str:
    return (
        f"the drafter at {new} has {theirs}, but the one that the engine was started with has {ours}; start the engine "
        "with it instead"
    )


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    flat = dict(config)
    for section in NESTED:
        flat |= config.get(section) or {}
    return flat


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """By the names that Paceline writes."""
    named = {
        name.removeprefix("model.").replace("layers.0.", "midlayer.", 1): stored.shape
        for name, stored in inventory(folder).items()
    }
    return {name: shape for name, shape in named.items() if name not in IGNORED}
