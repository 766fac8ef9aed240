"""GRPO steps with vLLM as the rollout engine, beside the same run with ours: rewards, whether the engine has the
weights of each update, and seconds by part.

    python benchmarks/vllm_rl.py --model DEEP --steps 4 --out OUT                  # on an H200: about 5 minutes
    python benchmarks/vllm_rl.py --model DEEP --steps 4 --out OUT --sides vllm     # some of them; others later
    python benchmarks/vllm_rl.py --model embedded --steps 6 --out OUT --prompts 4 --samples 4 --max-tokens 200 \\
        --dtype float32 --difficulty medium --lr 1e-4 --python .venv-vllm/bin/python --eager      # on a CPU

Sides: `ours` and `vllm` speculate with the drafter in the model's folder, if there is one; `ours-plain` and
`vllm-plain` do not. Each side is a process of its own and leaves OUT/rl-SIDE.json; one that is there is not run again.
Both make the same run: same prompts, same settings, one worker that decodes and learns, with vLLM in a process beside
it that sleeps during updates. On a CPU vLLM draws with our noise, so the runs should be equal, token by token.

Before each update the learner computes the log-probabilities of the completions itself. By how much those differ from
what the engine reported says whether the engine has the policy's weights: `difference` is the mean, 99th percentile and
maximum of |change| per token. `moved` is how much an update changes them: what the difference would be in the next
step, about, if the engine had the weights of before. Rounding differs between engines, so in bfloat16 look at the mean,
and compare with our engine's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

SOURCE = Path(__file__).parents[1] / "src"
SIDES = ("ours", "ours-plain", "vllm", "vllm-plain")
PARTS = ("gen", "reward", "end_rollout", "update_actor", "train_drafter", "merge_drafter", "save_checkpoint")
WITHIN = 2e-2  # mean difference in bfloat16 up to which the engine's weights are taken for the policy's


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs and what each side took")
    parser.add_argument("--sides", default="vllm,ours", help=f"some of {', '.join(SIDES)}")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--difficulty", default="tail")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--micro-tokens", type=int, default=8448)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--checked", type=int, default=32, help="completions per step that the learner scores again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="vLLM without compiling and without CUDA graphs")
    parser.add_argument("--vllm", default="{}", help="JSON: more arguments for vLLM's engine")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any other setting")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a side may take")
    parser.add_argument("--python", default=sys.executable, help="a Python that has vLLM")
    parser.add_argument("--serve", metavar="SIDE", choices=SIDES, help=argparse.SUPPRESS)
    words = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(words)
    args.words = words  # for the processes of the sides
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.serve:
        file_of(args, args.serve).write_text(json.dumps(make_run(args)))
        return {}
    for side in args.sides.split(","):
        if not file_of(args, side).exists():
            run_side(args, side)
    found = {side: json.loads(file_of(args, side).read_text()) for side in SIDES if file_of(args, side).exists()}
    result = {"model": args.model, "settings": settings_of(args), "sides": found, "summary": summarize(found)}
    print_sides(found, result["summary"])
    print(json.dumps(result))
    return result


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    return {k: v for k, v in vars(args).items() if k not in ("words", "serve", "out", "python")}


def file_of(args: argparse.Namespace, side: str) -> Path:
    return Path(args.out) / f"rl-{side}.json"


def run_side(args: argparse.Namespace, side: str) -> None:
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    command = [args.python, __file__, *args.words, "--serve", side]
    log_file = args.out / f"rl-{side}.log"
    started = time.perf_counter()
    with log_file.open("w") as log:
        child = subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": path}, start_new_session=True
        )
        try:
            code = child.wait(args.limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if child.poll() is None:  # its engine ends with it
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    if code != 0:
        why = f"took more than {args.limit:.0f} s (--limit)" if code is None else "failed"
        raise SystemExit(f"{side} {why}:\n" + "".join(log_file.read_text(errors="replace").splitlines(True)[-15:]))
    print(f"{side} took {time.perf_counter() - started:.0f} s", flush=True)


# One side


def config_of(args: argparse.Namespace) -> Any:
    from paceline.config import load_config

    engine, _, plain = args.serve.partition("-")
    words = [
        f"model.path={args.model}", f"model.dtype={args.dtype}", f"model.device={args.device}", f"steps={args.steps}",
        f"seed={args.seed}", f"run_dir={args.out / ('run-' + args.serve)}", "cluster.workers=1", "task.problems=null",
        f"task.difficulty={args.difficulty}", "task.max_prompt_tokens=64", f"rollout.prompts={args.prompts}",
        f"rollout.samples={args.samples}", f"rollout.max_tokens={args.max_tokens}",
        f"rollout.temperature={args.temperature}", f"speculation.mode={'plain' if plain else 'adaptive'}",
        "learn.algorithm=grpo", "learn.aggregate=token_mean", f"learn.lr={args.lr}", "learn.warmup_steps=0",
        "learn.overlong_buffer=0", f"learn.micro_tokens={args.micro_tokens}", "learn.optimizer_dtype=bfloat16",
        "learn.activation_checkpointing=true",
        "checkpoint.every=0", "log.tensorboard=false", "spot.when=off",
    ]  # fmt: skip
    if engine == "vllm":
        more = json.loads(args.vllm) | ({"enforce_eager": True} if args.eager else {})
        words += ["rollout.engine=vllm", f"rollout.vllm={json.dumps(more)}"]
    return load_config("default", [*words, *args.set])


def make_run(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from paceline.loop import TrainLoop
    from paceline.observe.live import LiveView
    from paceline.run import Run

    class Words(LiveView):
        def say(self, text: str) -> None:
            print(text, flush=True)

        note = say

    started = time.perf_counter()
    config = config_of(args)
    run = Run.create(config)
    loop = TrainLoop(run.config, run, Words(run.config, quiet=True))
    ready = time.perf_counter() - started
    print(f"ready after {ready:.1f} s", flush=True)
    check = WeightCheck(loop, args.checked)
    steps = []
    try:
        for _ in range(args.steps):
            begun = time.perf_counter()
            metrics = loop.step()
            parts = {name: round(metrics.get(f"timing_s/{name}", 0.0), 3) for name in PARTS}
            steps.append(
                {
                    "reward": round(metrics["critic/rewards/mean"], 4),
                    "length": round(metrics["response_length/mean"], 1),
                    "tokens": sum(len(t.tokens) for t in check.trajectories),
                    "seconds": round(time.perf_counter() - begun - check.seconds, 3),
                    "parts": parts | {"update_actor": round(parts["update_actor"] - check.seconds, 3)},
                    "accept_length": round(metrics["rollout/spec_accept_length"], 3),
                    "rounds": metrics["rollout/rounds"],
                    "grad_norm": metrics["actor/grad_norm"],
                    "difference": check.difference,
                    "moved": check.moved,
                }
            )
            print(json.dumps(steps[-1]), flush=True)
    finally:
        loop.close()
    cuda = torch.cuda.is_available() and config.model.device != "cpu"
    return {
        "ready_s": round(ready, 1),
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "peak_gb": round(torch.cuda.max_memory_reserved() / 1e9, 1) if cuda else None,
        "steps": steps,
    }


class WeightCheck:
    """Around each update: the learner's log-probabilities of what the engine wrote, before it and after it."""

    def __init__(self, loop: Any, checked: int):
        self.loop = loop
        self.checked = checked
        self.update = loop.cluster.update
        self.trajectories: list[Any] = []
        self.difference: dict[str, float] = {}
        self.moved = 0.0
        self.seconds = 0.0
        loop.cluster.update = self

    def __call__(self, trajectories: list[Any], step: int) -> dict[str, float]:
        import torch

        self.trajectories = trajectories
        started = time.perf_counter()
        learner = self.loop.cluster.transport.worker.learning.learner
        some = trajectories[:: max(1, len(trajectories) // self.checked)]
        before = torch.cat(learner.logprobs(some)).double().cpu()
        engine = torch.tensor([x for t in some for x in t.logprobs], dtype=torch.float64)
        self.difference = spread(before - engine)
        seconds = time.perf_counter() - started
        metrics: dict[str, float] = self.update(trajectories, step)
        started = time.perf_counter()
        self.moved = float((torch.cat(learner.logprobs(some)).double().cpu() - before).abs().mean())
        self.seconds = seconds + time.perf_counter() - started
        return metrics


def spread(difference: Any) -> dict[str, float]:
    size = difference.abs()
    return {"mean": float(size.mean()), "p99": float(size.quantile(0.99)), "max": float(size.max())}


# What came out


def summarize(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Figures of times are medians of the steps after the first, which compiles and captures."""
    out: dict[str, Any] = {}
    for side, one in found.items():
        steps = one["steps"]
        later = steps[1:] or steps
        out[side] = {
            "rewards": [s["reward"] for s in steps],
            "mean_reward": round(fmean(s["reward"] for s in steps), 4),
            "difference_mean": max(s["difference"]["mean"] for s in steps),
            "weights_right": all(s["difference"]["mean"] < WITHIN for s in steps),
            "step_s": median(s["seconds"] for s in later),
            "gen_s": median(s["parts"]["gen"] for s in later),
            "update_s": median(s["parts"]["update_actor"] for s in later),
            "tok_s": round(median(s["tokens"] / s["parts"]["gen"] for s in later), 1),
            "accept_length": round(fmean(s["accept_length"] for s in later), 3),
            "ready_s": one["ready_s"],
            "peak_gb": one["peak_gb"],
        }
    return out


def print_sides(found: dict[str, dict[str, Any]], summary: dict[str, Any]) -> None:
    for side, one in found.items():
        print(f"{side} on {one['device']}, ready after {one['ready_s']} s")
        for number, s in enumerate(one["steps"], 1):
            parts = " + ".join(f"{name} {seconds:.2f}" for name, seconds in s["parts"].items() if seconds >= 0.005)
            d = s["difference"]
            print(
                f"  step {number}: reward {s['reward']:.3f}, length {s['length']:.0f}, {s['seconds']:.2f} s = {parts}; "
                f"accept {s['accept_length']:.2f}; difference mean {d['mean']:.2e} p99 {d['p99']:.2e} "
                f"max {d['max']:.2e}, moved {s['moved']:.2e}"
            )
    for side, s in summary.items():
        print(
            f"{side:<11} mean reward {s['mean_reward']:.3f}, {s['step_s']:.2f} s per step, {s['tok_s']:.0f} tokens/s, "
            f"weights {'right' if s['weights_right'] else 'WRONG'} (mean difference at most {s['difference_mean']:.1e})"
        )


if __name__ == "__main__":
    main()
