"""The engines that workers can decode with, by name. Another one is a class with the methods of `WorkerEngine`, a
function that makes it from an `EngineSetup`, and a line here; `rollout.engine` then takes its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UserError
from paceline.model.checkpoint import find_model, load_model, read_any_config, read_config, save_model
from paceline.model.foreign import ForeignModel, load_foreign, save_foreign
from paceline.model.foreign_config import ForeignConfig

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.draft.eagle.model import EagleModel
    from paceline.model.config import DecoderConfig
    from paceline.model.decoder import Decoder
    from paceline.rollout.stops import Decode
    from paceline.rollout.worker_engine import WorkerEngine

OWN = "paceline"
ENGINES = {
    OWN: "paceline.setup.build:make_worker_engine",
    "vllm": "paceline.integrations.vllm.rollout_engine:make_worker_engine",
}
"""Name -> module and function. Loaded when used: vLLM need not be installed."""


@dataclass(frozen=True)
class EngineSetup:
    """What an engine of a worker is made from."""

    config: Config
    model: Decoder | ForeignModel
    """The policy, with the weights that are learned."""
    source: str
    """Where it was loaded from: a folder or a hub id."""
    drafter: EagleModel | None
    decode: Decode | None
    """Turns tokens into text; only there if there are stop strings."""
    worker: int
    sharing: int
    """Workers on the same device."""
    run: Path | None
    """The run directory."""
    still_alive: Callable[[], None]
    """To be called now and then while making or waiting for something takes long."""
    note: Callable[[str], None]
    """Tells the user a sentence."""


def make_engine_of_worker(setup: EngineSetup) -> WorkerEngine:
    where = _known(setup.config.rollout.engine)
    module, _, function = where.partition(":")
    made: WorkerEngine = getattr(import_module(module), function)(setup)
    return made


def _known(name: str) -> str:
    if name not in ENGINES:
        raise UserError(f"rollout.engine={name} is unknown; there are: {', '.join(ENGINES)}")
    return ENGINES[name]


def is_own(config: Config) -> bool:
    """Whether rollouts are made by Paceline's own engine; others bring memory plans and model families of theirs."""
    _known(config.rollout.engine)
    return config.rollout.engine == OWN


def read_policy_config(config: Config, source: str) -> DecoderConfig | ForeignConfig:
    """The shape of a policy, which an engine other than ours may run although our decoder does not."""
    folder = find_model(source)
    return read_config(folder) if is_own(config) else read_any_config(folder)


def load_policy_model(config: Config, source: str, device: Any) -> Decoder | ForeignModel:
    """What is learned: our decoder where it runs the family, else the model of transformers."""
    shape = read_policy_config(config, source)
    if isinstance(shape, ForeignConfig):
        return load_foreign(source, shape, config.model.dtype, device, config.learn.activation_checkpointing)
    return load_model(source, config.model.dtype, device)


def save_policy_model(model: Decoder | ForeignModel, folder: Path) -> None:
    if isinstance(model, ForeignModel):
        save_foreign(model, folder)
    else:
        save_model(model, folder)


def check_foreign(config: Config, shape: ForeignConfig) -> None:
    """Refuse what only our decoder can do."""
    s = config.speculation
    wrong = {
        "learn.lora": bool(config.learn.lora.rank),
        f"speculation.drafter={s.drafter}": s.mode != "plain" and s.drafter not in (None, "auto", "none"),
        f"spot.when={config.spot.when}": config.spot.when not in ("auto", "off"),
    }
    for name, given in wrong.items():
        if given:
            raise UserError(
                f"{name} does not work with a model of the family '{shape.family}', which transformers runs: it is "
                "there for the families of Paceline's own decoder"
            )


def refuse_other_engines(config: Config, what: str) -> None:
    if not is_own(config):
        raise UserError(
            f"{what} is about Paceline's own engine, but rollout.engine={config.rollout.engine}, which plans its own "
            "memory and draws with noise of its own (docs/vllm.md#the-rollout-engine-of-a-run)"
        )
