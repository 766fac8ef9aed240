"""A decoder with the weights of a Hugging Face model that another trainer trains.

Where the layout is the same on both sides (embeddings, head, norms, the projections that write into the residual
stream) the decoder uses the model's own memory, so nothing has to be copied after an update. What is fused here (q/k/v
and gate/up), has another precision, or lies under an adapter is a copy, which `sync` writes again, in place: captured
graphs stay valid. The model itself is only ever read.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import UserError
from paceline.model import Decoder, DecoderConfig
from paceline.model.checkpoint import layout
from paceline.model.foreign import ForeignModel
from paceline.model.foreign_config import foreign_config


class ForeignMirror:
    """A model of a family that our decoder does not run: it is its own mirror, for engines that get copies."""

    moved = False

    def __init__(self, model: Any):
        base = base_model(model, "the trainer's model")
        if base is not model:
            raise UserError(
                "the trainer's model has adapters, which Paceline merges for the families of its own decoder only, and "
                f"this is one of '{base.config.model_type}': train all weights, or without PacelineRollout"
            )
        where = Path(getattr(base.config, "_name_or_path", "") or "the trainer's model")
        self.decoder = ForeignModel(base, foreign_config(base.config.to_dict(), where))
        self.decoder.check_logits()

    def sync(self) -> None:
        """Nothing here is a copy."""


class Mirror:
    def __init__(self, model: Any, dtype: torch.dtype | None = None, where: str = "the model"):
        """`model` is a PreTrainedModel, or a PeftModel around one; `dtype` is its own unless given."""
        self._model = base = base_model(model, where)
        config = DecoderConfig.from_hf(base.config.to_dict(), where)
        with torch.device("meta"):
            self.decoder = Decoder(config)
        wanted = dict(layout(self.decoder))
        self._modules = {name: _find(base, name, where) for name in wanted}
        for name, part in wanted.items():
            self._check(name, part, where)
        like = _weight(self._modules["model.embed_tokens.weight"], "model.embed_tokens.weight")
        self.dtype = dtype or like.dtype
        self._shared: dict[str, Tensor] = {}  # the trainer's, by Hugging Face name
        self._fill(wanted, like.device)
        self.sync()

    def _check(self, name: str, part: Tensor, where: str) -> None:
        weight = _weight(self._modules[name], name)
        if weight.shape != part.shape or not weight.is_floating_point():
            raise UserError(
                f"tensor {name} of {where} has shape {list(weight.shape)} in {str(weight.dtype).removeprefix('torch.')}"
                f", but its config implies {list(part.shape)}: models that are quantized or split over several devices "
                "cannot be followed"
            )

    @torch.no_grad()
    def _fill(self, wanted: dict[str, Tensor], device: torch.device) -> None:
        """Give every parameter memory: the model's own where it can be used, new memory elsewhere."""
        names = {id(part): name for name, part in wanted.items()}  # parts of fused tensors match no parameter
        for module in self.decoder.modules():
            for key, param in list(module.named_parameters(recurse=False)):
                name = names.get(id(param), "")
                weight = None if not name or _tuned(self._modules[name]) else _weight(self._modules[name], name).data
                if weight is not None and self._usable(weight, device):
                    self._shared[name] = weight
                else:
                    weight = torch.empty(param.shape, dtype=self.dtype, device=device)
                setattr(module, key, nn.Parameter(weight, requires_grad=False))
        if self.decoder.config.tied:
            self.decoder.head.weight = self.decoder.embed.weight
        self.decoder.to(device)  # makes the frequencies anew, where the weights are
        self._copied = {name: part for name, part in layout(self.decoder) if name not in self._shared}

    def _usable(self, weight: Tensor, device: torch.device) -> bool:
        return weight.dtype == self.dtype and weight.device == device and weight.is_contiguous()

    @property
    def shared_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._shared.values())

    @property
    def moved(self) -> bool:
        """Whether the model has left the memory that it shared, so that a new mirror is needed."""
        pairs = ((_weight(self._modules[name], name), mine) for name, mine in self._shared.items())
        return any(theirs.data_ptr() != mine.data_ptr() or theirs.dtype != mine.dtype for theirs, mine in pairs)

    @torch.no_grad()
    def sync(self) -> None:
        """Bring what is copied up to date."""
        tuned: dict[int, list[str]] = defaultdict(list)
        for name, mine in self._copied.items():
            module = self._modules[name]
            if _tuned(module):
                tuned[id(module)].append(name)
            else:
                mine.copy_(_weight(module, name))
        for names in tuned.values():  # a layer at a time, so that only one is ever there twice
            layer = _merged(self._modules[names[0]])
            for name in names:
                self._copied[name].copy_(_weight(layer, name))


def base_model(model: Any, where: str = "the model") -> Any:
    """The model itself, where there are adapters in it."""
    if not hasattr(model, "peft_config"):
        return model
    if model.active_peft_config.is_prompt_learning:
        raise UserError(
            f"{where} is tuned by {model.active_peft_config.peft_type.value}, which cannot be merged into its weights; "
            "use an adapter that can, such as LoRA"
        )
    return model.get_base_model()


def _find(base: Any, name: str, where: str) -> Any:
    module = name.rpartition(".")[0]
    try:
        return base.get_submodule(module)
    except AttributeError as err:
        raise UserError(f"{where} has no {module}, which models of its family have") from err


def _weight(module: Any, name: str) -> Tensor:
    return getattr(module.get_base_layer() if _tuned(module) else module, name.rpartition(".")[2])


def _tuned(module: Any) -> bool:
    """Whether an adapter changes what this layer does."""
    return hasattr(module, "get_base_layer") and hasattr(module, "merge")


def _merged(layer: Any) -> Any:
    """The layer with its adapters merged in. PEFT merges in place and rounds while it does so; the trainer's own
    weights must not change, so a copy in float32 is merged."""
    layer = copy.deepcopy(layer)
    layer.to(torch.promote_types(layer.get_base_layer().weight.dtype, torch.float32))
    if not layer.merged:
        try:
            layer.merge()
        except NotImplementedError as err:
            raise UserError(f"an adapter of type {type(layer).__name__} cannot be merged into its layer") from err
    return layer.get_base_layer()
