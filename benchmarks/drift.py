"""Does a drafter that keeps learning beat one that stands still while the policy moves?

    python benchmarks/drift.py --model MODEL --steps 40 --out FOLDER

The same run is made four times from the same start, with the same prompts:

    none            plain decoding, which all the others are compared with
    cold-adaptive   a drafter that begins untrained and is trained beside the update
    warm-frozen     the drafter beside the model, as it is
    warm-adaptive   the same, trained beside the update

Draft tokens come from the neural drafter alone. MODEL is `embedded`, or a folder made on a GPU with

    python benchmarks/make_reasoner.py --preset 100m --minutes 2.6 --out MODEL
    paceline draft train --model MODEL --minutes 0.8 --answers 3000 --window 128 --out MODEL/drafter \\
        --set rollout.max_tokens=700

In a run the tuner picks the strategies, and the accept length depends on them. So every --probe-every steps the
policy and the drafter of each run are kept, and afterwards each pair answers the same few prompts, which no run has
seen, with the same noise and chains of one depth: its accept length then depends on nothing but how well the
drafter knows the policy. Rounding parts the policies of two runs after a while, so the policies of warm-adaptive also
answer with the drafter that it began with: what is between the two is what training the drafter is worth. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import shutil
import signal
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from paceline.config import Config, load_config
from paceline.core import Request, SamplingParams
from paceline.draft.eagle.drafter import EagleDrafter
from paceline.draft.eagle.files import DRAFTER, find_drafter, load_drafter
from paceline.draft.eagle.model import EagleModel
from paceline.draft.registry import make_network
from paceline.draft.strategy import Strategy
from paceline.errors import Stopped, UserError
from paceline.loop import train
from paceline.model import load_model
from paceline.model.decoder import Decoder
from paceline.model.tokenizer import Tokenizer, load_tokenizer
from paceline.observe.live import LiveView
from paceline.observe.metrics import read_lines
from paceline.rollout import EngineSettings, RolloutEngine
from paceline.setup.device import choose_device
from paceline.tasks import make_task
from paceline.tasks.tasks import choose_style

OFF = "spot.when='off'"  # YAML takes a bare off for false
WARM = ["speculation.drafter=auto"]
TRAINED = ["spot.when=update"]
ARMS = {
    "none": ["speculation.mode=plain", OFF],
    "cold-adaptive": ["speculation.drafter=new", *TRAINED],
    "warm-frozen": [*WARM, OFF],
    "warm-adaptive": [*WARM, *TRAINED],
}
FIRST = "warm, as begun"  # the policies of warm-adaptive with the drafter that it began with
UNSEEN = 2_000_003  # added to the seed for the prompts of the probe
EARLY = 10  # steps in which graphs are captured and the tuner learns
REWARD, ACCEPT, ROLLOUT = "critic/rewards/mean", "rollout/spec_accept_length", "timing_s/gen"
SPEED, TRAINING, LENGTH = "rollout/tok_s", "timing_s/train_drafter", "response_length/mean"
Rows = list[dict[str, Any]]  # the lines of a metrics.jsonl
Probes = dict[int, float]  # accept length by the number of steps done


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--arms", default=",".join(ARMS), help="comma-separated")
    parser.add_argument("--lr", type=float, default=1.2e-4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=700)
    parser.add_argument("--difficulty", default="medium")
    parser.add_argument("--share", type=float, default=0.1, help="of a step's time that goes into the drafter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="an arm stops after the step in which it has taken so long")
    parser.add_argument("--probe-every", type=int, default=5)
    parser.add_argument("--probe-prompts", type=int, default=32)
    parser.add_argument("--probe", default="neural:5", help="the strategy of the probe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any other setting")
    parser.add_argument("--out", type=Path, default=Path("runs/drift"))
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints that the probe was made from")
    return parser.parse_args()


def main() -> None:
    args = parse()
    names = args.arms.split(",")
    if unknown := set(names) - set(ARMS):
        raise SystemExit(f"no arm is called {sorted(unknown)[0]}; there are: {', '.join(ARMS)}")
    if find_drafter("auto", args.model) is None and any(n.startswith("warm") for n in names):
        raise SystemExit(f"there is no drafter beside {args.model}; make one with `paceline draft train`")
    started = time.perf_counter()
    arms: dict[str, Rows] = {}
    probes: dict[str, Probes] = {}
    for name in names:
        arms[name] = run_arm(args, name)
        free_memory()
    for name in names:
        if name != "none":
            if name == "warm-adaptive":
                probes[FIRST] = probe_arm(args, name, as_begun=True)
                free_memory()
            probes[name] = probe_arm(args, name)
            free_memory()
            if not args.keep:
                shutil.rmtree(args.out / name / "checkpoints")
    seconds = time.perf_counter() - started
    print_tables(arms, probes, args.probe_every)
    result = summarize(arms, probes)
    print_summary(result)
    print(f"all of it took {seconds:.0f} s")
    device = choose_device("auto")
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "keep", "arms")}
    rows = {name: [brief(row) for row in rows] for name, rows in arms.items()}
    print(json.dumps({"device": where, "settings": settings, "summary": result, "probes": probes, "rows": rows}))


def settings_of(args: argparse.Namespace, arm: str) -> Config:
    words = [
        f"model.path={args.model}", f"steps={args.steps}", f"seed={args.seed}", f"run_dir={args.out / arm}",
        "cluster.workers=1",
        f"task.difficulty={args.difficulty}", f"learn.lr={args.lr}", f"spot.share={args.share}",
        f"rollout.prompts={args.prompts}", f"rollout.samples={args.samples}", f"rollout.max_tokens={args.max_tokens}",
        "speculation.suffix=false", "log.tensorboard=false", "log.samples=1",
        f"checkpoint.every={args.probe_every}", f"checkpoint.keep={args.steps + 1}",
    ]  # fmt: skip
    return load_config("default", [*words, *ARMS[arm], *args.set])


class Watcher(LiveView):
    """Says how an arm goes, lets go of what the probe does not need, and stops the arm when its time is up."""

    def __init__(self, config: Config, name: str, seconds: float | None):
        super().__init__(config, quiet=True)
        self.name, self.seconds, self.started = name, seconds, time.perf_counter()
        self.folder = Path(str(config.run_dir))

    def step_done(self, step: int, metrics: dict[str, float]) -> None:
        super().step_done(step, metrics)
        for file in self.folder.glob("checkpoints/step-*/learner*.safetensors"):
            file.unlink()  # most of a checkpoint, and only needed to go on training
        elapsed = time.perf_counter() - self.started
        if step % 5 == 0 or step == 1:
            print(
                f"{self.name:<14} step {step:>3}  reward {metrics[REWARD]:.3f}  length {metrics[LENGTH]:.0f}  "
                f"rollout {metrics[ROLLOUT]:.2f} s  accept length {metrics[ACCEPT]:.2f}  step "
                f"{metrics['timing_s/step']:.2f} s",
                flush=True,
            )
        if self.seconds is not None and elapsed > self.seconds and step < self.steps:
            print(f"{self.name:<14} stops after step {step}: its {self.seconds:.0f} s are over", flush=True)
            signal.raise_signal(signal.SIGINT)  # as a person would stop it


def run_arm(args: argparse.Namespace, name: str) -> Rows:
    """Train it from the start -> what was measured in each step."""
    config = settings_of(args, name)
    shutil.rmtree(args.out / name, ignore_errors=True)
    with contextlib.suppress(Stopped):
        train(config, view=Watcher(config, name, args.seconds))
    return read_lines(args.out / name / "metrics.jsonl")


@torch.no_grad()
def probe_arm(args: argparse.Namespace, name: str, as_begun: bool = False) -> Probes:
    """Accept length of the arm's policy and drafter, at the start and at every checkpoint; or with the drafter that
    it began with. A drafter that is frozen is not in the checkpoints."""
    config = settings_of(args, name)
    policy = load_model(args.model, config.model.dtype, choose_device(config.model.device))
    tokenizer = load_tokenizer(args.model)
    drafter = first_drafter(config, policy)
    strategy = Strategy.parse(args.probe)
    engine = RolloutEngine(
        policy, EngineSettings(max_batch=args.probe_prompts), None, [EagleDrafter(drafter)], [strategy]
    )
    engine.choose = lambda _: strategy
    requests = probe_requests(config, policy, tokenizer, args.probe_prompts)
    results = {0: ask(engine, requests)}
    for folder in sorted((args.out / name / "checkpoints").glob("step-*")):
        # In place, so that graphs that were captured stay valid.
        policy.load_state_dict(load_model(str(folder), config.model.dtype, policy.device).state_dict())
        if (folder / DRAFTER).is_dir() and not as_begun:
            drafter.load_state_dict(load_drafter(folder / DRAFTER, policy).state_dict())
        engine.refresh()
        results[int(folder.name.removeprefix("step-"))] = ask(engine, requests)
    return results


def first_drafter(config: Config, policy: Decoder) -> EagleModel:
    if config.speculation.drafter == "new":
        return make_network(policy, None, config.seed)
    folder = find_drafter(config.speculation.drafter, config.model.path)
    if folder is None:
        raise UserError(f"there is no drafter beside {config.model.path}")
    return load_drafter(folder, policy)


def probe_requests(config: Config, policy: Decoder, tokenizer: Tokenizer, count: int) -> list[Request]:
    style = choose_style(config.task.style, policy.config.hf, bool(tokenizer.hf.chat_template))
    task = make_task(config.task.model_copy(update={"problems": None}), config.seed + UNSEEN, style)
    r = config.rollout
    sampling = SamplingParams(
        r.temperature, r.top_k, r.top_p, r.min_p, r.max_tokens, r.min_tokens, stop_token_ids=tokenizer.eos_ids
    )
    prompts = [tuple(tokenizer.encode_prompt(task.sample(i).prompt)) for i in range(count)]
    return [Request(i, prompt, sampling, config.seed) for i, prompt in enumerate(prompts)]


def ask(engine: RolloutEngine, requests: list[Request]) -> float:
    before = engine.stats.snapshot()
    for _ in engine.run(requests):
        pass
    return engine.stats.since(before).metrics()[ACCEPT]


def free_memory() -> None:
    """An arm's model and graphs are let go before the next one makes its own."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def brief(row: dict[str, Any]) -> dict[str, float]:
    wanted = (REWARD, ACCEPT, ROLLOUT, SPEED, TRAINING, LENGTH, "timing_s/step", "timing_s/update_actor")
    return {"step": row["step"]} | {name: round(row[name], 4) for name in wanted if name in row}


