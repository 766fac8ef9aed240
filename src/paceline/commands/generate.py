"""`paceline generate`: answers to a prompt, from a model or from a run's newest checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.library.engine import Engine
from paceline.run import Run


def generate_command(
    model: str,
    prompt: str,
    system: str | None,
    raw: bool,
    as_json: bool,
    samples: int,
    seed: int,
    sampling: dict[str, Any],
) -> None:
    engine = Engine(newest_policy(model), max_batch=samples)
    chat = bool(engine.tokenizer.hf.chat_template) and not raw
    if system is not None and not chat:
        why = "--raw takes the prompt as it is" if raw else f"{model} has no chat template"
        raise UserError(f"--system goes with messages, but {why}")
    messages = [{"role": "system", "content": system}] if system is not None else []
    question = [*messages, {"role": "user", "content": prompt}] if chat else prompt
    (answers,) = engine.generate([question], samples=samples, seed=seed, **sampling)
    if as_json:
        rows = [{"text": a.text, "tokens": a.tokens, "finish_reason": a.finish_reason} for a in answers]
        print(json.dumps(rows, ensure_ascii=False))
        return
    for i, answer in enumerate(answers):
        if samples > 1:
            print(f"--- {i + 1} of {samples}")
        print(answer.text)


def newest_policy(model: str) -> str:
    """Of a run its newest checkpoint; anything else as it is."""
    if not os.path.isfile(Path(model) / "config.yaml"):
        return model
    run = Run.open(Path(model))
    newest = run.newest_checkpoint()
    if newest is None:
        raise UserError(f"the run {model} has no checkpoint yet; name its model, {run.config.model.path}")
    return str(newest)
