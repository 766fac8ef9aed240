"""The adapters that a run goes on with: its own, those that it was told to begin with, or fresh ones."""

from __future__ import annotations

from pathlib import Path

from paceline.config import Config
from paceline.errors import UserError
from paceline.lora.adapters import Lora
from paceline.lora.files import ADAPTER, find_adapter, read_adapter, read_base_digest, read_lora_shape
from paceline.lora.shape import LoraShape
from paceline.model.checkpoint import find_model
from paceline.model.decoder import Decoder


def decide_lora(config: Config, resumed: bool) -> Config:
    """The config with what an adapter to begin with says of rank, alpha and targets; its folder by its whole path,
    because workers may have another working directory."""
    lora = config.learn.lora
    if lora.path and Path(lora.path).is_dir():
        lora = lora.model_copy(update={"path": str(Path(lora.path).resolve())})
    if lora.path and not (resumed and lora.rank):
        found = read_lora_shape(find_adapter(lora.path))
        for name, given, there in (("rank", lora.rank, found.rank), ("alpha", lora.alpha, found.alpha)):
            if given is not None and given != there:
                raise UserError(f"learn.lora.{name} is {given:g}, but the adapter at {lora.path} has {there:g}")
        targets = list(found.targets)
        if lora.targets not in ("all-linear", targets) and set(lora.targets) != set(targets):
            raise UserError(f"the adapter at {lora.path} has the targets {', '.join(targets)}, not learn.lora.targets")
        lora = lora.model_copy(update={"rank": found.rank, "alpha": found.alpha, "targets": targets})
    elif lora.rank and lora.alpha is None:
        lora = lora.model_copy(update={"alpha": 2.0 * lora.rank})
    if resumed and lora.rank:
        _check_base(config.model.path)
    return config.model_copy(update={"learn": config.learn.model_copy(update={"lora": lora})})


def _check_base(path: str) -> None:
    try:
        find_model(path)
    except UserError as err:
        raise UserError(f"a run with LoRA needs the model that it began with to be resumed: {err}") from err


def begin_lora(model: Decoder, config: Config, state: Path | None) -> Lora | None:
    """Adapters for a model with the base's weights, as the checkpoint `state` has them if there is one; None where all
    weights are trained. The model's weights are merged with them."""
    settings = config.learn.lora
    shape = LoraShape.of(settings)
    if shape is None:
        return None
    on_host = settings.base != "device" and model.device.type == "cuda"
    lora = Lora(model, shape, config.seed, on_host)
    if state is not None:
        _resume(lora, state, config.model.path)
    elif settings.path:
        lora.load(read_adapter(find_adapter(settings.path), lora))
    if settings.path and config.learn.kl_coef:
        lora.keep_start()  # of a run that is resumed, the learner's state has them
    return lora


def merge_adapter(model: Decoder, path: str) -> None:
    """Merge an adapter into a model for good."""
    folder = find_adapter(path)
    lora = Lora(model, read_lora_shape(folder), base_on_host=True)
    lora.load(read_adapter(folder, lora))
    lora.detach()


def _resume(lora: Lora, state: Path, base: str) -> None:
    folder = state / ADAPTER
    try:
        if not folder.is_dir():
            raise UserError("it has no adapters; was it made with learn.lora?")
        found = read_lora_shape(folder)
        if found != lora.shape:
            raise UserError(f"its adapters are {_describe(found)}, but learn.lora asks for {_describe(lora.shape)}")
        if read_base_digest(folder) not in (None, lora.base.digest):
            raise UserError(
                f"its adapters belong to other weights than {base} has now; bring back the model that it began with"
            )
        lora.load(read_adapter(folder, lora))
    except UserError as err:
        raise UserError(f"the checkpoint {state} cannot be resumed: {err}") from err


def _describe(shape: LoraShape) -> str:
    return f"of rank {shape.rank} and alpha {shape.alpha:g} for {', '.join(shape.targets)}"
