"""Drafters from and to folders: in the EAGLE-3 form that serving engines read (`eagle.checkpoint`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.draft.eagle.checkpoint import HEAD, MASK, MIX_IN, MIX_OUT, make_config, read_eagle3, vocabulary_maps
from paceline.draft.eagle.model import DrafterShape, EagleModel
from paceline.errors import UserError
from paceline.files.reading import inside, named_path
from paceline.model.checkpoint import find_model
from paceline.model.decoder import Decoder

DRAFTER = "drafter"  # folder beside a model's weights that holds its drafter
WEIGHTS = "model.safetensors"


def find_drafter(name: str | None, model_path: str) -> Path | None:
    """The folder of a drafter: the one named, or with `auto` the one that lies in the model's own folder."""
    if name is None or name == "none":
        return None
    if name != "auto":
        if not named_path(name).is_dir():
            raise UserError(
                f"no drafter at {name}: train one with `paceline draft train`, or set speculation.drafter=auto"
            )
        return named_path(name)
    model = find_model(model_path)
    return inside(model, DRAFTER) if (model / DRAFTER / "config.json").is_file() else None


class DrafterFiles(NamedTuple):
    """What a drafter's folder holds."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


def files_of(drafter: EagleModel, trained: dict[str, Any] | None = None) -> DrafterFiles:
    """A drafter as it is now, on the host, in the form that serving engines read; `trained` says what it learned
    from."""
    c = drafter.policy.config
    shape = drafter.shape
    vocab_size = c.vocab_size if drafter.vocab is None else len(drafter.vocab)
    hf = make_config(c, shape.intermediate_size, shape.window, vocab_size, drafter.fc.dtype, shape.own_head)
    if shape.block:
        hf["ptd_token_id"] = shape.mask_token  # as serving engines call it
        hf["paceline"]["block"] = {"tokens": shape.block, "sequential": shape.sequential}
    if trained:
        hf["paceline"]["trained"] = trained
    tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in _layout(drafter).items()}
    if drafter.vocab is not None:
        tensors |= vocabulary_maps(drafter.vocab, c.vocab_size)
    if drafter.vocab is not None and not shape.own_head:
        tensors[HEAD] = drafter.head().to("cpu", copy=True).contiguous()
    return DrafterFiles(hf, tensors)


def write_files(files: DrafterFiles, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(files.config, indent=2) + "\n")
    save_file(files.tensors, folder / WEIGHTS, metadata={"format": "pt"})


def save_drafter(drafter: EagleModel, folder: Path, trained: dict[str, Any] | None = None) -> None:
    write_files(files_of(drafter, trained), folder)


@torch.no_grad()
def load_drafter(folder: Path, policy: Decoder) -> EagleModel:
    """A drafter for `policy`, from Paceline or in the EAGLE-3 form from elsewhere; refuses one made for another."""
    found = read_eagle3(folder)
    c = policy.config
    found.check(c)
    head = policy.head.weight if found.vocab is None else policy.head.weight[found.vocab.to(policy.device)]
    own = found.own_head(head)
    found.check_tensors(c, own is not None)
    tensors = found.tensors | ({HEAD: own} if own is not None else {})
    block = found.block
    shape = DrafterShape(
        found.hf["intermediate_size"],
        min(found.window, c.max_positions),
        own is not None,
        block.tokens if block else 0,
        found.mask_token if block else 0,
        bool(block and block.sequential),
    )
    drafter = EagleModel(policy, shape, found.vocab)
    for name, target in _layout(drafter).items():
        target.copy_(tensors[name])
    return drafter


def _layout(drafter: EagleModel) -> dict[str, Tensor]:
    """Names in checkpoints, and the tensors, or parts of fused tensors, that hold them here."""
    layer: Any = drafter.layer
    c = drafter.policy.config
    q, k, v = layer.qkv.split((c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim))
    gate, up = layer.gate_up.chunk(2)
    more = {HEAD: drafter.own_head, MASK: drafter.mask_hidden, MIX_IN: drafter.mix_in, MIX_OUT: drafter.mix_out}
    return {name: tensor for name, tensor in more.items() if tensor is not None} | {
        "fc.weight": drafter.fc,
        "midlayer.input_layernorm.weight": drafter.embed_norm,
        "midlayer.hidden_norm.weight": layer.input_norm,
        "midlayer.post_attention_layernorm.weight": layer.post_norm,
        "midlayer.self_attn.q_proj.weight": q,
        "midlayer.self_attn.k_proj.weight": k,
        "midlayer.self_attn.v_proj.weight": v,
        "midlayer.self_attn.o_proj.weight": layer.o,
        "midlayer.mlp.gate_proj.weight": gate,
        "midlayer.mlp.up_proj.weight": up,
        "midlayer.mlp.down_proj.weight": layer.down,
        "norm.weight": drafter.norm,
    }
