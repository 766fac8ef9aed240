"""`paceline compare`: every step of a recipe is rolled out twice from the same weights, plainly and adaptively, timed,
checked for identity, and learned from once. Because samples are the same, the two differ in nothing but speed."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from paceline.build import make_engine
from paceline.config import Config
from paceline.errors import UserError
from paceline.kernels.noise import gumbel, position_keys, request_key
from paceline.loop import Group, Trainer
from paceline.model.attention import PackedAttention
from paceline.model.decoder import Decoder
from paceline.observe.clock import Clock
from paceline.observe.live import LiveView
from paceline.observe.picture import draw_rollouts
from paceline.rollout import Completion
from paceline.rollout.stats import Round
from paceline.run import Run

WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64, torch.float64: torch.float64}
LATEST = 32  # places over which the effect of rounding is measured


@dataclass
class Difference:
    """Where two rollouts of a request first drew different tokens, and by how little the race was decided."""

    request: int
    position: int
    gap: float
    rounding: float
    near_tie: bool


@dataclass
class Step:
    plain_s: float
    adaptive_s: float
    rest_s: float = 0.0
    tokens: int = 0
    responses: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        return self.plain_s / self.adaptive_s


class Comparison(Trainer):
    def __init__(self, config: Config, run: Run, view: LiveView | None = None):
        super().__init__(config, run, view)
        self.adaptive = self.engine
        plain = self.config.speculation.model_copy(update={"mode": "plain"})
        self.plain = make_engine(
            self.model, self.config.model_copy(update={"speculation": plain}), self.tokenizer.decode
        )
        self.steps: list[Step] = []
        self.rounds: dict[str, list[Round]] = {}

    def step(self) -> dict[str, float]:
        started = time.perf_counter()
        metrics = super().step()
        last = self.steps[-1]
        last.rest_s = time.perf_counter() - started - last.plain_s - last.adaptive_s
        ratio = {"compare/rollout_speedup": last.speedup, "compare/identical": float(not last.differences)}
        return metrics | ratio

    def _rollout(self, indices: range, clock: Clock) -> list[Group]:
        """Both ways, in turns first, so that neither always finds the caches warm."""
        groups: dict[str, list[Group]] = {}
        seconds: dict[str, float] = {}
        order = ["plain", "adaptive"] if len(self.steps) % 2 else ["adaptive", "plain"]
        for way in order:
            self.engine = getattr(self, way)
            self.rounds[way] = []
            self.engine.record = self._recorder(way)
            own = Clock()
            groups[way] = super()._rollout(indices, own)
            seconds[way] = own.parts["gen"]
        self.engine = self.adaptive
        clock.parts["gen"] = clock.parts.get("gen", 0.0) + seconds["adaptive"]
        clock.parts.setdefault("reward", 0.0)
        step = Step(seconds["plain"], seconds["adaptive"])
        pairs = zip(groups["plain"], groups["adaptive"], strict=True)
        different: list[tuple[Completion, Completion]] = []
        for a, b in ((g.completions[i], h.completions[i]) for g, h in pairs for i in g.completions):
            step.responses += 1
            step.tokens += len(a.tokens)
            if a.tokens != b.tokens:
                different.append((a, b))
        step.differences = explain(self.model, different)
        self.steps.append(step)
        return groups["adaptive"]

    def _recorder(self, way: str) -> Callable[[Round], None]:
        """Both ways for the picture; the timeline shows the one that would have run without a comparison."""
        keep = self.rounds[way].append
        if way == "plain":
            return keep

        def both(round: Round) -> None:
            keep(round)
            self.round_log(round)

        return both


def explain(model: Decoder, pairs: list[tuple[Completion, Completion]]) -> list[Difference]:
    """Run the policy once more over what each two have in common, and look at the race that they decided differently.

    The pass is run in the model's precision and in a wider one. Their largest difference, over all tokens of the
    vocabulary at the latest places, is what rounding does to a score. A near-tie is a race whose candidates lie closer
    together than twice that: each of the two may have been moved."""
    if not pairs:
        return []
    wide = copy.deepcopy(model).to(WIDER[model.dtype])
    return [_explain(model, wide, a, b) for a, b in pairs]


def _explain(model: Decoder, wide: Decoder, a: Completion, b: Completion) -> Difference:
    shared = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y), None)
    if shared is None:
        raise AssertionError(f"request {a.request.id} ended differently after the same tokens")
    tokens = [*a.request.prompt, *a.tokens[:shared]]
    exact = _latest_logits(wide, tokens)
    temperature = a.request.sampling.temperature
    rounding = float((exact - _latest_logits(model, tokens)).abs().max()) / (temperature or 1.0)
    scores = exact[-1] / (temperature or 1.0)
    if temperature:
        key = torch.tensor([request_key(a.request.seed, a.request.id)], device=model.device)
        place = torch.tensor([len(tokens)], device=model.device)
        scores = scores + gumbel(position_keys(key, place), len(scores), torch.float64)[0]
    gap = abs(float(scores[a.tokens[shared]] - scores[b.tokens[shared]]))
    return Difference(a.request.id, shared, gap, rounding, gap <= 2 * rounding)


@torch.no_grad()
def _latest_logits(model: Decoder, tokens: list[int]) -> Tensor:
    """float64 [places, V], the last row being what the next token is drawn from."""
    attention = PackedAttention([len(tokens)], model.device)
    hidden, _ = model(torch.tensor(tokens, device=model.device), attention.positions(), attention)
    return model.logits(hidden[-LATEST:]).double()


def run_comparison(config: Config, console: Console) -> None:
    if config.speculation.mode == "plain":
        raise UserError("speculation.mode=plain leaves nothing to compare; drop that setting")
    run = Run.create(config)
    try:
        trainer = Comparison(run.config, run, LiveView(config, console))
    except UserError:
        run.discard()
        raise
    trainer.train()
    picture = run.folder / "compare.svg"
    picture.write_text(draw_rollouts(trainer.rounds), encoding="utf-8")
    result = summarize(trainer, str(run.folder))
    (run.folder / "compare.json").write_text(json.dumps(result, indent=2) + "\n")
    console.print(_table(result, str(picture)))
    print(json.dumps(result))


def summarize(trainer: Comparison, folder: str) -> dict[str, Any]:
    steps = trainer.steps
    speedups = sorted(s.speedup for s in steps)
    whole = [(s.plain_s + s.rest_s) / (s.adaptive_s + s.rest_s) for s in steps]
    different = [d for s in steps for d in s.differences]
    tokens = sum(s.tokens for s in steps)
    responses = sum(s.responses for s in steps)
    stats = trainer.adaptive.stats
    return {
        "rollout_speedup": round(median(speedups), 3),
        "rollout_speedup_range": [round(speedups[0], 3), round(speedups[-1], 3)],
        "rollout_speedup_total": round(sum(s.plain_s for s in steps) / sum(s.adaptive_s for s in steps), 3),
        "step_speedup": round(median(whole), 3),
        "steps": len(steps),
        "tokens": tokens,
        "responses": responses,
        "identical": responses - len(different),
        "near_ties": sum(d.near_tie for d in different),
        "differences": [vars(d) for d in different],
        "accept_length": round(stats.accept_length, 3),
        "plain_tok_s": round(tokens / sum(s.plain_s for s in steps), 1),
        "adaptive_tok_s": round(tokens / sum(s.adaptive_s for s in steps), 1),
        "rollout_s": {
            "plain": round(median(s.plain_s for s in steps), 3),
            "adaptive": round(median(s.adaptive_s for s in steps), 3),
        },
        "rest_s": round(median(s.rest_s for s in steps), 3),
        "rounds": dict(sorted(stats.rounds.items(), key=lambda kv: -kv[1])),
        "explored": round(trainer.adaptive.tuner.explored / max(trainer.adaptive.tuner.seconds, 1e-9), 4),
        "run": folder,
    }


def _table(r: dict[str, Any], picture: str) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    low, high = r["rollout_speedup_range"]
    table.add_row("rollout", f"{r['rollout_s']['plain']:.2f} s plain, {r['rollout_s']['adaptive']:.2f} s adaptive")
    table.add_row(
        "", f"{r['rollout_speedup']:.2f} times faster (median of {r['steps']} steps, {low:.2f} to {high:.2f})"
    )
    table.add_row("whole step", f"{r['step_speedup']:.2f} times faster")
    table.add_row("tokens/s", f"{r['plain_tok_s']:,.0f} plain, {r['adaptive_tok_s']:,.0f} adaptive")
    same = f"{r['identical']} of {r['responses']} responses identical ({r['tokens']:,} tokens)"
    if r["identical"] < r["responses"]:
        same += f"; {r['near_ties']} differ by a near-tie, {r['responses'] - r['identical'] - r['near_ties']} do not"
    table.add_row("answers", same)
    table.add_row("accept length", f"{r['accept_length']:.2f} tokens per check")
    table.add_row("strategies", ", ".join(f"{name} {count}" for name, count in r["rounds"].items()))
    table.add_row("picture", picture)
    return table
