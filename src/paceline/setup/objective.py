"""One line at the start of a run: what shapes its learning."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.config import Config


def objective_line(config: Config, context: int, prompt: int) -> str:
    """Of a resolved config; `context` is what the engine has for prompt and completion, `prompt` the length of the
    first prompt."""
    learn = config.learn
    rollout = config.rollout
    schedule = "" if learn.lr_scheduler == "constant" else f" {learn.lr_scheduler}"
    parts = [
        learn.algorithm + (" with dynamic sampling" if learn.dynamic_sampling else ""),
        f"lr {learn.lr:g}{schedule}",
        f"KL {learn.kl_coef:g}" if learn.kl_coef else "no KL",
        _penalty(config),
        _max_tokens(rollout.max_tokens, context, prompt),
        f"{rollout.prompts} prompts x {rollout.samples}",
    ]
    if rollout.temperature != 1:
        parts.append(f"temperature {rollout.temperature:g}")
    return f"learning: {', '.join(parts)}"


def _penalty(config: Config) -> str:
    learn = config.learn
    if not learn.overlong_buffer or not learn.overlong_penalty:
        return "no penalty"
    begins = max(0, config.rollout.max_tokens - learn.overlong_buffer)
    return f"penalty to -{learn.overlong_penalty:g} from {begins} tokens on"


def _max_tokens(wanted: int, context: int, prompt: int) -> str:
    fits = max(0, context - prompt)
    if fits >= wanted:
        return f"max_tokens {wanted}"
    return f"max_tokens {wanted}, of which {fits} fit behind the first prompt in a context of {context}"
