"""vLLM 0.26 to 0.31 draft chains of full depth in their second model runner, whatever was scheduled. Here it is put
right from outside, in engines that have Paceline's scheduler.

From 0.28 on the drafter's passes may be one CUDA graph, which cannot be shortened: then a depth of 0 or 1 saves them,
and another one does not.
"""

from __future__ import annotations

import functools
import logging
from importlib import import_module
from typing import Any

from paceline.integrations.vllm.versions import VllmNames

RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
log = logging.getLogger("vllm.paceline")


def follow_schedule(names: VllmNames) -> None:
    """Make the second model runner draft as deep as Paceline's scheduler says. Where a name has moved, it is left as
    it is: then every depth has the cost of the deepest, which the tuner measures."""
    if names.speculator is None:
        return
    try:
        runner, speculator = find(RUNNER), find(names.speculator)
        execute, propose = runner.execute_model, speculator.propose
    except (ImportError, AttributeError) as err:
        log.warning("drafting is as deep as vLLM has it, because a name of this version has moved: %s", err)
        return
    runner.execute_model = noting_depth(execute)
    speculator.propose = drafting_to_depth(propose)


def noting_depth(execute_model: Any) -> Any:
    @functools.wraps(execute_model)
    def execute(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "speculator", None) is not None:
            self.speculator.paceline_depth = getattr(scheduler_output, "paceline_depth", None)
        return execute_model(self, scheduler_output, *args, **kwargs)

    return execute


def drafting_to_depth(propose: Any) -> Any:
    """`propose` of a speculator that makes `num_speculative_steps` passes."""

    @functools.wraps(propose)
    def propose_to_depth(self: Any, *args: Any, **kwargs: Any) -> Any:
        depth = getattr(self, "paceline_depth", None)
        deepest = self.num_speculative_steps
        # The first pass reads what was verified, and is made in any case.
        passes = deepest if depth is None or kwargs.get("dummy_run") else min(deepest, max(1, depth))
        if passes > 1 and getattr(self, "use_fused_multi_step_decode", False):
            passes = deepest
        self.num_speculative_steps = passes
        try:
            return propose(self, *args, **kwargs)
        finally:
            self.num_speculative_steps = deepest

    return propose_to_depth


def find(name: str) -> Any:
    """A class by `module:name`."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