def summarize(arms: dict[str, Rows], probes: dict[str, Probes]) -> dict[str, Any]:
    """What the runs say, over the steps that all of them made."""
    steps = min(len(rows) for rows in arms.values())
    arms = {name: rows[:steps] for name, rows in arms.items()}
    out: dict[str, Any] = {"steps": steps, "arms": {}}
    for name, rows in arms.items():
        late = rows[EARLY:] or rows
        figures = {
            "reward_by_quarter": [round(v, 4) for v in by_quarter([row[REWARD] for row in rows])],
            "length_by_quarter": [round(v, 1) for v in by_quarter([row[LENGTH] for row in rows])],
            "rollout_s": round(sum(row[ROLLOUT] for row in rows), 2),
            "rollout_s_late": round(sum(row[ROLLOUT] for row in late), 2),
            "us_per_token_late": round(1e6 * sum(row[ROLLOUT] for row in late) / written(late), 2),
            "step_s": round(fmean(row["timing_s/step"] - row.get("timing_s/save_checkpoint", 0.0) for row in late), 3),
            "drafter_s_per_step": round(fmean(row.get(TRAINING, 0.0) for row in rows), 4),
        }
        if name != "none":
            figures["accept_length_late"] = round(fmean(row[ACCEPT] for row in late), 3)
        if name in probes:
            kept = {step: value for step, value in probes[name].items() if step <= steps}
            figures["probe_first"], figures["probe_last"] = (round(kept[pick(kept)], 3) for pick in (min, max))
        out["arms"][name] = figures
    if "none" in arms:
        plain = out["arms"]["none"]
        for figures in out["arms"].values():
            # Rounding lets answers differ between runs after a while, and then their number of tokens does too.
            figures["speedup_late"] = round(plain["rollout_s_late"] / figures["rollout_s_late"], 3)
            figures["speedup_per_token_late"] = round(plain["us_per_token_late"] / figures["us_per_token_late"], 3)
            figures["step_speedup_late"] = round(plain["step_s"] / figures["step_s"], 3)
    rivals = [probes[name] for name in probes if name not in ("warm-adaptive", FIRST)]
    if "warm-adaptive" in probes and rivals:
        out["warm_adaptive_best_from"] = stays_ahead(probes["warm-adaptive"], rivals, steps)
    if FIRST in probes:
        out["ahead_of_its_first_from"] = stays_ahead(probes["warm-adaptive"], [probes[FIRST]], steps)
    if {"cold-adaptive", "warm-frozen"} <= set(probes):
        out["cold_passes_frozen_at"] = stays_ahead(probes["cold-adaptive"], [probes["warm-frozen"]], steps)
    return out


