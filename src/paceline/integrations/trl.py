"""Paceline in TRL's GRPOTrainer: an existing script changes two lines.

    from paceline.integrations.trl import PacelineRollout
    trainer = GRPOTrainer(..., rollout_func=(rollout := PacelineRollout()), callbacks=[rollout])

or, where there are tools or environments, whose turns TRL itself strings together,

    PacelineRollout().attach(trainer)

See docs/trl.md.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from paceline.config import Config, config_from, setting_names
from paceline.core import Completion, Request, mix_seed
from paceline.draft.eagle.files import DRAFTER, find_drafter
from paceline.draft.eagle.model import EagleModel
from paceline.draft.registry import make_network
from paceline.errors import UserError
from paceline.integrations.mirror import ForeignMirror, Mirror, base_model
from paceline.integrations.sidecar import STATE, SideCar, read_state
from paceline.integrations.trl_settings import check_trainer, choose_dtype, make_sampling
from paceline.model.config import FAMILIES
from paceline.model.decoder import Decoder
from paceline.model.foreign import ForeignModel
from paceline.rollout.stats import EngineStats
from paceline.setup.engines import OWN as OWN_ENGINE
from paceline.setup.engines import is_own

try:
    from trl import GRPOTrainer  # noqa: F401 (whoever has no TRL should hear of it here)
except ImportError as err:
    raise UserError(f"the integration with TRL needs TRL: pip install 'paceline[trl]' ({err})") from err

WHERE = "PacelineRollout(settings=...)"
FOLDER = "paceline"  # in each of the trainer's checkpoints
NEW_SHARE = 0.1
WARM_SHARE = 0.03
GPU_SHARE = 0.2  # of a GPU for KV pages: the trainer needs the rest
OWN = ("model.dtype", "speculation.", "spot.", "rollout.")
TRAINERS = {
    f"rollout.{name}"
    for name in ("prompts", "samples", "temperature", "top_k", "top_p", "min_p", "max_tokens", "min_tokens", "stop")
}
LOGGED = ("seconds", "steps", "version", "train_interval")  # of what the drafter's training says about itself


class PacelineRollout(TrainerCallback):
    """A `rollout_func` and a callback in one."""

    def __init__(
        self,
        drafter: str | Path | None = "auto",
        *,
        share: float | None = None,
        resume: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        engine: str = OWN_ENGINE,
    ):
        """`engine` is what generates, `paceline` or `vllm`. `drafter` is the folder of a neural drafter, `new` for an
        untrained one, `none`, or `auto`: the one in the model's own folder, or else an untrained one. `share` of the
        time goes into its training; by default 0.1 for one that begins untrained, 0.03 for another; 0 leaves it as it
        is. `resume` is a checkpoint of the trainer to go on from, needed only where the trainer itself resumes from a
        place outside of its output directory. `settings` are Paceline's own by their dotted names, such as
        {"rollout.max_batch": 64}."""
        self._drafter = str(drafter or "none")
        self._share = share
        self._settings = {"rollout.engine": engine} | dict(settings or {})
        _check_settings(self._settings)
        is_own(config_from(self._settings, WHERE))  # better found now
        if share is not None and not 0 <= share <= 1:
            raise UserError(f"share={share} is not a share of the time: it must lie between 0 and 1")
        self._resume = Path(resume) if resume else None
        if self._resume and not (self._resume / FOLDER / STATE).is_file():
            raise UserError(f"{resume} is no checkpoint to resume from: it has no {FOLDER}/{STATE}")
        self._trainer: Any = None
        self._mirror: Mirror | ForeignMirror | None = None
        self._sidecar: SideCar | None = None
        self._requests = {"train": 0, "eval": 0}
        self._step_began = time.perf_counter()

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`: as many answers as prompts, in their order."""
        if trainer.tools or getattr(trainer, "environments", None):
            raise UserError(
                "rollout_func writes one answer per prompt, but this trainer has tools or environments: leave "
                "rollout_func out and call PacelineRollout().attach(trainer)"
            )
        if self not in trainer.callback_handler.callbacks:
            raise UserError(
                "PacelineRollout is also a callback, which trains and saves its drafter: pass it twice, as in "
                "GRPOTrainer(..., rollout_func=rollout, callbacks=[rollout])"
            )
        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
        done = self._answer(trainer, prompt_ids, images)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [c.tokens for c in done],
            "logprobs": [c.logprobs for c in done],
        }

    def attach(self, trainer: Any) -> PacelineRollout:
        """Take the place of the trainer's own generation, one turn at a time: TRL's loops over tools and environments
        then run on this engine."""
        if trainer.rollout_func is not None:
            raise UserError("this trainer has a rollout_func, which would go unasked: use it, or attach, but not both")
        check_trainer(trainer)
        trainer._generate_single_turn = functools.partial(self._single_turn, trainer)
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        return self

    def _single_turn(
        self, trainer: Any, prompt_ids: list[list[int]], images: Any = None, fields: Any = None, *_: Any, **__: Any
    ) -> tuple[list[list[int]], list[list[float]]]:
        done = self._answer(trainer, prompt_ids, images)
        return [c.tokens for c in done], [c.logprobs for c in done]

    def _answer(self, trainer: Any, prompts: list[list[int]], images: Any) -> list[Completion]:
        if images:
            raise UserError("the prompts hold images, but Paceline runs language models only")
        started = time.perf_counter()
        sidecar = self._prepare(trainer)
        synced = time.perf_counter() - started
        mode = "train" if trainer.model.training else "eval"
        sampling = make_sampling(trainer, sidecar.model.config.max_positions)
        # Evaluation draws from numbers of its own, so that it does not change what training sees.
        seed = mix_seed(trainer.args.seed, trainer.accelerator.process_index, mode)
        first = self._requests[mode]
        requests = [Request(first + i, tuple(ids), sampling, seed) for i, ids in enumerate(prompts)]
        self._requests[mode] += len(requests)
        done, stats = sidecar.answer(requests, learn=mode == "train")
        seconds = time.perf_counter() - started
        self._log(mode, describe(stats, sum(len(c.tokens) for c in done), seconds) | {"sync_s": synced})
        return done

    def _log(self, mode: str, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._trainer._metrics[mode][f"paceline/{name}"].append(value)

    # The model and the drafter

    def _prepare(self, trainer: Any) -> SideCar:
        """All that is needed, with the trainer's present weights."""
        if trainer is not self._trainer or self._mirror is None or self._sidecar is None:
            check_trainer(trainer)
            self._trainer = trainer
            self._open()
        elif self._mirror.moved:
            before = self._sidecar
            self._open()
            self._sidecar.take_over(before)
            before.close()
        else:
            self._mirror.sync()
        assert self._sidecar is not None
        return self._sidecar

    def _open(self) -> None:
        trainer = self._trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        config = self._config(trainer)
        dtype = choose_dtype(trainer, next(base_model(model).parameters()).dtype, config.model.dtype)
        own_model = base_model(model)
        if is_own(config) or own_model.config.model_type in FAMILIES:
            self._mirror = Mirror(model, dtype, "the trainer's model")
        else:
            self._mirror = ForeignMirror(model)
            arguments = {"dtype": str(dtype).removeprefix("torch.")} | config.rollout.vllm
            config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"vllm": arguments})})
        decoder = self._mirror.decoder
        folder = self._resume / FOLDER if self._resume else None
        state = read_state(folder) if folder and (folder / STATE).is_file() else None
        trained = folder / DRAFTER if folder and state and (folder / DRAFTER).is_dir() else None
        neural, warm = self._make_drafter(decoder, config, model, trained)
        spot = config.spot.model_copy(update=self._spot(warm))
        decode = functools.partial(trainer.processing_class.decode, skip_special_tokens=True)
        source = str(getattr(own_model.config, "_name_or_path", "") or "")
        out = Path(trainer.args.output_dir)
        self._sidecar = SideCar(
            decoder, config.model_copy(update={"spot": spot}), decode, neural, warm, source=source, folder=out
        )
        if folder and state:
            self._sidecar.restore(folder, state)
            self._requests = dict(state["requests"])
        self._resume = None

    def _spot(self, warm: bool) -> dict[str, Any]:
        share = self._share
        if share is None:
            share = self._settings.get("spot.share", WARM_SHARE if warm else NEW_SHARE)
        return {"share": share} if share else {"when": "off"}

    def _config(self, trainer: Any) -> Config:
        args = trainer.args
        device = trainer.accelerator.device
        batch = args.per_device_train_batch_size * args.steps_per_generation
        settings = {"seed": args.seed, "rollout.prompts": batch, "rollout.samples": 1} | self._settings
        settings["rollout.temperature"] = float(args.temperature)  # log-probabilities are those at it
        if trainer.generation_kwargs.get("stop_strings"):
            stop = trainer.generation_kwargs["stop_strings"]
            settings["rollout.stop"] = [stop] if isinstance(stop, str) else list(stop)
        if device.type == "cuda" and self._settings["rollout.engine"] == OWN_ENGINE:
            total = torch.cuda.get_device_properties(device).total_memory
            settings.setdefault("rollout.kv_memory_gb", total * GPU_SHARE / 1e9)
        return config_from(settings, WHERE)

    def _make_drafter(
        self, decoder: Decoder | ForeignModel, config: Config, model: Any, trained: Path | None
    ) -> tuple[EagleModel | None, bool]:
        """The drafter, and whether it was trained before."""
        name = self._drafter
        if isinstance(decoder, ForeignModel):
            return None, False
        if config.speculation.mode == "plain" or name == "none":
            return None, False
        if name == "auto":
            own = Path(getattr(base_model(model).config, "_name_or_path", "") or ".") / DRAFTER
            name = str(own) if (own / "config.json").is_file() else "new"
            if name == "new" and decoder.config.layers < 3:
                return None, False  # it taps three depths
        if trained is not None:
            return make_network(decoder, trained, config.seed), name != "new"
        folder = None if name == "new" else find_drafter(name, "")
        return make_network(decoder, folder, config.seed), folder is not None

    # The trainer's events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A trainer that resumes has done steps already; its checkpoint is the one that was made after them."""
        self._step_began = time.perf_counter()
        if state.global_step == 0:
            return
        given = args.resume_from_checkpoint
        folders = [self._resume, Path(given) if isinstance(given, str) else None]
        folders.append(Path(args.output_dir) / f"checkpoint-{state.global_step}")
        found = next((p for p in folders if p is not None and (p / FOLDER / STATE).is_file()), None)
        if found is None:
            warnings.warn(
                f"no checkpoint with a folder '{FOLDER}' was found for step {state.global_step}, so the drafter begins "
                "anew; name the checkpoint with PacelineRollout(resume=...)",
                stacklevel=2,
            )
            return
        self._resume, self._mirror, self._sidecar = found, None, None  # made anew from it by the next rollout

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The weights are new: the drafter learns what they make of the last answers."""
        now = time.perf_counter()
        elapsed, self._step_began = now - self._step_began, now
        if self._sidecar is None or self._mirror is None or self._mirror.moved:
            return
        if self._sidecar.learning:
            self._mirror.sync()
        metrics = self._sidecar.learn(elapsed)
        self._log("train", {f"drafter_{name}": metrics[f"drafter/{name}"] for name in LOGGED if metrics})
        if "drafter/loss" in metrics:
            self._log("train", {"drafter_loss": metrics["drafter/loss"]})
        self._step_began = time.perf_counter()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._sidecar is not None and state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}" / FOLDER
            self._sidecar.save(folder, {"requests": self._requests})


def describe(stats: EngineStats, tokens: int, seconds: float) -> dict[str, float]:
    """What a rollout was like, for the trainer's log."""
    rounds = stats.rounds.total()
    metrics = {
        "accept_length": stats.accept_length,
        "tokens_per_s": tokens / seconds,
        "rollout_s": seconds,
        "prefill_tokens": float(stats.prefill_tokens),
    }
    for drafter in ("plain", "suffix", "neural"):
        count = sum(n for strategy, n in stats.rounds.items() if strategy.partition(":")[0] == drafter)
        metrics[f"share/{drafter}"] = count / rounds if rounds else 0.0
    return metrics


def _check_settings(settings: Mapping[str, Any]) -> None:
    for key in settings:
        if key in TRAINERS:
            raise UserError(f"'{key}' is the trainer's to say: set it in GRPOConfig")
        if key == "speculation.drafter":
            raise UserError("'speculation.drafter' is PacelineRollout's first argument")
        if key in setting_names() and not key.startswith(OWN):
            raise UserError(f"'{key}' has no meaning beside TRL's trainer; there are {', '.join(OWN)}*")
