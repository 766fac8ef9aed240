"""From settings to working parts: the device, the sampling parameters, the engine with its drafters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.config import Config
from paceline.core import SamplingParams
from paceline.draft.base import DrafterSetup
from paceline.draft.eagle.files import find_drafter
from paceline.draft.eagle.model import EagleModel
from paceline.draft.registry import choose_strategies, make_drafters, make_network
from paceline.model.decoder import Decoder
from paceline.model.foreign import ForeignModel
from paceline.rollout.engine import EngineSettings, RolloutEngine
from paceline.rollout.pages import GPU_KV_SHARE
from paceline.rollout.stops import Decode

if TYPE_CHECKING:
    from paceline.rollout.worker_engine import WorkerEngine
    from paceline.setup.engines import EngineSetup


def make_sampling(config: Config, eos_ids: tuple[int, ...]) -> SamplingParams:
    r = config.rollout
    return SamplingParams(
        r.temperature,
        r.top_k,
        r.top_p,
        r.min_p,
        r.max_tokens,
        r.min_tokens,
        stop_token_ids=eos_ids,
        stop=tuple(r.stop),
    )


def longest_completion(config: Config) -> int:
    """Tokens: of the rollout, or of evaluation."""
    e = config.eval
    return max(config.rollout.max_tokens, (e.max_tokens or 0) if e.task else 0)


def engine_settings(config: Config, device: torch.device, sharing: int = 1) -> EngineSettings:
    """`sharing` is how many engines share the device."""
    r, s = config.rollout, config.speculation
    kv = int(r.kv_memory_gb * 1e9) if r.kv_memory_gb else None
    if kv is None and sharing > 1:
        kv = int(torch.cuda.get_device_properties(device).total_memory * GPU_KV_SHARE / sharing)
    longest = config.task.max_prompt_tokens
    return EngineSettings(
        max_batch=min(r.max_batch, r.prompts * r.samples),
        max_length=longest + longest_completion(config) if longest else None,
        page_size=r.page_size,
        kv_bytes=kv,
        prefill_tokens=r.prefill_tokens,
        cuda_graphs=r.cuda_graphs,
        graph_bytes=int(s.graph_memory_gb * 1e9) if s.graph_memory_gb else None,
        explore=s.explore,
    )


def make_engine(
    model: Decoder, config: Config, decode: Decode | None, network: EagleModel | None, sharing: int = 1
) -> RolloutEngine:
    """An engine as the settings want it, with the drafters that there are. `network` holds the weights of the trained
    one, if there is one; `sharing` is how many engines share the device."""
    s = config.speculation
    settings = engine_settings(config, model.device, sharing)
    longest = min(settings.max_length or model.config.max_positions, model.config.max_positions)
    drafters = make_drafters(DrafterSetup(model, s, settings.max_batch, longest, network))
    engine = RolloutEngine(model, settings, decode, drafters, choose_strategies(s, network is not None))
    if engine.runner.graphs is not None:
        engine.capture()
    return engine


def make_worker_engine(setup: EngineSetup) -> WorkerEngine:
    """Paceline's own."""
    assert isinstance(setup.model, Decoder), "other families are refused when their config is read"
    return make_engine(setup.model, setup.config, setup.decode, setup.drafter, setup.sharing)


def make_drafter(model: Decoder | ForeignModel, config: Config, trained: Path | None = None) -> EagleModel | None:
    """The weights of the drafter that the settings want, if there is one; `trained` is where the run has its own."""
    s = config.speculation
    if s.mode == "plain" or not isinstance(model, Decoder):
        return None
    if trained is None and s.drafter == "new":
        return make_network(model, None, config.seed)
    folder = trained or find_drafter(s.drafter, config.model.path)
    return None if folder is None else make_network(model, folder, config.seed)
