"""How much narrower is the error bar of a difference if both checkpoints are evaluated on equal dice?

    python benchmarks/equal_dice.py --lr 1.2e-4 --steps 3

The embedded reasoner is trained for a few steps, and each of its checkpoints is evaluated 20 times on the same
Countdown problems, each time with other noise. For checkpoints one or a few steps apart the later one's mean reward
minus the earlier one's is then known 20 times on equal dice; on dice of their own its variance is the sum of the two
checkpoints' variances. The standard deviations are the standard errors that an evaluation has as it is made, and would
have otherwise. Beside them stand those that a single evaluation reports, by their formulas (`evaluation/paired.py`).
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import replace
from math import inf, isfinite, sqrt
from pathlib import Path
from typing import Any

import torch

from paceline.config import Config, load_config
from paceline.draft.eagle.files import DRAFTER
from paceline.evaluation.paired import compare_scores
from paceline.evaluation.prompts import EvalSet, index_of, make_eval_set, make_eval_task
from paceline.evaluation.scores import EvalScores, PromptScores
from paceline.loop import train
from paceline.model import load_model
from paceline.model.checkpoint import EMBEDDED
from paceline.model.tokenizer import load_tokenizer
from paceline.setup.build import make_drafter, make_engine, make_sampling
from paceline.setup.device import choose_device
from paceline.tasks.countdown import solves

RESAMPLES = 2000  # of the repeats, for the interval of the ratio
Repeats = list[EvalScores]  # of a checkpoint, one for each throw of the dice


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=1.2e-4)
    parser.add_argument("--steps", type=int, default=3, help="RL steps")
    parser.add_argument("--apart", type=int, nargs="*", default=[1, 2, 3], help="steps between two checkpoints")
    parser.add_argument("--difficulty", default="easy")
    parser.add_argument("--train-prompts", type=int, default=16)
    parser.add_argument("--train-samples", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=24, help="of the evaluation")
    parser.add_argument("--samples", type=int, default=2, help="answers to each")
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--checkpoints", type=Path, help="of a run with --steps steps that is there already")
    return parser.parse_args()


def settings(args: argparse.Namespace, folder: Path) -> Config:
    words = [
        f"steps={args.steps}", f"run_dir={folder}", "cluster.workers=1", f"learn.lr={args.lr}", "learn.warmup_steps=0",
        f"rollout.prompts={args.train_prompts}", f"rollout.samples={args.train_samples}", "spot.when='off'",
        f"rollout.max_tokens={args.max_tokens}", f"task.difficulty={args.difficulty}", "log.tensorboard=false",
        "checkpoint.every=1", f"checkpoint.keep={args.steps + 1}", "learn.overlong_buffer=0",
    ]  # fmt: skip
    return load_config("default", words)


def evaluations(args: argparse.Namespace, checkpoint: str) -> tuple[Repeats, int]:
    """Scores of a checkpoint by repeat, and the tokens of all its answers."""
    batch = args.prompts * args.samples
    words = [
        f"model.path={checkpoint}", "eval.task=countdown", f"eval.prompts={args.prompts}",
        f"eval.samples={args.samples}", f"rollout.max_tokens={args.max_tokens}",
        f"task.difficulty={args.difficulty}", "task.style=search",
        f"rollout.prompts={args.prompts}", f"rollout.samples={args.samples}", f"rollout.max_batch={batch}",
        f"speculation.drafter={EMBEDDED / DRAFTER}",
    ]  # fmt: skip
    c = load_config("default", words)
    tokenizer = load_tokenizer(checkpoint)
    model = load_model(checkpoint, c.model.dtype, choose_device(c.model.device))
    engine = make_engine(model, c, tokenizer.decode, make_drafter(model, c))
    sampling = make_sampling(c, tokenizer.eos_ids)
    problems = make_eval_set(make_eval_task(c, "search"), tokenizer, sampling, c, engine.max_length)
    repeats: Repeats = []
    tokens = 0
    for repeat in range(args.repeats):
        answers = list(engine.run(replace(problems, seed=repeat).requests()))
        tokens += sum(len(a.tokens) for a in answers)
        repeats.append(score(problems, {a.request.id: tokenizer.decode(a.tokens) for a in answers}))
    return repeats, tokens


def score(problems: EvalSet, texts: dict[int, str]) -> EvalScores:
    """1 for an answer that solves its problem, else 0."""
    rewards: dict[int, list[float]] = {}
    columns = {group.sample.index: group.sample.columns for group in problems.groups}
    for request_id in sorted(texts):
        index = index_of(request_id)
        right = solves(texts[request_id], columns[index]["numbers"], columns[index]["target"])
        rewards.setdefault(index, []).append(float(right))
    prompts = [PromptScores("countdown", rewards[i], [len(rewards[i])] * len(rewards[i])) for i in sorted(rewards)]
    return EvalScores(prompts, [1])


def compare(later: Repeats, earlier: Repeats) -> dict[str, float]:
    """Standard errors of the difference: of the repeats, and as single evaluations report them."""
    a = [s.value("mean") for s in later]
    b = [s.value("mean") for s in earlier]
    ratios = []
    dice = random.Random(0)
    for _ in range(RESAMPLES):
        chosen = [dice.randrange(len(a)) for _ in a]
        ratios.append(ratio([a[i] for i in chosen], [b[i] for i in chosen]))
    ratios.sort()
    single = [compare_scores(x, y) for x, y in zip(later, earlier, strict=True)]
    answers = [
        (x, y)
        for s, t in zip(later, earlier, strict=True)
        for p, q in zip(s.prompts, t.prompts, strict=True)
        for x, y in zip(p.rewards, q.rewards, strict=True)
    ]
    return {
        "difference": statistics.fmean(a) - statistics.fmean(b),
        "se_equal_dice": equal(a, b),
        "se_other_dice": other(a, b),
        "narrower_low": ratios[int(0.025 * len(ratios))],
        "narrower_high": ratios[int(0.975 * len(ratios))],
        "same_reward": sum(x == y for x, y in answers) / len(answers),
        "reported_se": statistics.fmean(d.se for d in single),
        "reported_se_other_dice": statistics.fmean(d.se_other_dice or 0.0 for d in single),
        "reported_se_unpaired": statistics.fmean(d.se_unpaired for d in single),
    }


def equal(a: list[float], b: list[float]) -> float:
    return statistics.stdev(x - y for x, y in zip(a, b, strict=True))


def other(a: list[float], b: list[float]) -> float:
    return sqrt(statistics.variance(a) + statistics.variance(b))


def ratio(a: list[float], b: list[float]) -> float:
    """How many times narrower; infinite if all repeats gave the same difference."""
    return divided(other(a, b), equal(a, b))


def divided(a: float, b: float) -> float:
    return a / b if b else inf


def main() -> None:
    args = parse()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run = args.checkpoints or Path(folder) / "run"
        config = settings(args, run)
        if not args.checkpoints:
            train(config)
        print(f"{args.steps} RL steps at a learning rate of {args.lr:g} ({time.perf_counter() - started:.0f} s)")
        paths = [f"{run}/checkpoints/step-{step:06d}" for step in range(1, args.steps + 1)]
        by_step: list[Repeats] = []
        for path in ["embedded", *paths]:
            before = time.perf_counter()
            repeats, tokens = evaluations(args, path)
            by_step.append(repeats)
            mean = statistics.fmean(s.value("mean") for s in repeats)
            print(
                f"step {len(by_step) - 1}: mean reward {mean:.4f} over {args.repeats} repeats of {args.prompts} "
                f"prompts x {args.samples} answers, {tokens:,} tokens ({time.perf_counter() - before:.0f} s)",
                flush=True,
            )
    rows: list[dict[str, Any]] = []
    for apart in args.apart:
        pairs = [compare(by_step[i + apart], by_step[i]) for i in range(len(by_step) - apart)]
        row = {name: statistics.fmean(pair[name] for pair in pairs) for name in pairs[0]}
        # The square of an error is what has a mean.
        for name in ("se_equal_dice", "se_other_dice"):
            row[name] = sqrt(statistics.fmean(pair[name] ** 2 for pair in pairs))
        row["narrower"] = divided(row["se_other_dice"], row["se_equal_dice"])
        finite = {name: round(value, 5) if isfinite(value) else None for name, value in row.items()}
        rows.append({"apart": apart, "pairs": len(pairs)} | finite)
        steps = "1 step" if apart == 1 else f"{apart} steps"
        print(
            f"{steps} apart, {len(pairs)} pairs: standard error {row['se_equal_dice']:.4f} on equal dice, "
            f"{row['se_other_dice']:.4f} on dice of their own: {row['narrower']:.2f} times narrower "
            f"({row['narrower_low']:.2f} to {row['narrower_high']:.2f} in a pair); "
            f"{row['same_reward']:.1%} of answers have the same reward"
        )
        print(
            f"    as single evaluations report it: {row['reported_se']:.4f} on equal dice, "
            f"{row['reported_se_other_dice']:.4f} on dice of their own, {row['reported_se_unpaired']:.4f} unpaired"
        )
    print(f"all of it took {time.perf_counter() - started:.0f} s with {torch.get_num_threads()} threads")
    given = {name: value for name, value in vars(args).items() if name != "checkpoints"}
    print(json.dumps({"settings": given, "rows": rows}))


if __name__ == "__main__":
    main()
