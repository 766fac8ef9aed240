"""vLLM and Paceline's tuner inside it, beside our own engine: full batches, and requests with a long tail.

    python benchmarks/vllm_side.py --model DEEP --out OUT
    python benchmarks/vllm_side.py --model DEEP --out OUT --sides vllm,vllm:5     # some of them; others later
    python benchmarks/vllm_side.py --model embedded --out OUT --vllm-python .venv-vllm/bin/python --batch 1,8 \\
        --prompts 4 --samples 4 --max-tokens 400 --tokens 64 --temperature 0 --eager      # on a CPU, for a look

On an H200 (DEEP and its drafter are what docs/grown-models.md makes; vLLM 0.26 stands beside torch 2.11):

    export VLLM_USE_FLASHINFER_SAMPLER=0
    python benchmarks/vllm_side.py --model DEEP --out OUT --together 3 --sides ours,adaptive,vllm,vllm:7,tuned
    python benchmarks/vllm_side.py --model DEEP --out OUT --together 3 --sides vllm:1,vllm:3,vllm:5
    python benchmarks/vllm_side.py --model DEEP --out OUT                         # all is there: the table and the JSON

Every side is a process of its own, and leaves OUT/side-SIDE.json; one that is there is not run again. With --together N
so many sides of vLLM start at the same time, each with --vllm-kv-gb for its KV cache, and are measured one after the
other. `ours` is our engine without speculation, `adaptive` with it; `vllm` is vLLM without
speculation, `vllm:K` with the exported drafter and static depth K, `tuned` with Paceline's scheduler, depths up to
--depth.

The work: for each of --batch so many requests at once with --tokens tokens each, made from the prompts with the longest
answers; then `tail`, --prompts problems with --samples answers each, as long as our engine's answers were. Lengths are
given, so everybody writes equally much. Each part is repeated; the first turn, in which a tuner learns and kernels
compile, is reported apart, and figures are medians of the others. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from one_at_a_time import alone, forget, wait_for_all

OURS = ("ours", "adaptive")
SOURCE = Path(__file__).parents[1] / "src"
START_S = 900  # that a side may take beside its turns
TURN_S = 300


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="with a drafter in its folder")
    parser.add_argument("--out", type=Path, help="folder for the drafter, the work and what each side took")
    parser.add_argument("--sides", help="some of ours, adaptive, vllm, vllm:K, tuned; all of them otherwise")
    parser.add_argument("--static", default="1,3,5,7", help="static depths")
    parser.add_argument("--depth", type=int, default=7, help="deepest draft of the tuner")
    parser.add_argument("--batch", default="1,8,32,128")
    parser.add_argument("--tokens", type=int, default=512, help="of each request of a full batch")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--difficulty", default="tail")
    parser.add_argument("--repeat", type=int, default=3, help="turns after the first one")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--eager", action="store_true", help="vLLM without compiling and without CUDA graphs")
    parser.add_argument("--vllm-python", default=sys.executable, help="a Python that has vLLM")
    parser.add_argument("--kv-gb", type=float, default=24.0, help="for the KV pages of our engine, on a GPU")
    parser.add_argument("--together", type=int, default=1, help="sides of vLLM that start at the same time")
    parser.add_argument("--vllm-kv-gb", type=float, default=8.0, help="for the KV cache of each of them")
    parser.add_argument("--group", default="", help=argparse.SUPPRESS)  # the sides that start with this one
    parser.add_argument("--serve", metavar="SIDE", help=argparse.SUPPRESS)
    words = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(words)
    args.words = words  # for the processes of the sides
    if args.out is None:
        parser.error("--out is missing: a folder for what each side took")
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    if args.serve:
        serve(args)
        return {}
    args.out.mkdir(parents=True, exist_ok=True)
    card = prepare(args)
    print_card(card)
    statics = [f"vllm:{depth}" for depth in args.static.split(",") if depth]
    every = ["ours", "adaptive", "vllm", *statics, "tuned"]
    missing = [side for side in (args.sides.split(",") if args.sides else every) if not file_of(args, side).exists()]
    for group in groups(missing, args.together):
        run_sides(args, group)
    found = {side: json.loads(file_of(args, side).read_text()) for side in every if file_of(args, side).exists()}
    rows = make_rows(found)
    print_rows(rows, card)
    result = {
        "card": card,
        "rows": rows,
        "ratios": make_ratios(rows),
        "starts": {s: f["start_s"] for s, f in found.items()},
    }
    for name, ratio in result["ratios"].items():
        print(f"{name:<44} " + "  ".join(f"{part} {value:.3f}" for part, value in ratio.items()))
    print(json.dumps(result))
    return result


# What everybody is given


def prepare(args: argparse.Namespace) -> dict[str, Any]:
    """Export the drafter, make the requests, and say what a step costs at least."""
    import torch

    from limits import copy_bandwidth, weights_per_token
    from paceline.integrations.export import export_drafter
    from paceline.model import load_model
    from paceline.setup.device import choose_device

    if (args.out / "card.json").exists():
        return json.loads((args.out / "card.json").read_text())
    device = choose_device("auto")
    if not (args.out / "drafter").exists():
        export_drafter(args.model, args.out / "drafter", depth=args.depth)
    bandwidth = copy_bandwidth(device)
    model = load_model(args.model, device=device)
    size = model.embed.weight.element_size()
    c = model.config
    card = {
        "model": args.model,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "weight_bytes": weights_per_token(model) * size,
        "kv_bytes_per_token": 2 * c.layers * c.kv_heads * c.head_dim * size,
        "bytes_per_s": bandwidth,
    }
    work = make_work(args, model, device)
    card |= {"requests": len(work["tail"]["prompts"]), "tokens": sum(work["tail"]["lengths"])}
    card |= {"longest": max(work["tail"]["lengths"])}
    (args.out / "work.json").write_text(json.dumps(work))
    (args.out / "card.json").write_text(json.dumps(card))
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return card


def make_work(args: argparse.Namespace, model: Any, device: Any) -> dict[str, dict[str, list]]:
    """By part: prompts and lengths."""
    from paceline.core import Request, SamplingParams
    from paceline.model.tokenizer import load_tokenizer
    from paceline.tasks.countdown import Countdown

    tokenizer, task = load_tokenizer(args.model), Countdown(args.difficulty, "search", seed=1)
    each = [list(tokenizer.encode_prompt(task.sample(i).prompt)) for i in range(args.prompts)]
    prompts = [prompt for prompt in each for _ in range(args.samples)]
    longest = min(model.config.max_positions, max(map(len, prompts)) + args.max_tokens)
    engine = make_ours(args, model, device, len(prompts), longest, [])
    sampling = SamplingParams(args.temperature, max_tokens=args.max_tokens, stop_token_ids=tokenizer.eos_ids)
    done = engine.run([Request(i, tuple(p), sampling) for i, p in enumerate(prompts)])
    lengths = [n for _, n in sorted((c.request.id, len(c.tokens)) for c in done)]
    work = {}
    hard = [prompts[i] for i in sorted(range(len(prompts)), key=lambda i: -lengths[i])[:8]]
    for batch in map(int, args.batch.split(",")):
        work[str(batch)] = {"prompts": [hard[i % len(hard)] for i in range(batch)], "lengths": [args.tokens] * batch}
    return work | {"tail": {"prompts": prompts, "lengths": lengths}}


def print_card(card: dict[str, Any]) -> None:
    floor = card["weight_bytes"] / card["bytes_per_s"]
    print(
        f"{card['model']} on {card['device']}: {card['weight_bytes'] / 1e9:.2f} GB of weights per step at "
        f"{card['bytes_per_s'] / 1e12:.2f} TB/s of a copy: a step takes at least {1e3 * floor:.2f} ms, and "
        f"{1e9 * card['kv_bytes_per_token'] / card['bytes_per_s']:.1f} ns more per token of context\n"
        f"tail: {card['requests']} requests, {card['tokens']:,} tokens, longest {card['longest']}",
        flush=True,
    )


# One side


def file_of(args: argparse.Namespace, side: str) -> Path:
    return Path(args.out) / f"side-{side.replace(':', '-')}.json"


def groups(sides: list[str], together: int) -> list[list[str]]:
    """Our own engine starts fast and wants the card for itself."""
    own = [[side] for side in sides if side in OURS]
    others = [side for side in sides if side not in OURS]
    return own + [others[i : i + together] for i in range(0, len(others), together)]


def run_sides(args: argparse.Namespace, sides: list[str]) -> None:
    path = os.pathsep.join(filter(None, [str(plugin_folder(args)), str(SOURCE), os.environ.get("PYTHONPATH")]))
    limit = START_S + TURN_S * (1 + args.repeat) * len(sides)
    started = time.perf_counter()
    forget(args.out, sides)
    failed = []
    running: dict[str, subprocess.Popen[bytes]] = {}
    for side in sides:
        python = sys.executable if side in OURS else args.vllm_python
        command = [python, __file__, *args.words, "--serve", side, "--group", ",".join(sides)]
        log = file_of(args, side).with_suffix(".log").open("w")
        running[side] = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": path})
    try:
        for side, process in running.items():
            if process.wait(timeout=limit - (time.perf_counter() - started)):
                failed.append(side)
    finally:
        for process in running.values():
            process.kill()
    print(f"{', '.join(sides)} took {time.perf_counter() - started:.0f} s", flush=True)
    if failed:
        raise SystemExit(
            "\n".join(f"{side} failed; {file_of(args, side).with_suffix('.log')} says why" for side in failed)
        )


def plugin_folder(args: argparse.Namespace) -> Path:
    """Metadata by which vLLM finds Paceline's plug-in, where the package is a source tree and not installed."""
    folder = Path(args.out).resolve() / "plugin"
    metadata = folder / "paceline_source-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: paceline-source\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\npaceline = paceline.integrations.vllm.plugin:register\n"
    )
    return folder


