"""Decoding beside busy processes: threads that spin while they wait for each other, and threads that wait passively.

    python benchmarks/waiting.py --busy 1 --seconds 20

Every way decodes the same prompts with the embedded model in a process of its own, beside so many processes that only
count. Floor: the same with one thread, which waits for nobody.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time

DECODE = """
import sys, time
import torch
torch.set_num_threads(int(sys.argv[1]))
from paceline import Engine
from paceline.tasks.countdown import Countdown
engine = Engine("embedded", drafter=None, max_batch=8, settings={"speculation.mode": "plain"})
task = Countdown("easy", "search", 1)
prompts = [task.sample(i).prompt for i in range(8)]
engine.generate(prompts, max_tokens=4)
tokens, started = 0, time.perf_counter()
while (seconds := time.perf_counter() - started) < float(sys.argv[2]):
    tokens += sum(len(a.tokens) for group in engine.generate(prompts, max_tokens=16, seed=tokens) for a in group)
print(tokens / seconds)
"""
BUSY = "while True: pass"
WAYS = {"one thread": (1, {}), "spinning": (2, {"OMP_WAIT_POLICY": ""}), "passive": (2, {"OMP_WAIT_POLICY": "PASSIVE"})}


def measure(threads: int, environment: dict[str, str], seconds: float, timeout: float) -> float:
    env = {**os.environ, **environment}
    if not env.get("OMP_WAIT_POLICY"):
        env.pop("OMP_WAIT_POLICY", None)
    command = [sys.executable, "-c", DECODE, str(threads), str(seconds)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=1, help="processes beside it that only count")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    print(
        f"{os.cpu_count()} cores, {platform.machine()}, load {load:.1f} before, {args.busy} busy processes beside",
        flush=True,
    )
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(args.busy)]
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    try:
        time.sleep(1.0)
        for _ in range(args.rounds):  # in turn, so that what else runs meets all of them
            for name, (threads, environment) in WAYS.items():
                rates[name].append(measure(threads, environment, args.seconds, 10 * args.seconds + 300))
                print(f"  {name}: {rates[name][-1]:,.0f} tokens/s", flush=True)
    finally:
        for process in busy:
            process.kill()
    for name, found in rates.items():
        print(f"{name:12} {max(found):8,.0f} tokens/s (all: {', '.join(f'{rate:,.0f}' for rate in found)})")
    print(json.dumps({"busy": args.busy, "load": round(load, 1), "tokens_s": rates}))


if __name__ == "__main__":
    main()
