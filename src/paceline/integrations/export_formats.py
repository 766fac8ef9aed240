"""A drafter as each engine reads it: the same tensors every time, under other names, with another config.json.

What differs is where the layers of the features are named and how they are counted, how the head is shared, and how the
drafter's window is given; docs/export.md says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.draft.eagle.checkpoint import Eagle3, make_config, vocabulary_maps
from paceline.errors import UserError
from paceline.model.checkpoint import check_model
from paceline.model.config import FAMILIES, DecoderConfig
from paceline.model.weights import read_weights

FORMATS = ("vllm", "sglang", "speculators", "paceline")
SPECULATORS = "0.9.0"  # the version of the library that reads this form


@dataclass
class ExportedDrafter:
    """What all formats are made of."""

    policy: DecoderConfig
    policy_name: str
    """What engines call the policy."""
    depth: int
    """Draft tokens per round that are proposed to the engine."""
    config: dict[str, Any]
    """Paceline's own config.json."""
    tensors: dict[str, Tensor]
    """What was learned; a head only if it is not the policy's."""
    maps: dict[str, Tensor]
    """d2t and t2d; empty if every token can be drafted."""
    policy_rows: Tensor
    """The rows of the policy's head that belong to the draft vocabulary."""

    @property
    def window(self) -> int | None:
        """How far it looks back; None if that is all the policy can."""
        window = self.config["paceline"]["window"]
        return window if window < self.policy.max_positions else None

    @property
    def taps(self) -> list[int]:
        return self.config["paceline"]["feature_layers"]

    def all_tensors(self, head: bool) -> dict[str, Tensor]:
        """With the policy's head if it is wanted, or if only a part of it is used."""
        rows = {"lm_head.weight": self.policy_rows} if head or self.maps else {}
        return rows | self.tensors | self.maps


Files = tuple[dict[str, Any], dict[str, Tensor]]


def gather(found: Eagle3, folder: Path, policy: DecoderConfig, policy_name: str, depth: int) -> ExportedDrafter:
    """Check that the drafter fits the policy in this folder, and bring together what belongs to it."""
    found.check(policy)
    dtype = found.tensors["fc.weight"].dtype if "fc.weight" in found.tensors else torch.float32
    rows = policy_head(folder, policy).to(dtype)
    if found.vocab is not None:
        rows = rows[found.vocab]
    own = found.own_head(rows)
    found.check_tensors(policy, own is not None)
    config = make_config(
        policy,
        found.hf["intermediate_size"],
        min(found.window, policy.max_positions),
        len(rows),
        dtype,
        own is not None,
    )
    if found.block:
        config["ptd_token_id"] = found.mask_token
        config["paceline"]["block"] = found.block.model_dump()
    if "trained" in found.own:
        config["paceline"]["trained"] = found.own["trained"]
    tensors = found.tensors | ({} if own is None else {"lm_head.weight": own})
    maps = {} if found.vocab is None else vocabulary_maps(found.vocab, policy.vocab_size)
    return ExportedDrafter(policy, policy_name, depth, config, tensors, maps, rows)


def make_files(drafter: ExportedDrafter, form: str) -> Files:
    """config.json and tensors in one of `FORMATS`."""
    block = drafter.config["paceline"].get("block")
    if block and (form in ("sglang", "speculators") or (form == "vllm" and block["sequential"])):
        raise UserError(
            f"the format {form} has no drafter whose draft tokens come from one pass"
            + (" and are told the one before them" if block["sequential"] else "")
            + "; export it for paceline, or train one with --kind chain"
            + (" (for vLLM, also --kind parallel)" if block["sequential"] else "")
        )
    return {"vllm": _vllm, "sglang": _sglang, "speculators": _speculators, "paceline": _paceline}[form](drafter)


def _paceline(d: ExportedDrafter) -> Files:
    return d.config, d.all_tensors(head=False)


def _vllm(d: ExportedDrafter) -> Files:
    """vLLM takes the policy's head where the drafter brings none, and honours a window."""
    layers = {"eagle_aux_hidden_state_layer_ids": d.taps, "norm_before_residual": False}
    return d.config | layers | _window(d), d.all_tensors(head=False)


def _sglang(d: ExportedDrafter) -> Files:
    """SGLang names the layers whose output it takes, and shares the head if `draft_vocab_size` is null. The window is
    given on its command line."""
    if d.taps[0] == 0:
        raise UserError(
            f"SGLang cannot give a drafter what enters the first layer, which one for a policy of "
            f"{d.policy.layers} layers needs; export it for vllm"
        )
    layers = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in d.taps], "use_aux_hidden_state": True}
    shared = not d.maps and "lm_head.weight" not in d.tensors
    sizes = {"draft_vocab_size": None if shared else d.config["draft_vocab_size"]}
    return d.config | sizes | {"eagle_config": layers}, d.all_tensors(head=False)


def _speculators(d: ExportedDrafter) -> Files:
    """The layer's sizes are nested, the layer has a number, and the head is always there."""
    own = ("architectures", "draft_vocab_size", "paceline")
    layer = {name: value for name, value in d.config.items() if name not in own} | _window(d)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": d.depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": d.policy_name, "architectures": [FAMILIES[d.policy.family].architecture]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": d.config["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": d.taps,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "tie_word_embeddings": False,
        "dtype": d.config["dtype"],
        "paceline": d.config["paceline"],
    }
    tensors = {name.replace("midlayer.", "layers.0."): t for name, t in d.all_tensors(head=True).items()}
    return config, tensors


def _window(d: ExportedDrafter) -> dict[str, Any]:
    return {} if d.window is None else {"sliding_window": d.window, "layer_types": ["sliding_attention"]}


def policy_head(folder: Path, policy: DecoderConfig) -> Tensor:
    """The policy's head, and nothing else of it."""
    name = "model.embed_tokens.weight" if policy.tied else "lm_head.weight"
    return dict(read_weights(check_model(folder), {name: None}))[name]