def serve(args: argparse.Namespace) -> None:
    work = json.loads((args.out / "work.json").read_text())
    started = time.perf_counter()
    group = args.group.split(",")
    try:
        side = Ours(args, work) if args.serve in OURS else Vllm(args, work)
    except BaseException:
        (args.out / f"{args.serve}.started").touch()  # the others need not wait
        raise
    start_s = round(time.perf_counter() - started, 1)
    wait_for_all(args.out, args.serve, group, START_S)
    with alone(args.out):
        found = {"start_s": start_s, "started_together": len(group)} | measure(args, side, work)
    file_of(args, args.serve).write_text(json.dumps(found))


def measure(args: argparse.Namespace, side: Ours | Vllm, work: dict[str, dict[str, list]]) -> dict[str, Any]:
    found: dict[str, Any] = {"parts": {}}
    for part, requests in work.items():
        turns = []
        for turn in range(1 + args.repeat):
            if turn == 1:
                before = side.counts()
            seconds = side.answer(requests["prompts"], requests["lengths"], args.temperature)
            turns.append(round(seconds, 4))
        found["parts"][part] = {
            "first_s": turns[0],
            "seconds": turns[1:],
            "tokens": sum(requests["lengths"]),
            "accept_length": accept_length(before, side.counts()),
        }
        print(part, found["parts"][part], flush=True)
    return found | {"tuner": side.tuner()}


