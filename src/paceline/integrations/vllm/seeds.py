"""A seed for requests that come without one, so that they too get the same tokens from the same engine."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

from paceline.kernels.noise import MASK, request_key

SUFFIX = re.compile(r"-[0-9a-f]{8}$")
"""What vLLM puts behind the id of a request to make it unique."""
HASH_FACTOR = 0x100000001B3  # of FNV-1a: Python's own hash of a text differs from process to process
HASH_START = 0xCBF29CE484222325


def seed_of(engine_seed: int, name: str) -> int:
    """Of a request by its id, 63 bits: the engine's seed and the id decide, whatever runs beside it."""
    hashed = HASH_START
    for byte in name.encode():
        hashed = ((hashed ^ byte) * HASH_FACTOR) & MASK
    return request_key(engine_seed, hashed) & (MASK >> 1)


def name_of_request(request: Any) -> str:
    """The id that the caller or `LLM` gave, without what vLLM has put behind it; samples of one prompt keep their
    number in front of it."""
    given = getattr(request, "external_req_id", None)
    name: str = request.request_id
    return SUFFIX.sub("", name) if given is not None and given != name else name


def with_seed(preprocess: Any, wanted: Any) -> Any:
    """`EngineCore.preprocess_add_request`, which sees every request before a worker does."""

    @functools.wraps(preprocess)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        sampling = request.sampling_params
        if sampling is not None and sampling.seed is None and sampling.temperature > 0 and wanted(self.vllm_config):
            request.sampling_params = copy.copy(sampling)
            request.sampling_params.seed = seed_of(self.vllm_config.model_config.seed, name_of_request(request))
        return preprocess(self, request)

    return preprocess_add_request
