"""The sampling settings of TRL's trainer as `SamplingParams`; those that cannot be honoured are refused by name."""

from __future__ import annotations

from typing import Any

import torch

from paceline.core import SamplingParams
from paceline.errors import UserError
from paceline.model.decoder import as_dtype

# Values of `generation_kwargs` that change nothing, so that naming them does no harm.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "penalty_alpha": (0.0,),
    "length_penalty": (1.0,),
    "renormalize_logits": (False,),
    "remove_invalid_values": (False,),
}
# How transformers' own generation works inside, which is not used.
INTERNAL = {
    "cache_implementation", "cache_config", "use_cache", "disable_compile", "compile_config", "return_dict_in_generate",
    "output_scores", "output_logits", "output_attentions", "output_hidden_states", "pad_token_id", "bos_token_id",
}  # fmt: skip


def check_trainer(trainer: Any) -> None:
    """Refuse what Paceline would have to ignore."""
    args = trainer.args
    if args.use_vllm:
        raise UserError("use_vllm=True and PacelineRollout both want to generate the completions: set use_vllm=False")
    if getattr(args, "use_transformers_continuous_batching", False):
        raise UserError(
            "use_transformers_continuous_batching=True and PacelineRollout both want to generate the completions: "
            "set use_transformers_continuous_batching=False"
        )
    for name, used in (("DeepSpeed", trainer.is_deepspeed_enabled), ("FSDP", trainer.is_fsdp_enabled)):
        if used:
            raise UserError(f"{name} splits the trainer's weights, which PacelineRollout cannot follow: run without it")


def make_sampling(trainer: Any, context: int) -> SamplingParams:
    """The trainer's sampling settings; `context` is the most tokens of a sequence."""
    given = {k: v for k, v in trainer.generation_kwargs.items() if v is not None and k not in INTERNAL}
    greedy = not given.pop("do_sample", True)
    temperature = 0.0 if greedy else float(given.pop("temperature", 1.0))
    given.pop("temperature", None)
    eos = given.pop("eos_token_id", ())
    stop = given.pop("stop_strings", ())
    most = int(given.pop("max_new_tokens", context))
    try:
        sampling = SamplingParams(
            temperature=temperature,
            top_k=max(0, int(given.pop("top_k", 0))),  # vLLM's -1 is 0 here
            top_p=float(given.pop("top_p", 1.0)),
            min_p=float(given.pop("min_p", 0.0)),
            max_tokens=most,
            min_tokens=int(given.pop("min_new_tokens", 0)),
            stop_token_ids=(eos,) if isinstance(eos, int) else tuple(eos),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
        )
    except ValueError as err:
        raise UserError(f"the trainer's sampling settings do not work: {err}") from err
    for name, value in given.items():
        if value not in HARMLESS.get(name, ()):
            raise UserError(
                f"the trainer wants {name}={value!r} in generation, which Paceline does not have; it has temperature, "
                "top_k, top_p, min_p, max_new_tokens, min_new_tokens, eos_token_id and stop_strings"
            )
    return sampling


def choose_dtype(trainer: Any, weights: torch.dtype, wanted: str) -> torch.dtype:
    """The engine's precision. Under bfloat16 autocast the trainer's own matmuls run in bfloat16 too; a CPU is
    faster and more exact in float32."""
    if wanted != "auto":
        return as_dtype(wanted, trainer.accelerator.device)
    if weights == torch.float64:
        return weights
    if trainer.accelerator.device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if trainer.args.bf16 or trainer.args.fp16 or weights != torch.float32 else torch.float32
