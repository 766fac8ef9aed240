"""Is it worth sharing verified tokens among requests by the drafter's confidence? Offline, on recorded rounds.

    python benchmarks/confidence.py --prompts 16 --batch 16

Rolls out with deep chains and records, for every draft token, the probability that the drafter gave it, and how many of
each chain were accepted. From those, the accept length at so many verified draft tokens per request: with one depth
for all, and with a budget that the batch shares, spent on the draft tokens that are likeliest to be accepted: by the
product of the drafter's probabilities as they are, or calibrated on the other half of the rounds (32 bins). `best`
knows what will be accepted. A drafter is degraded by noise on its weights (`--noise`, relative to their own spread).
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core import Request, SamplingParams
from paceline.draft.decision import RoundOutcome
from paceline.draft.eagle.drafter import EagleDrafter
from paceline.draft.eagle.files import find_drafter, load_drafter
from paceline.draft.eagle.model import EagleModel
from paceline.draft.eagle.propose import Sampler
from paceline.draft.strategy import Strategy
from paceline.model import Decoder, load_model
from paceline.model.tokenizer import load_tokenizer
from paceline.rollout.engine import EngineSettings, RolloutEngine
from paceline.tasks.countdown import Countdown

Floats = NDArray[np.float64]
BINS = 32
BUDGETS = (1, 2, 3, 4, 6, 8)


def main() -> None:
    args = parse()
    policy = load_model(args.model, device=torch.device("cpu"))
    rows = []
    for noise in args.noise:
        folder = find_drafter(args.drafter, args.model)
        assert folder is not None, "name a drafter"
        drafter = load_drafter(folder, policy)
        degrade(drafter, noise)
        probabilities, accepted = record(args, policy, drafter)
        print(f"noise {noise}: {len(accepted)} chains of {args.depth}, mean accept length {1 + accepted.mean():.2f}")
        for row in compare(probabilities, accepted, args.batch):
            rows.append({"noise": noise, "accept_length": round(float(1 + accepted.mean()), 2)} | row)
            print("  ".join(f"{k} {v}" for k, v in row.items()), flush=True)
    print(json.dumps({"settings": vars(args), "rows": rows}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0, 0.15])
    return parser.parse_args()


@torch.no_grad()
def degrade(drafter: EagleModel, noise: float) -> None:
    generator = torch.Generator("cpu").manual_seed(1)
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * noise * parameter.std())


class Recorder:
    """The probability of every draft token, as the drafter's sampler draws it."""

    def __init__(self) -> None:
        self.round: list[Floats] = []
        original = Sampler.scores

        def scores(sampler: Sampler, hidden: torch.Tensor, level: int) -> torch.Tensor:
            found = original(sampler, hidden, level)
            logits = sampler.model.logits(hidden) / sampler.temperature
            best = found.argmax(-1, keepdim=True)
            self.round.append(logits.softmax(-1).gather(-1, best)[:, 0].double().numpy().copy())
            return found

        Sampler.scores = scores  # type: ignore[method-assign]
        self.restore = lambda: setattr(Sampler, "scores", original)


def record(args: argparse.Namespace, policy: Decoder, drafter: EagleModel) -> tuple[Floats, Floats]:
    """Probabilities [chains, depth] and accepted draft tokens [chains]."""
    strategy = Strategy.parse(f"neural:{args.depth}")
    settings = EngineSettings(max_batch=args.batch)
    engine = RolloutEngine(policy, settings, None, [EagleDrafter(drafter)], [Strategy.parse("plain"), strategy])
    engine.choose = lambda batch: strategy
    recorder = Recorder()
    found: list[tuple[Floats, Floats]] = []
    observe = engine.tuner.observe

    def listen(outcome: RoundOutcome) -> None:
        if outcome.accepted is not None and len(recorder.round) == args.depth:
            found.append((np.stack(recorder.round, 1), np.array(outcome.accepted, float)))
        recorder.round.clear()
        observe(outcome)

    engine.tuner.observe = listen  # type: ignore[method-assign]
    tokenizer = load_tokenizer(args.model)
    task = Countdown("medium", "search", seed=9)
    sampling = SamplingParams(max_tokens=args.max_tokens, stop_token_ids=tokenizer.eos_ids)
    prompts = [tuple(tokenizer.encode_prompt(task.sample(i).prompt)) for i in range(args.prompts)]
    requests = [Request(i, prompts[i // args.samples], sampling, 3) for i in range(args.prompts * args.samples)]
    for _ in engine.run(requests):
        pass
    recorder.restore()
    whole = [(p, a) for p, a in found if len(p) == len(a)]
    return np.concatenate([p for p, _ in whole]), np.concatenate([a for _, a in whole])


def compare(probabilities: Floats, accepted: Floats, batch: int) -> list[dict[str, Any]]:
    """Accept lengths by verified draft tokens per request, on one half of the chains."""
    order = np.random.default_rng(0).permutation(len(accepted))
    learn, test = order[: len(order) // 2], order[len(order) // 2 :]
    depth = probabilities.shape[1]
    level = np.arange(depth)
    reached = level[None] <= accepted[:, None]
    right = level[None] < accepted[:, None]
    calibrated = calibrate(probabilities, reached, right, learn)
    oracle = right + 1e-3 * probabilities
    rows = []
    for budget in BUDGETS:
        fixed = 1 + float(np.minimum(accepted[test], budget).mean())
        row: dict[str, Any] = {"verified": budget, "one_depth": round(fixed, 3)}
        scores = {"raw": probabilities.cumprod(1), "calibrated": calibrated.cumprod(1), "best": oracle.cumprod(1)}
        for name, score in scores.items():
            shared = 1 + share(score[test], accepted[test], budget, batch)
            row[name] = round(shared, 3)
            row[f"{name}_gain"] = f"{shared / fixed - 1:+.1%}"
        rows.append(row)
    return rows


def calibrate(probabilities: Floats, reached: NDArray[Any], right: NDArray[Any], learn: NDArray[Any]) -> Floats:
    """How often draft tokens of such a probability are accepted, where the ones before them were."""
    edges = np.quantile(probabilities[learn][reached[learn]], np.linspace(0, 1, BINS + 1)[1:-1])
    bins = np.digitize(probabilities, edges)
    counts = np.bincount(bins[learn][reached[learn]], minlength=BINS)
    hits = np.bincount(bins[learn][right[learn]], minlength=BINS)
    return ((hits + 0.5) / (counts + 1))[bins] - 1e-9 * (1 - probabilities)  # none is as likely as another


def share(scores: Floats, accepted: Floats, budget: int, batch: int) -> float:
    """Accepted draft tokens per request, if each batch verifies the `budget` times `batch` likeliest."""
    found = []
    for first in range(0, len(accepted) - batch, batch):
        part = scores[first : first + batch]
        if budget * batch >= part.size:
            taken = np.full(batch, part.shape[1])
        else:
            threshold = np.sort(part.ravel())[-budget * batch]
            taken = (part >= threshold).sum(1)
        found.append(np.minimum(accepted[first : first + batch], taken).mean())
    return float(np.mean(found))


if __name__ == "__main__":
    main()