def accept_length(before: tuple[float, float], after: tuple[float, float]) -> float | None:
    """From drafts and accepted draft tokens, the bonus token included."""
    drafts, accepted = after[0] - before[0], after[1] - before[1]
    return round(1 + accepted / drafts, 3) if drafts else None


def make_ours(args: argparse.Namespace, model: Any, device: Any, batch: int, longest: int, drafters: list[Any]) -> Any:
    from paceline.rollout import EngineSettings, RolloutEngine

    kv = int(args.kv_gb * 1e9) if device.type == "cuda" else None
    return RolloutEngine(model, EngineSettings(max_batch=batch, max_length=longest, kv_bytes=kv), None, drafters)


class Ours:
    """Our engine, without speculation or with it."""

    def __init__(self, args: argparse.Namespace, work: dict[str, dict[str, list]]):
        from paceline.draft.eagle.drafter import EagleDrafter
        from paceline.draft.eagle.files import find_drafter, load_drafter
        from paceline.draft.suffix.drafter import SuffixDrafter
        from paceline.model import load_model
        from paceline.setup.device import choose_device

        device = choose_device("auto")
        model = load_model(args.model, device=device)
        batch, longest = sizes(work)
        drafters: list[Any] = []
        if args.serve == "adaptive":
            folder = find_drafter("auto", args.model)
            if folder is None:
                raise SystemExit(f"{args.model} has no drafter in its folder")
            drafters = [SuffixDrafter(batch, longest), EagleDrafter(load_drafter(folder, model))]
        self.engine = make_ours(args, model, device, batch, longest, drafters)
        self.drafts = 0.0
        self.accepted = 0.0
        self.next = 0
        self.engine.record = self.count

    def count(self, round: Any) -> None:
        if round.strategy not in ("plain", "prefill"):
            self.drafts += round.batch
            self.accepted += round.tokens - round.batch

    def answer(self, prompts: list[list[int]], lengths: list[int], temperature: float) -> float:
        from paceline.core import Request, SamplingParams

        sampling = [SamplingParams(temperature, max_tokens=n, min_tokens=n) for n in lengths]
        ids = range(self.next, self.next + len(prompts))
        self.next += len(prompts)
        requests = [Request(i, tuple(p), s) for i, p, s in zip(ids, prompts, sampling, strict=True)]
        return timed(lambda: sum(len(c.tokens) for c in self.engine.run(requests)), sum(lengths))

    def counts(self) -> tuple[float, float]:
        return self.drafts, self.accepted

    def tuner(self) -> dict[str, Any] | None:
        return None


