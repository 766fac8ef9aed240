"""What the drafter's training reads of vLLM, in one place: names that vLLM may move from version to version.

The same from 0.26 to 0.33 in the main line: the engine's settings, its step, and the reloading of a model's weights
layer by layer, into the memory that captured graphs read.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from paceline.errors import UserError

EXTENSION = "paceline.integrations.vllm.worker.DrafterWorker"
METHOD = "eagle3"
RELOADING = "vllm.model_executor.model_loader.reload.layerwise"
"""The logger of what loads weights."""


class EngineFacts(NamedTuple):
    """What a running engine says about itself."""

    policy: str
    """Folder or hub id."""
    drafter: str
    dtype: str
    """Of the weights, as in `float32`."""
    device: str
    """Its kind: `cuda` or `cpu`."""


def facts_of(llm: Any) -> EngineFacts:
    """Of an `LLM` or `LLMEngine`; refuses one whose drafter cannot be trained."""
    config = engine_of(llm).vllm_config
    speculative = config.speculative_config
    if speculative is None or speculative.method != METHOD:
        method = getattr(speculative, "method", None)
        has = f"speculates by {method}" if method else "does not speculate"
        raise UserError(
            f"this vLLM engine {has}, so there is no drafter to train: start it with "
            "LLM(model, **speculation(model, folder))"
        )
    if config.parallel_config.worker_extension_cls in ("", None):
        raise UserError(
            f"this vLLM engine was started without worker_extension_cls='{EXTENSION}', by which its drafter is "
            "exchanged: start it with LLM(model, **speculation(model, folder))"
        )
    return EngineFacts(
        str(config.model_config.model),
        str(speculative.draft_model_config.model),
        str(config.model_config.dtype).removeprefix("torch."),
        str(config.device_config.device_type),
    )


def engine_of(llm: Any) -> Any:
    """The engine in an `LLM`; others are engines themselves."""
    return getattr(llm, "llm_engine", llm)


def is_asleep(llm: Any) -> bool:
    """Whether the engine has given its memory away for now, so that nothing can be loaded into it."""
    return bool(engine_of(llm).is_sleeping())


def load_policy_weights(worker: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Load them into a worker's running policy, each into the memory where its predecessor lies, and in the form that
    its kernels want."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model = worker.get_model()
    own = {name for name, _ in model.named_parameters()}
    loaded = None
    with set_current_vllm_config(worker.vllm_config), _without_warnings():
        initialize_layerwise_reload(model)
        try:
            loaded = model.load_weights(tensors)
        finally:
            finalize_layerwise_reload(model, worker.vllm_config.model_config)
    missing = sorted(own - loaded) if loaded else []
    if missing:
        raise UserError(
            f"the learner's weights have nothing for {len(missing)} of vLLM's tensors, such as {missing[0]}"
        )


def load_draft_weights(worker: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Load them into a worker's running draft model, each into the memory where its predecessor lies. Raises whatever
    goes wrong in between, with all layers usable again, though some hold new and some old weights."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model = draft_model(worker)
    with set_current_vllm_config(worker.vllm_config), _without_warnings():
        initialize_layerwise_reload(model)
        try:
            model.load_weights(tensors)
        finally:
            finalize_layerwise_reload(model, worker.vllm_config.speculative_config.draft_model_config)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """vLLM warns of each layer that nothing is loaded into: the drafter shares the policy's embeddings and head."""
    logger = logging.getLogger(RELOADING)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def draft_model(worker: Any) -> Any:
    return worker.get_draft_model()


def shares_head(worker: Any) -> bool:
    """Whether the draft model scores tokens with the policy's own head: what is loaded there would change the
    policy."""
    head = getattr(draft_model(worker), "lm_head", None)
    return any(module is head for module in worker.get_model().modules())
