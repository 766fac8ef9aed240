"""A drafter of one's own: trained on a model's answers, examined, saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.core import Request, SamplingParams
from paceline.draft.eagle.files import find_drafter, load_drafter, save_drafter
from paceline.draft.eagle.loss import DraftLoss
from paceline.draft.eagle.model import EagleModel
from paceline.errors import UserError
from paceline.library.fit import Fitted, count_accepted, drafter_for, fit, generate_sequences
from paceline.library.prompts import Prompt, encode
from paceline.model import Decoder, load_model
from paceline.model.tokenizer import Tokenizer, load_tokenizer
from paceline.setup.device import choose_device


class Drafter:
    """A small network that drafts what a model will sample. Drafts are verified, so it can only cost or save time."""

    def __init__(
        self,
        model: str | Path = "embedded",
        folder: str | Path = "auto",
        *,
        device: str = "auto",
        dtype: str = "auto",
    ):
        """The one in `folder`, or with `auto` the one in the model's own."""
        found = find_drafter(str(folder), str(model))
        if found is None:
            raise UserError(f"there is no drafter beside the model {model}; make one with Drafter.train")
        policy, tokenizer = _load(model, device, dtype)
        self._set(str(model), tokenizer, load_drafter(found, policy))

    def _set(self, model: str, tokenizer: Tokenizer, neural: EagleModel) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.neural = neural
        self.fitted = Fitted()
        """How its training went, if it was trained here."""

    @classmethod
    def train(
        cls,
        model: str | Path,
        prompts: Sequence[Prompt],
        *,
        seconds: float = 60.0,
        samples: int = 4,
        temperature: float = 1.0,
        max_tokens: int = 512,
        window: int = 512,
        vocab: int | None = None,
        loss: DraftLoss = "soft",
        seed: int = 0,
        device: str = "auto",
        dtype: str = "auto",
        report: Callable[[Fitted], None] = lambda fitted: None,
    ) -> Drafter:
        """A new one for `model`. The model writes `samples` answers to each of the prompts, then the drafter learns
        from them for so many seconds. It looks back on `window` tokens, and proposes among the `vocab` most frequent
        ones, by default all of a small vocabulary, and of a large one as many as make up 99.5 % of the answers (8,192
        at least, 32,768 at most). `report` is called after every step."""
        if not prompts:
            raise UserError("a drafter learns from answers, but there are no prompts to answer")
        policy, tokenizer = _load(model, device, dtype)
        requests = _requests(tokenizer, prompts, samples, temperature, max_tokens, seed)
        sequences = generate_sequences(policy, requests)
        neural = drafter_for(policy, sequences, window, vocab, seed)
        drafter = cls.__new__(cls)
        drafter._set(str(model), tokenizer, neural)
        drafter.fitted = fit(neural, sequences, seconds, loss, seed, report)
        return drafter

    def examine(
        self, prompts: Sequence[Prompt], *, temperature: float = 1.0, max_tokens: int = 512, seed: int = 1
    ) -> dict[str, Any]:
        """How many of its draft tokens are accepted on these prompts: `accept_length` is tokens per round with chains
        of seven, the bonus token counted, `accept_rates` the accepted share of those that were reached, by depth."""
        return count_accepted(self.neural, _requests(self.tokenizer, prompts, 1, temperature, max_tokens, seed))

    def save(self, folder: str | Path) -> Path:
        """Write it in EAGLE-3's form; `Engine(drafter=folder)` and `speculation.drafter` take it from there."""
        save_drafter(self.neural, Path(folder))
        return Path(folder)


def _load(model: str | Path, device: str, dtype: str) -> tuple[Decoder, Tokenizer]:
    return load_model(str(model), dtype, choose_device(device)), load_tokenizer(str(model))


def _requests(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], samples: int, temperature: float, max_tokens: int, seed: int
) -> list[Request]:
    sampling = SamplingParams(temperature, max_tokens=max_tokens, stop_token_ids=tokenizer.eos_ids)
    encoded = [tokens for tokens in encode(tokenizer, prompts) for _ in range(samples)]
    return [Request(i, tokens, sampling, seed) for i, tokens in enumerate(encoded)]
