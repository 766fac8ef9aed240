"""From settings to working parts: the device, how tokens are drawn, the engine with its drafters."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.config import Config
from paceline.core import SamplingParams
from paceline.draft.base import BaseDrafter
from paceline.draft.eagle.model import EagleModel, load_drafter, new_drafter
from paceline.draft.eagle.vocabulary import choose_tokens
from paceline.draft.strategy import Strategy
from paceline.draft.suffix.drafter import SuffixDrafter
from paceline.errors import UserError
from paceline.files.reading import inside, named_path
from paceline.model import Decoder
from paceline.model.checkpoint import find_model
from paceline.rollout import EngineSettings, RolloutEngine
from paceline.rollout.pages import GPU_KV_SHARE
from paceline.rollout.stops import Decode

NEW_WINDOW = 128  # tokens that a drafter looks back on which begins untrained
DRAFTER = "drafter"  # folder beside a model's weights that holds its drafter


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as err:
        raise UserError(f"model.device = '{name}' is not a device: use auto, cpu, cuda or cuda:N") from err
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise UserError(f"model.device = '{name}', but this machine has {torch.cuda.device_count()} CUDA devices")
    return device


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


def engine_settings(config: Config, device: torch.device, sharing: int = 1) -> EngineSettings:
    """`sharing` is how many engines share the device."""
    r, s = config.rollout, config.speculation
    kv = int(r.kv_memory_gb * 1e9) if r.kv_memory_gb else None
    if kv is None and sharing > 1:
        kv = int(torch.cuda.get_device_properties(device).total_memory * GPU_KV_SHARE / sharing)
    longest = config.task.max_prompt_tokens
    return EngineSettings(
        max_batch=min(r.max_batch, r.prompts * r.samples),
        max_length=longest + r.max_tokens if longest else None,
        page_size=r.page_size,
        kv_bytes=kv,
        prefill_tokens=r.prefill_tokens,
        cuda_graphs=r.cuda_graphs,
        graph_bytes=int(s.graph_memory_gb * 1e9) if s.graph_memory_gb else None,
        explore=s.explore,
    )


def make_engine(
    model: Decoder, config: Config, decode: Decode | None, neural: EagleModel | None, sharing: int = 1
) -> RolloutEngine:
    """An engine as the settings want it, with the drafters that there are; `sharing` is how many share the device."""
    s, settings = config.speculation, engine_settings(config, model.device, sharing)
    if s.mode == "plain":
        return RolloutEngine(model, settings, decode)
    drafters: list[BaseDrafter | EagleModel] = []
    if s.suffix:
        longest = min(settings.max_length or model.config.max_positions, model.config.max_positions)
        drafters.append(SuffixDrafter(settings.max_batch, longest, int(s.suffix_mb * 2**20)))
    if neural is not None:
        drafters.append(neural)
    strategies = None if s.strategies is None else [Strategy.parse(text) for text in s.strategies]
    return RolloutEngine(model, settings, decode, drafters, strategies)


def make_drafter(model: Decoder, config: Config, trained: Path | None = None) -> EagleModel | None:
    """The neural drafter that the settings want, if there is one; `trained` is where the run has its own."""
    s = config.speculation
    if s.mode == "plain":
        return None
    if trained is None and s.drafter == "new":
        return new_drafter(model, NEW_WINDOW, config.seed, choose_tokens(model))
    folder = trained or find_drafter(s.drafter, config.model.path)
    return load_drafter(folder, model) if folder is not None else None


def find_drafter(name: str | None, model_path: str) -> Path | None:
    """The folder of a drafter: the one named, or with `auto` the one that lies in the model's own folder."""
    if name is None or name == "none":
        return None
    if name != "auto":
        if not named_path(name).is_dir():
            raise UserError(
                f"no drafter at {name}: train one with `paceline draft train`, or set speculation.drafter=auto"
            )
        return named_path(name)
    model = find_model(model_path)
    return inside(model, DRAFTER) if (model / DRAFTER / "config.json").is_file() else None
