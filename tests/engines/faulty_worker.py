"""vLLM's worker with a drafter that can be exchanged, and whose loading can be made to break in the middle."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from paceline.integrations.vllm import internals
from paceline.integrations.vllm.worker import DrafterWorker


class FaultyWorker(DrafterWorker):
    paceline_breaks_after: int | None = None

    def paceline_break_after(self, tensors: int | None) -> None:
        """The next exchange breaks after so many tensors."""
        self.paceline_breaks_after = tensors

    def _paceline_fill(self, tensors: dict[str, Tensor]) -> None:
        internals.load_draft_weights(self, self._paceline_breaking(tensors))

    def _paceline_breaking(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        after = self.paceline_breaks_after
        self.paceline_breaks_after = None
        for i, item in enumerate(tensors.items()):
            if i == after:
                raise RuntimeError("the loader was made to break here")
            yield item