def written(rows: Rows) -> float:
    """Tokens of all answers."""
    return sum(row[SPEED] * row[ROLLOUT] for row in rows)


def by_quarter(values: Sequence[float]) -> list[float]:
    edges = [round(i * len(values) / 4) for i in range(5)]
    return [fmean(values[a:b]) for a, b in pairwise(edges) if b > a]


def stays_ahead(mine: Probes, others: list[Probes], last: int) -> int | None:
    """The first probe from which on mine is above all others until the end; None if it is not at the end."""
    since: int | None = None
    for step in sorted(step for step in set(mine).intersection(*others) if step <= last):
        if all(mine[step] > other[step] for other in others):
            since = step if since is None else since
        else:
            since = None
    return since


def print_tables(arms: dict[str, Rows], probes: dict[str, Probes], every: int) -> None:
    """Every so many steps, a column per arm."""
    print("\nprobe: accept length after so many steps, same prompts, same strategy")
    steps = sorted({step for values in probes.values() for step in values})
    print_table(probes, {name: [probes[name].get(step) for step in steps] for name in probes}, steps, 2)
    ends = list(range(every, 1 + max(len(rows) for rows in arms.values()), every))
    for key, title, places in (
        (ACCEPT, "accept length, as the tuner chose", 2),
        (ROLLOUT, "seconds of rollout", 2),
        (REWARD, "reward", 3),
    ):
        columns = {name: rows for name, rows in arms.items() if key != ACCEPT or name != "none"}
        print(f"\n{title}: means of the {every} steps up to each")
        means = {
            name: [fmean(r[key] for r in rows[end - every : end]) if len(rows) >= end else None for end in ends]
            for name, rows in columns.items()
        }
        print_table(columns, means, ends, places)


