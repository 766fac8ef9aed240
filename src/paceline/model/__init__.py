"""The decoder, used for rollout and for learning, and its checkpoints in Hugging Face form."""

from paceline.model.checkpoint import load_model, save_model
from paceline.model.config import DecoderConfig
from paceline.model.decoder import Decoder

__all__ = ["Decoder", "DecoderConfig", "load_model", "save_model"]
