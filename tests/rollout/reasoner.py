"""The embedded reasoner at work: the model, its own drafter, real problems, and ways of answering them."""

from __future__ import annotations

import random

from paceline.core import Completion, Request, SamplingParams
from paceline.draft.eagle.drafter import EagleDrafter
from paceline.draft.eagle.files import find_drafter, load_drafter
from paceline.draft.suffix.drafter import SuffixDrafter
from paceline.model import load_model
from paceline.model.decoder import Decoder
from paceline.model.tokenizer import load_tokenizer
from paceline.rollout import EngineSettings, RolloutEngine
from paceline.tasks.countdown import Countdown


def reasoner(dtype: str = "float32", device: str = "cpu") -> Decoder:
    return load_model("embedded", dtype, device)


def own_drafter(model: Decoder) -> EagleDrafter:
    folder = find_drafter("auto", "embedded")
    assert folder is not None, "the embedded model comes with a drafter"
    return EagleDrafter(load_drafter(folder, model))


def problems(count: int, longest: int, answers: int = 1, seed: int = 1) -> list[Request]:
    """Countdown problems, each to be answered so many times."""
    tokenizer, task = load_tokenizer("embedded"), Countdown("medium", "search", seed=seed)
    sampling = SamplingParams(max_tokens=longest, stop_token_ids=tokenizer.eos_ids)
    prompts = [tuple(tokenizer.encode_prompt(task.sample(i).prompt)) for i in range(-(-count // answers))]
    return [Request(i, prompts[i // answers], sampling, seed=seed) for i in range(count)]


def plainly(model: Decoder, requests: list[Request], batch: int) -> dict[int, Completion]:
    return {c.request.id: c for c in RolloutEngine(model, EngineSettings(max_batch=batch)).run(requests)}


def toggled(model, requests: list[Request], batch: int, seed: int) -> dict[int, Completion]:
    """Every round by a strategy drawn anew, plain decoding among them."""
    drafters = [SuffixDrafter(batch, model.config.max_positions), own_drafter(model)]
    engine = RolloutEngine(model, EngineSettings(max_batch=batch), None, drafters)
    dice = random.Random(seed)
    engine.choose = lambda running: dice.choice(engine.strategies)
    done = {c.request.id: c for c in engine.run(requests)}
    assert engine.stats.accept_length > 1.5, "draft tokens are accepted, so there is something to compare"
    return done
