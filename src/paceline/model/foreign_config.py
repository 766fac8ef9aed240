"""The shape of a model of any family, as far as everybody around it has to know it. Those that our decoder runs have
more (`config.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from paceline.files.reading import check
from paceline.model.config import Positions, Size, Tokens, Vocabulary, eos_ids, refuse_quantized


class ForeignHfConfig(BaseModel):
    """What is read of the config.json of a model of any family."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model_type: str
    vocab_size: Vocabulary
    hidden_size: Size
    max_position_embeddings: Positions = 2048
    eos_token_id: Tokens | None = None


@dataclass(frozen=True)
class ForeignConfig:
    family: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    eos_ids: tuple[int, ...] = ()
    hf: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The config as it was read."""


def foreign_config(hf: dict[str, Any], folder: Path) -> ForeignConfig:
    where = f"the config.json of {folder}"
    refuse_quantized(hf, str(folder))
    text = hf.get("text_config")  # of models that also see
    c = check(ForeignHfConfig, {**hf, **text} if isinstance(text, dict) else hf, where)
    ends = eos_ids(c.eos_token_id, c.vocab_size, where)
    return ForeignConfig(c.model_type, c.vocab_size, c.hidden_size, c.max_position_embeddings, ends, hf)
