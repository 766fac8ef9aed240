"""Policies of families that our decoder does not run, as transformers has them: mixtures of experts, Gemma, Phi and so
on. They can be learned, saved, and sent to an engine that runs them; nothing here decodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import UserError
from paceline.model.checkpoint import find_model
from paceline.model.decoder import as_dtype
from paceline.model.foreign_config import ForeignConfig

PADDED = 1.25  # tokens of a padded pass over its real ones, at most, unless it is a single sequence
SHARD_SIZE = "5GB"
AGREES = {torch.bfloat16: 5e-2, torch.float32: 1e-3, torch.float64: 1e-6}
"""By how much two ways to the same logits may differ."""


class ForeignModel(nn.Module):
    """A causal language model of transformers, as the learner takes it."""

    def __init__(self, hf: Any, config: ForeignConfig):
        super().__init__()
        self.hf = hf
        self.config = config
        text = hf.config.get_text_config()
        self._softcap = getattr(text, "final_logit_softcapping", None)  # Gemma
        self._divisor = getattr(text, "logits_scaling", None)  # Granite
        self._factor = getattr(text, "logit_scale", None)  # Cohere

    @property
    def dtype(self) -> torch.dtype:
        return next(self.hf.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.hf.parameters()).device

    def hidden(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        """tokens [N] of sequences end to end -> last hidden states [N, hidden]. Sequences of similar length run
        together, padded on the right: what stands behind a token does not change it."""
        sequences = list(tokens.split(lengths))
        out: list[Tensor] = [tokens] * len(lengths)
        for some in similar(lengths):
            padded = nn.utils.rnn.pad_sequence([sequences[i] for i in some], batch_first=True)
            found = self.hf.base_model(input_ids=padded, use_cache=False).last_hidden_state
            for row, i in enumerate(some):
                out[i] = found[row, : lengths[i]]
        return torch.cat(out)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.hf.get_output_embeddings()(hidden)
        if self._factor:
            logits = logits * self._factor
        if self._divisor:
            logits = logits / self._divisor
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    @torch.no_grad()
    def check_logits(self) -> None:
        """Refuse a family that makes its logits in another way than `logits` does."""
        tokens = torch.arange(min(8, self.config.vocab_size), device=self.device)
        ours = self.logits(self.hidden(tokens, [len(tokens)])).double().log_softmax(-1)
        theirs = self.hf(input_ids=tokens[None], use_cache=False).logits[0].double().log_softmax(-1)
        if float((ours - theirs).abs().max()) > AGREES[self.dtype]:
            raise UserError(
                f"models of the family '{self.config.family}' make their logits in a way that Paceline's learner does "
                "not know: it cannot train this one"
            )


def similar(lengths: list[int]) -> Iterator[list[int]]:
    """Indices of sequences that run together, so that little is padded; the longest first."""
    some: list[int] = []
    total = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if some and (len(some) + 1) * lengths[some[0]] > PADDED * (total + lengths[i]):
            yield some
            some = []
            total = 0
        some.append(i)
        total += lengths[i]
    if some:
        yield some


def load_foreign(
    path: str, config: ForeignConfig, dtype: str, device: str | torch.device, recompute: bool
) -> ForeignModel:
    """With `recompute` layers are run again in the backward pass."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # there is a view of ours
    folder = find_model(path)
    device = torch.device(device)
    kind = as_dtype(dtype, device)
    try:
        hf = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, OSError, RuntimeError) as err:
        first = str(err).strip().partition("\n")[0]
        raise UserError(f"transformers cannot load the model at {folder}: {first}") from err
    hf = hf.to(device).requires_grad_(False)
    for module in hf.modules():  # what is drawn at random would not be what the engine has
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    hf.train(recompute)  # transformers recomputes layers of models in training only
    if recompute:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = ForeignModel(hf, config)
    model.check_logits()
    return model


def foreign_layout(model: ForeignModel) -> dict[str, Tensor]:
    """(Hugging Face name, tensor) of all weights, by the names of its checkpoints. What transformers fuses in memory,
    such as experts, is taken apart again."""
    state: dict[str, Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in model.hf.state_dict().items():
        if tensor.data_ptr() and (tensor.data_ptr(), tensor.shape) in seen:
            continue  # tied embeddings: one of them
        seen.add((tensor.data_ptr(), tensor.shape))
        state[name] = tensor
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model.hf, state))


def save_foreign(model: ForeignModel, folder: Path) -> None:
    """As transformers does it. The tokenizer is saved apart."""
    folder.mkdir(parents=True, exist_ok=True)
    model.hf.save_pretrained(folder, max_shard_size=SHARD_SIZE)
