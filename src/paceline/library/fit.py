"""Making and evaluating drafters: completions to learn from, training on them, counting accepted draft tokens.
What `paceline draft` and the library have in common."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.core import Request
from paceline.draft.eagle.drafter import EagleDrafter
from paceline.draft.eagle.loss import DraftLoss, batches, read_sequences, suitable_rate
from paceline.draft.eagle.model import EagleModel, new_drafter
from paceline.draft.eagle.trainer import TrainSettings
from paceline.draft.eagle.vocabulary import choose_tokens
from paceline.draft.strategy import Strategy
from paceline.model.decoder import Decoder
from paceline.rollout.engine import EngineSettings, RolloutEngine

DEPTH = 7
STEP_TOKENS = 512  # of a training step: a drafter learns more from many small ones
STEP_TOKENS_GPU = 2048  # fewer would leave a GPU idle
BLOCK_TOKENS = 7  # draft tokens of a block
DrafterKind = Literal["chain", "block", "parallel"]
"""Draft tokens one after the other; all from one pass, each told the one before it; or all from one pass, as serving
engines can do it."""
POSITIONS = (64, 128, 256, 512, 10**9)

TokenSequence = tuple[list[int], int]
"""Tokens of a prompt and its completion, and how many of them are the prompt."""


def generate_sequences(policy: Decoder, requests: Sequence[Request]) -> list[TokenSequence]:
    """Completions of the policy, with their prompts."""
    most = 512 if policy.device.type == "cuda" else 64
    engine = RolloutEngine(policy, EngineSettings(max_batch=min(most, len(requests))))
    return [([*c.request.prompt, *c.tokens], len(c.request.prompt)) for c in engine.run(requests)]


def drafter_for(
    policy: Decoder,
    sequences: Sequence[TokenSequence],
    window: int,
    vocab: int | None = None,
    seed: int = 0,
    kind: DrafterKind = "chain",
) -> EagleModel:
    """A new one, that can propose `vocab` of the tokens that are frequent in completions; see `eagle.vocabulary`."""
    written = (token for tokens, prompt in sequences for token in tokens[prompt:])
    block = BLOCK_TOKENS if kind != "chain" else 0
    return new_drafter(policy, window, seed, choose_tokens(policy, vocab, written), block, kind == "block")


@dataclass
class Fitted:
    """How training went."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    """Of the last step."""
    agree: list[float] = field(default_factory=lambda: [0.0])
    """How often its likeliest token was the policy's, by depth."""


def fit(
    drafter: EagleModel,
    sequences: Sequence[TokenSequence],
    seconds: float,
    loss: DraftLoss = "soft",
    seed: int = 0,
    report: Callable[[Fitted], None] = lambda fitted: None,
) -> Fitted:
    """Train a drafter for so long; `report` is called after every step."""
    runs = drafter.shape.block or TrainSettings.runs
    settings = TrainSettings(lr=suitable_rate(drafter.policy), runs=runs, loss=loss, first_runs=2)
    trainer = EagleDrafter(drafter).make_trainer(settings)
    done = Fitted()
    started = time.perf_counter()
    feed = _endless(sequences, STEP_TOKENS_GPU if drafter.fc.is_cuda else STEP_TOKENS, random.Random(seed))
    batch = next(feed)
    seen = read_sequences(drafter, batch)
    while done.seconds < seconds:
        trainer.begin(seen, min(1.0, done.seconds / seconds))
        done.tokens += sum(len(tokens) for tokens, _ in batch)
        batch = next(feed)
        seen = read_sequences(drafter, batch)  # a GPU has that to do while the host waits for the step
        done.loss, done.agree = trainer.end()
        done.steps = trainer.steps
        done.seconds = time.perf_counter() - started
        report(done)
    trainer.publish()
    return done


def _endless(sequences: Sequence[TokenSequence], tokens: int, dice: random.Random) -> Iterator[list[TokenSequence]]:
    """Batches of at most so many tokens, over and over, each time in another order."""
    while True:
        yield from batches(sequences, tokens, dice.shuffle, lambda sequence: len(sequence[0]))


def count_accepted(drafter: EagleModel, requests: Sequence[Request], depth: int = DEPTH) -> dict[str, Any]:
    """Decode with chains, and count accepted draft tokens: by depth, and by position in the completion."""
    strategy = Strategy.parse(f"neural:{depth}")
    engine = RolloutEngine(
        drafter.policy, EngineSettings(max_batch=min(64, len(requests))), None, [EagleDrafter(drafter)], [strategy]
    )
    engine.choose = lambda batch: strategy
    reached = Counter[int]()
    accepted = Counter[int]()
    lengths: list[list[int]] = [[] for _ in POSITIONS]
    engine.submit(requests)
    while engine.unfinished:
        before = {s.request.id: s.generated for s in engine.scheduler.running}
        alive = list(engine.scheduler.running)
        engine.step()
        for seq in alive:
            gained = seq.generated - before[seq.request.id]
            if not gained:  # others were admitted
                continue
            reached.update(range(min(gained, depth)))
            accepted.update(range(gained - 1))
            interval = next(i for i, end in enumerate(POSITIONS) if before[seq.request.id] < end)
            lengths[interval].append(gained)
    return {
        "accept_length": round(engine.stats.accept_length, 3),
        "accept_rates": [round(accepted[d] / max(1, reached[d]), 3) for d in range(depth)],
        "by_position": [round(sum(n) / len(n), 3) if n else None for n in lengths],
    }