class Vllm:
    """vLLM alone, with static depths, or with Paceline's scheduler."""

    def __init__(self, args: argparse.Namespace, work: dict[str, dict[str, list]]):
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_CACHE_ROOT", str(args.out.resolve() / f"cache-{file_of(args, args.serve).stem}"))
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        import torch
        from vllm import LLM

        from paceline.integrations.vllm import paceline_options
        from paceline.model.checkpoint import find_model

        drafter = str(args.out.resolve() / "drafter")
        options: dict[str, Any] = {}
        if args.serve == "tuned":
            options = paceline_options(drafter, args.depth, log_s=10)
        elif args.serve != "vllm":
            depth = int(args.serve.partition(":")[2])
            options = {"speculative_config": {"method": "eagle3", "model": drafter, "num_speculative_tokens": depth}}
        batch, longest = sizes(work)
        card = torch.cuda.is_available()
        self.llm = LLM(
            model=str(find_model(args.model)),
            dtype="bfloat16" if card else "float32",
            skip_tokenizer_init=True,
            max_model_len=longest,
            max_num_seqs=max(batch, 16),
            enforce_eager=args.eager,
            disable_log_stats=False,
            seed=0,
            **(self.memory(args) if card else {}),
            **options,
        )

    @staticmethod
    def memory(args: argparse.Namespace) -> dict[str, Any]:
        """What is free while others start is no measure, so the KV cache has a given size then."""
        if args.together == 1:
            return {"gpu_memory_utilization": 0.8}
        size = int(args.vllm_kv_gb * 1e9)
        return {"gpu_memory_utilization": round(0.9 / args.together, 3), "kv_cache_memory_bytes": size}

    def answer(self, prompts: list[list[int]], lengths: list[int], temperature: float) -> float:
        from vllm import SamplingParams

        sampling = [
            SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths
        ]
        asked = [{"prompt_token_ids": p} for p in prompts]

        def generate() -> int:
            done = self.llm.generate(asked, sampling, use_tqdm=False)
            return sum(len(answer.outputs[0].token_ids) for answer in done)

        return timed(generate, sum(lengths))

    def counts(self) -> tuple[float, float]:
        found = {m.name: m.value for m in self.llm.get_metrics() if hasattr(m, "value")}
        drafts, accepted = (found.get(f"vllm:spec_decode_num_{what}", 0) for what in ("drafts", "accepted_tokens"))
        return float(drafts), float(accepted)

    def tuner(self) -> dict[str, Any] | None:
        from paceline.integrations.vllm import tuner_state

        return tuner_state(self.llm)


