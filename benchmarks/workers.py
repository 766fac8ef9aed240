"""Several workers, and what becomes of the time in which they would wait: idle share, drafter, seconds per step.

    python benchmarks/workers.py --workers 4 --mps --model MODEL        # four on one GPU, a quarter of it each
    python benchmarks/workers.py --workers 2                            # two on the cores of a CPU

Arms, one after the other from the same start: plain decoding; a warm drafter that stays as it is; the same one trained
by workers that have run dry; and a new one trained so. Where no drafter lies beside the model, only the first and the
last. Everything is read from the run directories. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

from paceline.draft.eagle.files import find_drafter
from paceline.observe.metrics import read_lines
from paceline.observe.timeline import IDLE, TRAIN, Span, read_timeline

ARMS = {
    "plain": ["speculation.mode=plain", "spot.when=off"],
    "frozen": ["speculation.drafter=auto", "spot.when=off"],
    "trained": ["speculation.drafter=auto", "spot.when=tail", "spot.max_interval=1"],
    "from nothing": ["speculation.drafter=new", "spot.when=tail", "spot.max_interval=1"],
}


def main() -> None:
    args = parse()
    daemon = start_mps(args.workers) if args.mps else None
    arms = list(ARMS) if find_drafter("auto", args.model) else ["plain", "from nothing"]
    results = {}
    try:
        for arm in args.arms or arms:
            results[arm] = run_arm(args, arm)
            print(line(arm, results[arm], results.get("plain")), flush=True)
    finally:
        if daemon:
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", env=daemon, check=False)
    for arm, r in results.items():
        print(f"{arm}: accept length by step: {' '.join(f'{a:.2f}' for a in r['accept_length'])}")
        print(f"{arm}: seconds of rollout by step: {' '.join(f'{s:.2f}' for s in r['rollout_s'])}")
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "model")}
    print(json.dumps({"settings": settings, "arms": results}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mps", action="store_true", help="all on one GPU, an equal part of it each")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=600, help="an arm that takes longer is ended")
    parser.add_argument("--arms", nargs="*", choices=list(ARMS))
    parser.add_argument("--set", nargs="*", default=[], help="settings as key=value")
    parser.add_argument("--out", type=Path, default=Path("runs/workers"))
    return parser.parse_args()


def start_mps(workers: int) -> dict[str, str]:
    """Have the GPU shared by processes that run side by side, each with its part of it."""
    os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // workers)
    for name in ("PIPE", "LOG"):
        os.environ.setdefault(f"CUDA_MPS_{name}_DIRECTORY", f"{tempfile.gettempdir()}/mps-{name.lower()}")
        Path(os.environ[f"CUDA_MPS_{name}_DIRECTORY"]).mkdir(exist_ok=True)
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    return dict(os.environ)


def run_arm(args: argparse.Namespace, arm: str) -> dict:
    folder = args.out / arm.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    words = [
        f"model.path={args.model}", f"steps={args.steps}", f"cluster.workers={args.workers}", f"run_dir={folder}",
        "checkpoint.every=0", "log.tensorboard=false", *ARMS[arm], *args.set,
    ]  # fmt: skip
    if args.mps:
        words.append(f"cluster.workers_per_gpu={args.workers}")
    started = time.perf_counter()
    try:
        command = [sys.executable, "-m", "paceline", "train", "default", *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=args.seconds)
        if done.returncode:
            log = folder / "workers.log"
            sys.exit(
                f"{arm} failed:\n{done.stdout.decode()[-3000:]}\n{log.read_text()[-3000:] if log.exists() else ''}"
            )
    except subprocess.TimeoutExpired:
        print(f"{arm}: ended after {args.seconds:.0f} s")
    return measure(folder, args.workers) | {"whole_s": round(time.perf_counter() - started, 1)}


def measure(folder: Path, workers: int) -> dict:
    rows = read_lines(folder / "metrics.jsonl")
    spans = [s for s in read_timeline(folder / "timeline.json") if s.step <= len(rows)]
    later = rows[len(rows) // 3 :]  # graphs are captured and strategies tried in the first steps
    first = later[0]["step"]
    rollout = sum(r["timing_s/gen"] for r in later)
    idle, training = ([s for s in spans if s.name == name and s.step >= first] for name in (IDLE, TRAIN))
    share = lambda some: sum(s.seconds for s in some) / (workers * rollout)  # noqa: E731
    return {
        "steps": len(rows),
        "step_s": round(median(r["timing_s/step"] for r in later), 3),
        "median_rollout_s": round(median(r["timing_s/gen"] for r in later), 3),
        "tokens": int(mean(r["response_length/mean"] for r in later)),
        "idle_share": round(share(idle), 4),
        "training_share": round(share(training), 4),
        "longest_idle_ms": round(1e3 * longest(idle), 1),
        "accept_length": [round(r["rollout/spec_accept_length"], 2) for r in rows],
        "rollout_s": [round(r["timing_s/gen"], 3) for r in rows],
        "reward": [round(r["critic/rewards/mean"], 3) for r in rows],
        "versions": rows[-1].get("drafter/version", 0),
        "other_s": {
            name.removeprefix("timing_s/"): round(median(r.get(name, 0.0) for r in later), 3)
            for name in ("timing_s/reward", "timing_s/end_rollout", "timing_s/update_actor", "timing_s/merge_drafter")
        },
        "drafter_steps": sum(r.get("drafter/steps", 0) for r in rows),
    }


def longest(spans: list[Span]) -> float:
    return max((s.seconds for s in spans), default=0.0)


def line(arm: str, r: dict, plain: dict | None) -> str:
    faster = f" ({plain['step_s'] / r['step_s']:.2f} times as fast as plain)" if plain else ""
    return (
        f"{arm:<13} step {r['step_s']:.2f} s{faster}, rollout {r['median_rollout_s']:.2f} s  "
        f"idle {r['idle_share']:.1%} (longest {r['longest_idle_ms']:.0f} ms)  training {r['training_share']:.1%}  "
        f"accept length {r['accept_length'][0]:.2f} to {r['accept_length'][-1]:.2f}"
    )


if __name__ == "__main__":
    main()
