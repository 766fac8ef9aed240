"""Text to tokens and back, through the tokenizer that came with the model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.model.checkpoint import find_model, read_config

Messages = list[dict[str, Any]]


class Tokenizer:
    """What the rest of Paceline needs of a Hugging Face tokenizer, and nothing else."""

    def __init__(self, hf: Any, where: str, eos_ids: tuple[int, ...]):
        self.hf = hf
        self.where = where
        own = () if hf.eos_token_id is None else (hf.eos_token_id,)
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys((*eos_ids, *own)))

    def encode_prompt(self, prompt: str | Messages) -> list[int]:
        """Tokens of a prompt. Messages go through the model's chat template; text is taken as it is."""
        if isinstance(prompt, str):
            return list(self.hf(prompt, add_special_tokens=True)["input_ids"])
        if not self.hf.chat_template:
            raise UserError(
                f"the prompts are messages, but the tokenizer of {self.where} has no chat template; "
                "use prompts that are plain text or a model with a template"
            )
        text = self.hf.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        return list(self.hf(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: list[int], skip_special: bool = True) -> str:
        return self.hf.decode(tokens, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

    def save(self, folder: Path) -> None:
        self.hf.save_pretrained(folder)


def load_tokenizer(path: str) -> Tokenizer:
    from transformers import AutoTokenizer

    folder = find_model(path)
    config = read_config(folder)
    try:
        hf = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as err:
        reason = re.sub(r"\s+", " ", str(err))[:200]
        raise UserError(f"no tokenizer could be loaded from {folder}: {reason}") from err
    return Tokenizer(hf, str(path), (*config.eos_ids, *_generation_eos(folder)))


def _generation_eos(folder: Path) -> tuple[int, ...]:
    """Chat models often end a turn with a token that only generation_config.json names."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return ()
    eos = json.loads(file.read_text()).get("eos_token_id")
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
