"""What runs in vLLM's workers: `worker_extension_cls` adds these methods to its worker, and they are called by
`collective_rpc` between two steps of the engine, so that no request notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from paceline.draft.eagle.checkpoint import HEAD
from paceline.draft.eagle.files import WEIGHTS
from paceline.errors import Sentence
from paceline.files.reading import inside, read_tensors
from paceline.integrations.vllm import internals
from paceline.integrations.vllm.same_shape import difference
from paceline.model.checkpoint import find_model


class DrafterWorker:
    """A worker whose drafter can be exchanged. Every name begins with `paceline`: vLLM refuses an extension that has a
    name of its worker."""

    vllm_config: Any
    _paceline_loaded: dict[str, Tensor] | None = None  # what the drafter was loaded from last, if not at the start
    _paceline_folder: str | None = None  # and where that lay

    def paceline_load_drafter(self, folder: str) -> str | None:
        """Take the drafter in this folder -> None; or why not, with the one before still in place."""
        try:
            found = difference(Path(folder), self._paceline_started_with())
            if found is not None:
                return found
            tensors = self._paceline_read(Path(folder))
            before = self._paceline_loaded or self._paceline_read(self._paceline_started_with())
        except (Sentence, OSError, SafetensorError) as err:
            return str(err)
        try:
            self._paceline_fill(tensors)
        except (RuntimeError, ValueError, KeyError, AttributeError, OSError) as err:
            self._paceline_fill(before)
            return f"loading {folder} was interrupted ({type(err).__name__}: {err})"
        self._paceline_loaded = tensors
        self._paceline_folder = folder
        return None

    def paceline_loaded_from(self) -> str:
        """The folder of the drafter that this worker has."""
        return self._paceline_folder or str(self._paceline_started_with())

    def _paceline_started_with(self) -> Path:
        return find_model(self.vllm_config.speculative_config.draft_model_config.model)

    def _paceline_read(self, folder: Path) -> dict[str, Tensor]:
        """On the host. vLLM's loader knows the names in the dialects of those who write drafters."""
        tensors = read_tensors(inside(folder, WEIGHTS))
        if internals.shares_head(self):
            tensors.pop(HEAD, None)
        return {name: tensor for name, tensor in tensors.items() if "embed_tokens" not in name}

    @torch.no_grad()
    def _paceline_fill(self, tensors: dict[str, Tensor]) -> None:
        internals.load_draft_weights(self, iter(tensors.items()))
