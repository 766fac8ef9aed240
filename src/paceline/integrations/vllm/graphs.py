"""The CUDA graphs of vLLM's second model runner, where a table of depths goes with them badly; put right from outside,
in engines that have Paceline's scheduler.

Up to 0.31 the graphs of drafting are listed with the table, and get negative sizes or end in a division by zero. Up to
0.28 a pass looks only at the graphs of the next larger size, of which there may be none for its depth, and then runs
without a graph.
"""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace
from typing import Any

from paceline.integrations.vllm.drafting import find
from paceline.integrations.vllm.settings import is_ours
from paceline.integrations.vllm.versions import VllmNames

log = logging.getLogger("vllm.paceline")


def list_graphs(names: VllmNames) -> None:
    """Where a name has moved, nothing is changed."""
    try:
        if names.graphs is not None:
            graphs = find(names.graphs)
            graphs._init_candidates = at_every_size(graphs._init_candidates)
        if names.draft_graphs is not None:
            drafting = find(names.draft_graphs)
            drafting._init_candidates = without_table(drafting._init_candidates)
    except (ImportError, AttributeError) as err:
        log.warning("CUDA graphs are those of vLLM, because a name of this version has moved: %s", err)


def without_table(init_candidates: Any) -> Any:
    """The drafter's passes after the first one have a token per sequence at every depth."""

    @functools.wraps(init_candidates)
    def init(self: Any) -> None:
        config = self.vllm_config
        if self.decode_query_len > 1 or not is_ours(config.scheduler_config.scheduler_cls):
            return init_candidates(self)
        self.vllm_config = SimpleNamespace(speculative_config=None, scheduler_config=config.scheduler_config)
        try:
            return init_candidates(self)
        finally:
            self.vllm_config = config

    return init


def at_every_size(init_candidates: Any) -> Any:
    """A pass of so many tokens may take the next larger graph of its own kind, not only the next larger one of any."""

    @functools.wraps(init_candidates)
    def init(self: Any) -> None:
        init_candidates(self)
        if is_ours(self.vllm_config.scheduler_config.scheduler_cls):
            self._candidates = candidates_by_size(self._capture_descs)

    return init


def candidates_by_size(graphs_by_mode: Any) -> dict[tuple[int, int], list[Any]]:
    """From the graphs of each mode, the largest first: those that a pass may take, by its tokens and the number of
    LoRA adapters in it, whole graphs before piecewise ones. vLLM takes the first one that fits."""
    found: dict[tuple[int, int], list[Any]] = {}
    for mode in sorted(graphs_by_mode, key=lambda mode: mode.name != "FULL"):
        first: dict[tuple[Any, int], int] = {}  # tokens that no smaller graph of the kind has room for
        for graph in reversed(graphs_by_mode[mode]):
            kind = (graph.uniform_token_count, graph.num_active_loras)
            for tokens in range(first.get(kind, 0), graph.num_tokens + 1):
                found.setdefault((tokens, graph.num_active_loras), []).append(graph)
            first[kind] = max(first.get(kind, 0), graph.num_tokens + 1)
    return found
