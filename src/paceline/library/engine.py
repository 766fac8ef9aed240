"""Answers to prompts, without training anything."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import config_from
from paceline.config.foreign import ENGINES, FOREIGN
from paceline.core import Completion, Request, SamplingParams
from paceline.errors import UserError
from paceline.library.prompts import Prompt, encode, model_name
from paceline.lora.start import merge_adapter
from paceline.model import load_model
from paceline.model.tokenizer import load_tokenizer
from paceline.rollout.stats import EngineStats
from paceline.setup.build import make_drafter, make_engine
from paceline.setup.device import choose_device

if TYPE_CHECKING:
    from paceline.library.drafter import Drafter


@dataclass(frozen=True)
class CompletionOutput:
    text: str
    tokens: list[int]
    """With the stop token, if one ended it."""
    logprobs: list[float]
    """Of each token under the model at the temperature that was asked for, before filters."""
    finish_reason: str
    """`stop` or `length`."""


class Engine:
    """A model that answers prompts: many at once, with speculative decoding where it pays. The same seed gives the same
    answers, in any batch, with or without a drafter."""

    def __init__(
        self,
        model: str | Path = "embedded",
        *,
        drafter: str | Path | Drafter | None = "auto",
        device: str = "auto",
        dtype: str = "auto",
        adapter: str | Path | None = None,
        max_batch: int = 64,
        settings: dict[str, Any] | None = None,
    ):
        """`model` is a folder with a Hugging Face checkpoint, a hub id, or `embedded`. `drafter` is a `Drafter` of the
        same model, the folder of one, `auto` for the one in the model's own folder, or None. `adapter` is a LoRA
        adapter in PEFT's form, a folder or a hub id, which is merged into the model. `settings` are further ones by
        their dotted names, for example {"speculation.mode": "plain", "rollout.kv_memory_gb": 8}."""
        from paceline.library.drafter import Drafter

        own = drafter if isinstance(drafter, Drafter) else None
        if own is not None and model_name(model, "Engine") not in ("embedded", own.model):
            raise UserError(f"the drafter was made for {own.model}, not for {model}")
        if own is not None and adapter is not None:
            raise UserError("an adapter would change the model that the drafter already has; name the drafter's folder")
        path = own.model if own else model_name(model, "Engine")
        values = {
            "model.path": path,
            "model.device": device,
            "model.dtype": dtype,
            "speculation.drafter": "none" if own or drafter is None else str(drafter),
            "rollout.max_batch": max_batch,
            "rollout.prompts": max_batch,
            "rollout.samples": 1,
        }
        self.config = config_from(values | (settings or {}), "Engine(...)")
        self.tokenizer = own.tokenizer if own else load_tokenizer(path, self.config.task.chat_template_kwargs)
        self.model = own.neural.policy if own else load_model(path, self.config.model.dtype, choose_device(device))
        if adapter is not None:
            merge_adapter(self.model, str(adapter))
        neural = own.neural if own else make_drafter(self.model, self.config)
        self._engine = make_engine(self.model, self.config, self.tokenizer.decode, neural)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int = 1,
        seed: int = 0,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        max_tokens: int = 512,
        min_tokens: int = 0,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] | None = None,
        **unknown: Any,
    ) -> list[list[CompletionOutput]]:
        """`samples` answers to each prompt, in order. A prompt is text, taken as it is, messages for the model's chat
        template, or the ids of its tokens. A temperature of 0 is greedy; `stop` is one string or several, and
        `stop_token_ids` replaces the model's own."""
        sampling = self._sampling(
            unknown, temperature, top_k, top_p, min_p, max_tokens, min_tokens, stop, stop_token_ids
        )
        answers: list[list[CompletionOutput | None]] = [[None] * samples for _ in prompts]
        for prompt, sample, answer in self._run(prompts, samples, seed, sampling):
            answers[prompt][sample] = answer
        return [[a for a in group if a is not None] for group in answers]

    def stream(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int = 1,
        seed: int = 0,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        max_tokens: int = 512,
        min_tokens: int = 0,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] | None = None,
        **unknown: Any,
    ) -> Iterator[tuple[int, int, CompletionOutput]]:
        """The same as they are finished: (which prompt, which of its samples, the answer)."""
        sampling = self._sampling(
            unknown, temperature, top_k, top_p, min_p, max_tokens, min_tokens, stop, stop_token_ids
        )
        return self._run(prompts, samples, seed, sampling)

    def _run(
        self, prompts: Sequence[Prompt], samples: int, seed: int, sampling: SamplingParams
    ) -> Iterator[tuple[int, int, CompletionOutput]]:
        encoded = encode(self.tokenizer, prompts)
        requests = [
            Request(i * samples + k, tokens, sampling, seed) for i, tokens in enumerate(encoded) for k in range(samples)
        ]
        try:
            for completion in self._engine.run(requests):
                yield *divmod(completion.request.id, samples), self._answer(completion)
        finally:
            self._engine.clear()  # whoever stops looking gets no more

    def _sampling(
        self,
        unknown: dict[str, Any],
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        max_tokens: int,
        min_tokens: int,
        stop: str | Sequence[str],
        stop_token_ids: Sequence[int] | None,
    ) -> SamplingParams:
        for name in unknown:
            raise UserError(_unknown_argument(name))
        ends = self.tokenizer.eos_ids if stop_token_ids is None else tuple(stop_token_ids)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        try:
            return SamplingParams(
                temperature, top_k, top_p, min_p, max_tokens, min_tokens, stop_token_ids=ends, stop=stops
            )
        except (TypeError, ValueError) as err:
            raise UserError(f"these sampling parameters do not work: {err}") from err

    def _answer(self, done: Completion) -> CompletionOutput:
        return CompletionOutput(self.tokenizer.decode(done.tokens), done.tokens, done.logprobs, done.finish_reason)

    @property
    def stats(self) -> EngineStats:
        """What the engine has done so far: tokens, seconds, accepted draft tokens."""
        return self._engine.stats


def _unknown_argument(name: str) -> str:
    """An argument that other libraries have, or one that is misspelled."""
    known = [p.name for p in inspect.signature(Engine.generate).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for one in FOREIGN:
        if one.library == ENGINES and one.name == name:
            note = f" ({one.note})" if one.note else ""
            return f"'{name}' is '{one.here}' here{note}" if one.here else f"there is no '{name}': {one.note}"
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(known)}"
    return f"generate takes no argument '{name}'; {hint}"
