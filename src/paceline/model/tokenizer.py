"""Text to tokens and back, through the tokenizer that came with the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from paceline.errors import UserError
from paceline.files.reading import check, inside, read_object, shorten
from paceline.model.checkpoint import find_model, read_any_config
from paceline.model.config import Tokens, eos_ids
from paceline.model.template import bounded_steps, check_template_kwargs
from paceline.model.tokenizer_files import check_tokenizer_files, own_files

Messages = list[dict[str, Any]]
GENERATION = "generation_config.json"


class Tokenizer:
    """What the rest of Paceline needs of a Hugging Face tokenizer, and nothing else."""

    def __init__(
        self,
        hf: Any,
        where: str,
        eos_ids: tuple[int, ...],
        vocab_size: int | None = None,
        generation: dict[str, Any] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ):
        """`vocab_size` is the model's: tokens beyond it have no embedding. `generation` is what its
        generation_config.json says; `template_kwargs` are variables for its chat template."""
        self.hf = hf
        self.template_kwargs = template_kwargs or {}
        self.generation = generation or {}
        self.where = where
        self.vocab_size = vocab_size
        own = () if hf.eos_token_id is None else (hf.eos_token_id,)
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys((*eos_ids, *own)))

    def encode_prompt(self, prompt: str | Messages, origin: str = "") -> list[int]:
        """Tokens of a prompt. Messages go through the model's chat template; text is taken as it is. `origin` says
        which prompt it is, for errors."""
        which = f"the prompt of {origin}" if origin else "the prompt"
        if isinstance(prompt, str):
            return self._encode(prompt, True, which)
        if not self.hf.chat_template:
            raise UserError(
                f"the prompts are messages, but the tokenizer of {self.where} has no chat template; "
                "use prompts that are plain text or a model with a template"
            )
        return self._encode(self.render(prompt, which), False, which)

    def render(self, messages: Messages, which: str = "a conversation") -> str:
        """Messages as the chat template writes them, up to where the assistant begins."""
        with _refusing(f"the chat template of {self.where} does not take {which}"), bounded_steps():
            text: str = self.hf.apply_chat_template(
                _plain(messages), tokenize=False, add_generation_prompt=True, **self.template_kwargs
            )
        return text

    def encode_text(self, text: str) -> list[int]:
        """Tokens of text in the middle of others: none is put before it or behind it."""
        return self._encode(text, False, "an observation") if text else []

    def _encode(self, text: str, special: bool, which: str) -> list[int]:
        with _refusing(f"the tokenizer of {self.where} does not take {which}"):
            tokens = list(self.hf(text, add_special_tokens=special)["input_ids"])
        highest = max(tokens, default=0)
        if self.vocab_size is not None and highest >= self.vocab_size:
            raise UserError(
                f"the tokenizer of {self.where} writes {which} with token {highest}, but the model has only "
                f"{self.vocab_size} tokens; do the two belong together?"
            )
        return tokens

    def decode(self, tokens: list[int], skip_special: bool = True) -> str:
        return self.hf.decode(tokens, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

    def save(self, folder: Path) -> None:
        """Write all that a model folder has besides weights and config.json: vocabulary, special tokens, chat template,
        and generation_config.json, without which whoever loads the folder would not know every stop token."""
        with _refusing(f"the tokenizer of {self.where} cannot be written to {folder}"):
            self.hf.save_pretrained(folder)
        (folder / GENERATION).write_text(json.dumps(self.generation_config(), indent=2) + "\n", encoding="utf-8")

    def generation_config(self) -> dict[str, Any]:
        """The generation settings of the model, with all tokens that end a completion."""
        own = self.generation.get("eos_token_id")
        eos = list(dict.fromkeys([*(own if isinstance(own, list) else [] if own is None else [own]), *self.eos_ids]))
        ids = {"bos_token_id": self.hf.bos_token_id, "pad_token_id": self.hf.pad_token_id}
        known = {name: token for name, token in ids.items() if token is not None}
        return known | self.generation | ({"eos_token_id": eos if len(eos) > 1 else eos[0]} if eos else {})


def load_tokenizer(path: str, template_kwargs: dict[str, Any] | None = None) -> Tokenizer:
    """The tokenizer of a model; `template_kwargs` are variables for its chat template (task.chat_template_kwargs)."""
    folder = find_model(path)
    config = read_any_config(folder)
    check_tokenizer_files(folder)
    generation = read_generation(folder)
    # Chat models often end a turn with a token that only generation_config.json names.
    more = eos_ids(generation.get("eos_token_id"), config.vocab_size, f"{GENERATION} of {folder}")
    ends = (*config.eos_ids, *more)
    with _refusing(f"no tokenizer could be loaded from {folder}"):
        from transformers import AutoTokenizer

        own = own_files(folder)
        hf = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **own)
        check_template_kwargs(template_kwargs or {}, hf.chat_template, str(path))
        tokenizer = Tokenizer(hf, str(path), ends, config.vocab_size, generation, template_kwargs)
        tokenizer.decode(tokenizer.encode_prompt("1 + 1"))  # some kinds of damage show only here
    return tokenizer


class GenerationConfig(BaseModel):
    """What is read of generation_config.json."""

    model_config = ConfigDict(extra="ignore", strict=True)

    eos_token_id: Tokens | None = None


def read_generation(folder: Path) -> dict[str, Any]:
    """generation_config.json, checked; empty where there is none."""
    if not (folder / GENERATION).exists():
        return {}
    file = inside(folder, GENERATION)
    values = read_object(file)
    check(GenerationConfig, values, str(file))
    return values


def _plain(messages: Messages) -> Messages:
    """Messages whose content is a list of text parts get the concatenated text: templates of text models take nothing
    else, and those that know parts concatenate them too."""
    return [
        message | {"content": "".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list | tuple)
        else message
        for message in messages
    ]


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Tokenizers and templates are files that others wrote, run by libraries that raise whatever they like: bare
    exceptions from Rust, errors of templates, and panics, which are no Exception."""
    try:
        yield
    except UserError:
        raise
    except Exception as err:
        raise UserError(f"{what}: {_reason(err)}") from err
    except BaseException as err:
        if type(err).__name__ != "PanicException":
            raise
        raise UserError(f"{what}: {_reason(err)}") from err


def _reason(err: BaseException) -> str:
    return shorten(str(err), 200) or type(err).__name__