def print_table(names: Any, columns: dict[str, list[float | None]], steps: list[int], places: int) -> None:
    print("step  " + "  ".join(f"{name:>14}" for name in names))
    for i, step in enumerate(steps):
        cells = ("-" if (v := columns[name][i]) is None else f"{v:.{places}f}" for name in names)
        print(f"{step:>4}  " + "  ".join(f"{cell:>14}" for cell in cells))


def print_summary(s: dict[str, Any]) -> None:
    print(f"\nover {s['steps']} steps; late: from step {EARLY + 1} on")
    for name, a in s["arms"].items():
        quarters = ", ".join(f"{v:.3f}" for v in a["reward_by_quarter"])
        print(f"{name:<14} reward by quarter {quarters}")
        print(f"{'':<14} rollout {a['rollout_s']:.1f} s, a step {a['step_s']:.2f} s late")
        if name != "none" and "speedup_late" in a:
            print(
                f"{'':<14} late, rollout is {a['speedup_late']:.2f} times as fast as with none "
                f"({a['speedup_per_token_late']:.2f} per token), the whole step {a['step_speedup_late']:.2f}"
            )
        if a["drafter_s_per_step"]:
            share = a["drafter_s_per_step"] / a["step_s"]
            print(f"{'':<14} training the drafter takes {a['drafter_s_per_step']:.3f} s a step, {share:.0%} of it")
        if "probe_first" in a:
            print(f"{'':<14} probe {a['probe_first']:.2f} at the start, {a['probe_last']:.2f} at the end")
    for key, said in (
        ("warm_adaptive_best_from", "warm-adaptive stays the best from step"),
        (
            "ahead_of_its_first_from",
            "on its policies, warm-adaptive stays ahead of how it began from step",
        ),
        ("cold_passes_frozen_at", "cold-adaptive stays above warm-frozen from step"),
    ):
        if key in s:
            print(f"{said} {s[key]}" if s[key] is not None else f"{said}: never")


if __name__ == "__main__":
    main()
