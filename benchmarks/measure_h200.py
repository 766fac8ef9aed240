"""The 7B's figures of docs/grown-models.md, the rooflines of docs/kernels.md and LoRA steps, in one go on an H200.

    python benchmarks/measure_h200.py --out OUT                                # all parts, in order: over half an hour
    python benchmarks/measure_h200.py --out OUT --parts rl-step-7b,peers-7b    # some of them
    python benchmarks/measure_h200.py --list                                   # what each would run

Each part is a command of its own; what it prints goes to a file in OUT, with the command above it, as it is kept in
benchmarks/results/. The models are made once, under OUT. The flat recipe comes after the long-tailed one, because a
machine's first rollouts compile kernels, which is not what it is about. A part that fails does not keep the next ones
from running; the exit code says so in the end. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHALLOW, DEEP = "{out}/SHALLOW", "{out}/DEEP"


@dataclass(frozen=True)
class Part:
    name: str
    command: str
    """Of a shell, with OUT as {out}."""
    makes: str = ""
    """A folder; if it is there already, nothing is done."""


PARTS = [
    Part("roofline-7b", 'python benchmarks/roofline.py --geometry 7b --batch 1,8,32 --draft-batch 1,32 --window 512 '
         '--profile "" --capture 32'),
    Part("roofline-1.5b", 'python benchmarks/roofline.py --geometry 1.5b --batch 1,8,32 --draft-batch 1 --window 512 '
         '--profile "" --long 0'),
    Part("reasoner", f"python benchmarks/make_reasoner.py --preset 7b --minutes 4.1 --out {SHALLOW}", SHALLOW),
    Part("drafter", f"python -m paceline.cli draft train --model {SHALLOW} --out {SHALLOW}/drafter --minutes 3.2 "
         "--answers 4096 --window 256 --set task.difficulty=tail --set rollout.max_tokens=1984", f"{SHALLOW}/drafter"),
    Part("grown", f"python benchmarks/make_reasoner.py --grow 7b --trained {SHALLOW} --out {DEEP}", DEEP),
    Part("speculate-7b", f"python benchmarks/speculate.py --model {DEEP} --difficulty tail --batch 1,8,32 --tokens 192 "
         "--repeat 1 --pairs 3 --strategies neural:3,neural:5,neural:7,neural:10,neural:6x4/16,neural:8x4/24"),
    Part("rl-step-7b", f"python benchmarks/rl_step.py --model {DEEP} --steps 10 --max-tokens 4096 --micro-tokens 4224 "
         "--set learn.activation_checkpointing=false --set rollout.kv_memory_gb=5 --set speculation.graph_memory_gb=3 "
         "--set learn.warmup_steps=20"),
    Part("rl-step-7b-flat", f"python benchmarks/rl_step.py --model {DEEP} --steps 8 --flat 384 "
         "--set learn.warmup_steps=20"),
    Part("lora-step-7b", "python benchmarks/lora_step.py --geometry 7b --steps 3 --tokens 256 "
         "--keep-activations --micro-tokens 2048"),
    Part("peers-7b", f"python benchmarks/peers.py --model {DEEP} --max-tokens 4096 --cap 64"),
]  # fmt: skip


def chosen(words: str | None) -> list[Part]:
    """The parts of these names, in the order in which they are best run."""
    if words is None:
        return PARTS
    names, known = set(words.split(",")), [part.name for part in PARTS]
    if names - set(known):
        sys.exit(f"no part is called {', '.join(sorted(names - set(known)))}; there are {', '.join(known)}")
    return [part for part in PARTS if part.name in names]


def run(part: Part, out: Path, device: str) -> dict[str, object]:
    """Run it in the repository -> its exit code and seconds; what it printed is in OUT."""
    if part.makes and (ROOT / part.makes.format(out=out)).exists():
        return {"part": part.name, "rc": 0, "seconds": 0.0}
    command = part.command.format(out=shlex.quote(str(out)))
    started, file = time.perf_counter(), ROOT / out / f"{part.name}-h200.txt"
    with file.open("w", encoding="utf-8") as kept:
        kept.write(f"# {part.command.format(out=out)}   ({device})\n")
        kept.flush()
        this = command.replace("python ", f"{shlex.quote(sys.executable)} -u ")
        done = subprocess.run(this, shell=True, cwd=ROOT, stdout=kept, stderr=subprocess.STDOUT, check=False)
    file.write_text(file.read_text(encoding="utf-8").replace(f"{out}/", ""), encoding="utf-8")  # models by their names
    return {"part": part.name, "rc": done.returncode, "seconds": round(time.perf_counter() - started, 1)}


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/h200"), help="a folder, seen from the repository")
    parser.add_argument("--parts", help="names with commas between them")
    parser.add_argument("--list", action="store_true", help="show the commands, run none")
    args = parser.parse_args(argv)
    parts = chosen(args.parts)
    if args.list:
        for part in parts:
            print(f"{part.name:<16} {part.command.replace('{out}', str(args.out))}")
        return
    (ROOT / args.out).mkdir(parents=True, exist_ok=True)
    device, results = device_name(), []
    for part in parts:
        results.append(run(part, args.out, device))
        print("{part:<16} exit {rc:>3}  {seconds:>6} s".format(**results[-1]), flush=True)
    print(json.dumps({"device": device, "out": str(args.out), "parts": results}))
    if any(r["rc"] for r in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
