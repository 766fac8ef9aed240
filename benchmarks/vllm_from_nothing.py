"""vLLM from nothing: an untrained drafter that learns from the answers while rounds of requests are answered, against
vLLM without speculation, on the same requests.

    python benchmarks/vllm_from_nothing.py --model embedded --rounds 5 --requests 32 --max-tokens 400   # on a CPU
    python benchmarks/vllm_from_nothing.py --model MODEL --rounds 20 --requests 128 --temperature 1.0 \\
        --gap 5 --where process --together \\
        --llm '{"gpu_memory_utilization": 0.4, "kv_cache_memory_bytes": 16000000000}'                   # on a GPU

Between two rounds the engine is idle for `--gap` seconds, as it is while a learner updates its policy; the drafter is
trained in that time (`--where process`: by a process of its own, `here`: by the engine's). The gap is the same for both
engines and is not counted; whatever training takes beyond it is. Each engine runs in a process of its own; with
--together both start at the same time, and answer one after the other. The last line is JSON. vLLM on a CPU draws
wrongly above temperature 0 when it speculates: leave --temperature at 0 there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

from one_at_a_time import alone, wait_for_all
from paceline.integrations.export import export_policy
from paceline.model.checkpoint import EMBEDDED
from paceline.model.tokenizer import load_tokenizer
from paceline.tasks.countdown import Countdown

ENGINES = ("plain", "follow")
START_S = 900
ROUND_S = 300


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="a folder, or `embedded`")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=128, help="per round")
    parser.add_argument("--difficulty", default="medium", help="of the Countdown problems; `tail` has long ones")
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--gap", type=float, default=5.0, help="seconds between rounds in which the engine is idle")
    parser.add_argument("--where", default="here", choices=("here", "thread", "process"))
    parser.add_argument("--when", default="idle", choices=("idle", "tail", "always"))
    parser.add_argument("--share", type=float, default=0.0, help="of the busy time, for training (here and thread)")
    parser.add_argument("--device", default="auto", help="that the drafter is trained on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--llm", type=json.loads, default={}, help="more arguments of vLLM's LLM, as JSON")
    parser.add_argument("--together", action="store_true", help="start both engines at the same time")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--run", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def make_prompts(args: argparse.Namespace, model: Path) -> list[list[int]]:
    """Of all rounds, each a problem of its own."""
    tokenizer = load_tokenizer(str(model))
    task = Countdown(args.difficulty, "search", args.seed)
    return [list(tokenizer.encode_prompt(task.sample(i).prompt)) for i in range(args.rounds * args.requests)]


def start(args: argparse.Namespace, model: Path, speculation: dict[str, Any]) -> Any:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    from vllm import LLM
    from vllm.platforms import current_platform

    cpu = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 16} if current_platform.is_cpu() else {}
    return LLM(model=str(model), disable_log_stats=False, **cpu | speculation | args.llm)


def answer_rounds(args: argparse.Namespace, model: Path) -> list[dict[str, float]]:
    """One engine, in this process."""
    from vllm import SamplingParams

    follow = args.run == "follow"
    with tempfile.TemporaryDirectory(prefix="versions-") as folder:
        speculation = {}
        if follow:
            from paceline.integrations.vllm.cold_start import speculation as cold_start

            speculation = cold_start(model, folder, depth=args.depth, window=args.window)
        started = time.perf_counter()
        llm = start(args, model, speculation)
        print(f"{args.run}: started in {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        trainer = follow_engine(args, llm) if follow else None
        prompts = make_prompts(args, model)
        eos = list(load_tokenizer(str(model)).eos_ids)
        sampling = SamplingParams(
            temperature=args.temperature, max_tokens=args.max_tokens, stop_token_ids=eos, ignore_eos=True,
            detokenize=False, seed=args.seed if args.temperature else None,
        )  # fmt: skip
        llm.generate([{"prompt_token_ids": prompts[0]}], sampling, use_tqdm=False)  # what is slow the first time
        wait_for_all(args.result.parent, args.run, ENGINES if args.together else [args.run], START_S)
        rows = []
        with alone(args.result.parent):
            for i in range(args.rounds):
                some = [{"prompt_token_ids": p} for p in prompts[i * args.requests : (i + 1) * args.requests]]
                row = answer_round(llm, some, sampling)
                row |= idle(args, trainer)
                print(args.run, i + 1, row, file=sys.stderr, flush=True)
                rows.append(row)
        if trainer is not None:
            trainer.close()
        return rows


def follow_engine(args: argparse.Namespace, llm: Any) -> Any:
    from paceline.integrations.vllm.drafter_trainer import DrafterTrainer

    trainer = DrafterTrainer(
        llm, where=args.where, when=args.when, share=args.share, device=args.device, seed=args.seed
    ).attach()  # fmt: skip
    if args.where == "process":
        trainer.training.wait_until_following()
    return trainer


def answer_round(llm: Any, prompts: list[dict[str, Any]], sampling: Any) -> dict[str, float]:
    before = count_drafts(llm)
    started = time.perf_counter()
    done = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    drafts, accepted = (now - then for now, then in zip(count_drafts(llm), before, strict=True))
    tokens = sum(len(answer.outputs[0].token_ids) for answer in done)
    return {
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "accept_length": round(1 + accepted / drafts, 3) if drafts else 1.0,
    }


def count_drafts(llm: Any) -> tuple[float, float]:
    found = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    drafts, accepted = (found.get(f"vllm:spec_decode_num_{what}", 0) for what in ("drafts", "accepted_tokens"))
    return drafts, accepted


def idle(args: argparse.Namespace, trainer: Any) -> dict[str, float]:
    """The gap between two rounds, and the seconds that training took beyond it."""
    if trainer is None:
        return {}
    started = time.perf_counter()
    version = trainer.train(args.gap)
    return {"version": version, "overdrawn": round(max(0.0, time.perf_counter() - started - args.gap), 3)}


def start_engine(name: str, model: Path, folder: Path) -> subprocess.Popen[bytes]:
    """In a process of its own."""
    words = [*sys.argv[1:], "--model", str(model), "--run", name, "--result", str(folder / f"{name}.json")]
    return subprocess.Popen([sys.executable, __file__, *words], stdout=sys.stderr)


def run_engines(args: argparse.Namespace, model: Path, folder: Path) -> dict[str, list[dict[str, float]]]:
    for names in [ENGINES] if args.together else [(name,) for name in ENGINES]:
        running = [start_engine(name, model, folder) for name in names]
        try:
            if any(process.wait(START_S + args.rounds * ROUND_S) for process in running):
                raise SystemExit(f"{' and '.join(names)}: an engine failed; the lines above say why")
        finally:
            for process in running:
                process.kill()
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ENGINES}


def main() -> None:
    args = parse()
    if args.run:
        args.result.write_text(json.dumps(answer_rounds(args, Path(args.model))))
        return
    with tempfile.TemporaryDirectory(prefix="from-nothing-") as folder:
        model = Path(args.model)
        if args.model in ("embedded", str(EMBEDDED)):
            model = Path(folder) / "policy"
            export_policy("embedded", model)
        found = run_engines(args, model, Path(folder))
    report(args, found["plain"], found["follow"])


def report(args: argparse.Namespace, plain: list[dict[str, float]], follow: list[dict[str, float]]) -> None:
    plain_s = list(accumulate(row["seconds"] for row in plain))
    follow_s = list(accumulate(row["seconds"] + row["overdrawn"] for row in follow))
    print(f"{'round':>5} {'accept length':>13} {'seconds':>8} {'plain':>8} {'total':>8} {'plain':>8}")
    for i, (mine, theirs) in enumerate(zip(follow, plain, strict=True)):
        seconds = f"{mine['seconds']:8.2f} {theirs['seconds']:8.2f} {follow_s[i]:8.2f} {plain_s[i]:8.2f}"
        print(f"{i + 1:5} {mine['accept_length']:13.2f} {seconds}")
    ahead = [i + 1 for i in range(len(plain)) if all(f < p for f, p in zip(follow_s[i:], plain_s[i:], strict=True))]
    result = {
        "model": args.model,
        "requests": args.requests,
        "gap": args.gap,
        "where": args.where,
        "ahead_from_round": ahead[0] if ahead else None,
        "speed_up": round(plain_s[-1] / follow_s[-1], 3),
        "plain": plain,
        "follow": follow,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