def sizes(work: dict[str, dict[str, list]]) -> tuple[int, int]:
    """Most requests at once, and the longest with its prompt; drafts may reach a few tokens further."""
    batch = max(len(part["lengths"]) for part in work.values())
    each = (len(p) + n for part in work.values() for p, n in zip(part["prompts"], part["lengths"], strict=True))
    return batch, max(each) + 16


def timed(generate: Callable[[], int], tokens: int) -> float:
    started = time.perf_counter()
    written = generate()
    seconds = time.perf_counter() - started
    if written != tokens:
        raise SystemExit(f"{written} tokens were written where {tokens} were asked for")
    return seconds


# What came out


def make_rows(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for side, result in found.items():
        for part, taken in result["parts"].items():
            seconds = statistics.median(taken["seconds"])
            rows.append(
                {
                    "side": side,
                    "part": part,
                    "seconds": seconds,
                    "range": [min(taken["seconds"]), max(taken["seconds"])],
                    "first_s": taken["first_s"],
                    "tok_s": round(taken["tokens"] / seconds, 1),
                    "accept_length": taken["accept_length"],
                }
            )
    return rows


def make_ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By part, above 1 where the tuner is faster: against vLLM without speculation, the static depth that is best for
    that part, the one that is best over all parts, and our own engine."""
    seconds = {(row["side"], row["part"]): row["seconds"] for row in rows}
    parts = list(dict.fromkeys(row["part"] for row in rows))
    statics = list(dict.fromkeys(row["side"] for row in rows if row["side"].startswith("vllm:")))
    tuned = {part: seconds[("tuned", part)] for part in parts if ("tuned", part) in seconds}
    if not tuned:
        return {}
    others: dict[str, dict[str, float]] = {
        name: {part: seconds[(side, part)] for part in tuned if (side, part) in seconds}
        for name, side in (
            ("speculation off", "vllm"),
            ("our engine without speculation", "ours"),
            ("our engine, adaptive", "adaptive"),
        )
    }
    if statics:
        best = {part: min(seconds[(s, part)] for s in [*statics, "vllm"] if (s, part) in seconds) for part in tuned}
        others["the best depth in hindsight, off included"] = best
        for side in statics:
            others[f"depth {side.partition(':')[2]}"] = {part: seconds[(side, part)] for part in tuned}
    return {
        f"tuner, times as fast as {name}": {part: round(taken[part] / tuned[part], 4) for part in taken}
        for name, taken in others.items()
        if taken
    }


def print_rows(rows: list[dict[str, Any]], card: dict[str, Any]) -> None:
    plain = {row["part"]: row["tok_s"] for row in rows if row["side"] == "vllm"}
    print(f"{'side':<10} {'part':>5} {'seconds':>9} {'tokens/s':>10} {'of vLLM off':>11} {'accept':>7}  first turn")
    for row in rows:
        of_plain = f"{row['tok_s'] / plain[row['part']]:.2f}" if row["part"] in plain else "–"
        accept = f"{row['accept_length']:.2f}" if row["accept_length"] else "–"
        print(
            f"{row['side']:<10} {row['part']:>5} {row['seconds']:>9.3f} {row['tok_s']:>10,.0f} {of_plain:>11} "
            f"{accept:>7}  {row['first_s']:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
