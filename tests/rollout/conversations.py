"""Conversations for the engine's tests: a world that answers each turn as a function of what was written, and the same
written turn by turn by requests that do not act."""

from __future__ import annotations

import random
from dataclasses import replace

from paceline.core import Completion, Observation, Request, Turn, mix_seed
from paceline.rollout import EngineSettings, RolloutEngine

MOST_TURNS = 5


def answer(turn: Turn, vocab: int = 128, most_turns: int = MOST_TURNS) -> Observation:
    """Tokens that depend on the turn alone; none, one or many, with stop tokens among them; and sometimes the end."""
    dice = random.Random(mix_seed(turn.request_id, turn.number, *turn.tokens))
    done = turn.number + 1 >= most_turns or dice.random() < 0.15
    count = 0 if done else dice.choice([0, 1, 2, 7, 20, 45])
    return Observation(turn.request_id, turn.number, [dice.randrange(vocab) for _ in range(count)], done)


def turn_by_turn(model, requests: list[Request], decode=None, most_turns: int = MOST_TURNS) -> dict[int, Completion]:
    """What acting is to lead to: each turn is a request of its own, whose prompt is all that came before it."""
    out = {}
    longest = model.config.max_positions
    for request in requests:
        tokens: list[int] = []
        logprobs: list[float] = []
        observed: list[tuple[int, int]] = []
        s = request.sampling
        for number in range(MOST_TURNS):
            sampling = replace(s, max_tokens=s.max_tokens - len(tokens), min_tokens=max(0, s.min_tokens - len(tokens)))
            part = Request(request.id, (*request.prompt, *tokens), sampling, request.seed)
            (done,) = RolloutEngine(model, EngineSettings(max_batch=1), decode).run([part])
            tokens += done.tokens
            logprobs += done.logprobs
            reason = done.finish_reason
            if reason == "length":
                break
            observation = answer(Turn(request.id, number, done.tokens, reason), model.config.vocab_size, most_turns)
            if observation.done:
                break
            new = len(observation.tokens)
            if len(tokens) + new >= s.max_tokens or len(request.prompt) + len(tokens) + new >= longest:
                reason = "length"
                break
            observed.append((len(tokens), len(tokens) + new))
            tokens += observation.tokens
            logprobs += [0.0] * new
        out[request.id] = Completion(replace(request, acts=True), tokens, logprobs, reason, tuple(observed))
    return out


def converse(
    engine: RolloutEngine, requests: list[Request], delay: random.Random, pause: int | None = None, ahead=(), late=False
):
    """With observations that come in any order, late or, if told so, as late as can be; and everything sent back to the
    queue once."""
    engine.submit([replace(r, acts=True) for r in requests], dict(ahead))
    done: dict[int, Completion] = {}
    pending: list[Observation] = []
    vocab = engine.model.config.vocab_size
    while engine.unfinished:
        finished = engine.step()
        pending += [answer(turn, vocab) for turn in engine.take_turns()]
        while pending and (not engine.runnable or (not late and delay.random() < 0.3)):
            completion = engine.observe(pending.pop(delay.randrange(len(pending))))
            finished += [completion] if completion else []
        for completion in finished:
            assert completion.request.id not in done, "a request was completed twice"
            done[completion.request.id] = completion
        if pause is not None and engine.stats.decode_steps >= pause:
            engine.pause()
            pause = None
    assert engine.pool.free == engine.pool.usable, "pages leaked"
    return done
