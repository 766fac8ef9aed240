"""The tuner for an engine, made from vLLM's configuration; None, with a reason, where it cannot work."""

from __future__ import annotations

import logging
from math import inf
from typing import Any

from paceline.integrations.vllm.settings import TunerSettings
from paceline.integrations.vllm.state_file import StateFile
from paceline.integrations.vllm.steps import StepMeter
from paceline.integrations.vllm.tuning import DepthTuner, Envelope
from paceline.integrations.vllm.versions import installed_version

MATCHING = ("ngram", "ngram_gpu", "suffix", "custom_class")
"""Methods that may propose nothing for a sequence."""
log = logging.getLogger("vllm.paceline")


class SchedulerTuning:
    """The tuner of a scheduler, with its measurements, its file and its line in the log."""

    def __init__(self, tuner: DepthTuner, meter: StepMeter, file: StateFile | None, log_s: float):
        self.tuner = tuner
        self.meter = meter
        self.file = file
        self.log_s = log_s
        self._logged = 0.0  # `tuner.seconds` when the last line was written

    def tell(self, idle: bool) -> None:
        """After a step; `idle` tells whether it was the last one for now."""
        if self.file is not None:
            self.file.save_if_due(self.tuner, idle)
        if self.log_s and self.tuner.seconds - self._logged >= self.log_s:
            self._logged = self.tuner.seconds
            log.info("%s", describe(self.tuner))

    def end(self) -> None:
        if self.tuner.steps:
            log.info("%s", describe(self.tuner))
        if self.file is not None:
            self.file.save(self.tuner)


def describe(tuner: DepthTuner) -> str:
    found = tuner.summary()
    steps = max(1, sum(found["steps_by_depth"].values()))
    shares = ", ".join(
        f"{'off' if depth == '0' else depth} {count / steps:.0%}" for depth, count in found["steps_by_depth"].items()
    )
    return (
        f"Paceline: depth {found['depth']}, accept length {found['accept_length']:.2f} while speculating; steps by "
        f"depth: {shares}; {found['explored']:.1%} of the time for trials"
    )


def make_tuning(vllm_config: Any, has_table: bool) -> SchedulerTuning | None:
    """None where depths cannot be changed: then speculation is as vLLM has it, and one sentence says why."""
    speculative = vllm_config.speculative_config
    why = None
    if speculative is None:
        why = "there is no drafter: give vLLM a speculative_config"
    elif vllm_config.parallel_config.data_parallel_size > 1:
        why = (
            "with data parallelism inside vLLM each rank would pick another depth and wait for the others: start one "
            "engine per rank instead"
        )
    elif not has_table:
        why = (
            "vLLM has captured CUDA graphs for one depth only: let it load the plug-in (VLLM_PLUGINS must be unset or "
            "name paceline), or give speculative_config num_speculative_tokens_per_batch_size"
        )
    if why is not None:
        log.warning("Paceline's tuner is off, and speculation as vLLM has it: %s", why)
        return None
    settings = TunerSettings.of(vllm_config.additional_config)
    settings.check(speculative.num_speculative_tokens)
    envelope = envelope_of(vllm_config)
    tuner = DepthTuner(envelope, settings.explore, settings.margin)
    file = StateFile(settings.state, engine_of(vllm_config)) if settings.state else None
    if file is not None:
        file.restore(tuner)
    log.info(
        "Paceline's tuner picks depths of %s draft tokens for batches of up to %d sequences, %s",
        ", ".join(map(str, envelope.depths)),
        envelope.max_batch,
        "without CUDA graphs"
        if envelope.most_rows == inf
        else f"verifying at most {envelope.most_rows} tokens at once",
    )
    return SchedulerTuning(tuner, StepMeter(tuner, speculative.method not in MATCHING), file, settings.log_s)


def envelope_of(vllm_config: Any) -> Envelope:
    """The depths of vLLM's table; rows up to the largest CUDA graph, if there are any."""
    speculative, compilation = vllm_config.speculative_config, vllm_config.compilation_config
    deepest = speculative.num_speculative_tokens
    depths = {min(depth, deepest) for _, _, depth in speculative.num_speculative_tokens_per_batch_size}
    rows = compilation.max_cudagraph_capture_size or inf
    return Envelope(tuple(sorted(depths | {0})), vllm_config.scheduler_config.max_num_seqs, rows)


def engine_of(vllm_config: Any) -> dict[str, Any]:
    """What the duration of a step depends on."""
    from vllm.platforms import current_platform

    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    return {
        "model": str(vllm_config.model_config.model),
        "drafter": str(speculative.model),
        "device": current_platform.get_device_name(),
        "dtype": str(vllm_config.model_config.dtype),
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "vllm": installed_version(),
    }
