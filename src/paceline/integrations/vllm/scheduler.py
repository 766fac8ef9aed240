"""vLLM's scheduler with Paceline's tuner: it picks the depth of speculation of every step, off included.

The scheduler tells the model runner with each step how many tokens to draft (`num_spec_tokens_to_schedule`), which vLLM
reads from a table by batch size. Here the tuner says it instead; everything else is vLLM's own. Tokens are scheduled,
verified and sampled as without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler

from paceline.integrations.vllm.configure import make_tuning
from paceline.integrations.vllm.steps import requests_gone


class TunedScheduler(AsyncScheduler):
    clock: Callable[[], float] = staticmethod(time.perf_counter)
    """Measures steps; tests have one of their own."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any):
        super().__init__(vllm_config, *args, **kwargs)
        # With synchronous scheduling vLLM uses the class that the asynchronous one derives from.
        self._base: Any = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else SyncScheduler
        self.paceline = make_tuning(vllm_config, self.dynamic_sd_lookup is not None)
        self._started = 0.0  # scheduling the step that is being scheduled

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._started = self.clock()
        return super().schedule(*args, **kwargs)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """The last part of `schedule`: the batch is known, and the draft tokens of the next step are not."""
        if self.paceline is not None and scheduler_output.num_scheduled_tokens:
            choice = self.paceline.meter.scheduled(scheduler_output, self._started, len(self.waiting) > 0)
            scheduler_output.num_spec_tokens_to_schedule = choice.strategy.depth
            scheduler_output.paceline_depth = choice.strategy.depth  # read by `drafting` in the worker
        self._base._update_after_schedule(self, scheduler_output)

    def _update_request_with_output(self, *args: Any, **kwargs: Any) -> Any:
        return self._base._update_request_with_output(self, *args, **kwargs)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if self.paceline is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        names = scheduler_output.num_scheduled_tokens
        before = {name: self.requests[name] for name in names if name in self.requests}
        self.paceline.meter.read(
            scheduler_output,
            model_runner_output.sampled_token_ids,
            model_runner_output.req_id_to_index,
            requests_gone(before, names),
        )
        running = len(self.running)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        ended = {}
        if len(self.running) < running:
            ended = {name: r.num_output_tokens for name, r in before.items() if r.is_finished()}
        busy = len(self.running) > 0
        self.paceline.meter.done(scheduler_output, self.clock(), busy, ended)
        self.paceline.tell(idle=not busy and not len(self.waiting))
        return outputs

    def shutdown(self) -> None:
        if self.paceline is not None:
            self.paceline.end()
        super().shutdown()
