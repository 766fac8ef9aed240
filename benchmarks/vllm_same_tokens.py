"""vLLM with Paceline's race: whether speculation changes tokens, and why where it does.

    python benchmarks/vllm_same_tokens.py --model DEEP --out OUT
    python benchmarks/vllm_same_tokens.py --model DEEP --out OUT --invariant      # and with VLLM_BATCH_INVARIANT=1
    python benchmarks/vllm_same_tokens.py --model embedded --out OUT --vllm-python .venv-vllm/bin/python --prompts 4 \\
        --samples 2 --max-tokens 64 --law 0 --eager      # on a CPU, for a look

On an H200 (DEEP and its drafter are what docs/grown-models.md makes; vLLM 0.26 stands beside torch 2.11) it takes about
five minutes, and about nine with --invariant.

The same requests, --prompts problems with --samples answers each and a seed for each answer, at each of --sampling,
are answered by two engines, each a process of its own: `plain` has no drafter, and `drafting` has Paceline's scheduler,
which is told to draft 3, 5 and 7 tokens (--depths) and then left to itself (`tuned`). OUT/same-ENGINE.json has the
answers; what is there is not run again, also after an engine that was broken off.

Where an answer differs from the plain one, our decoder computes the logits at the first difference once more, in the
model's precision and in a wider one, and the scores of the race from them. It is a near-tie if the two scores are
closer than rounding can move two scores, and a `boundary` if top-p cuts so close to one of the two tokens. Others have
no explanation. At most --explain differences are looked at for each depth and sampling.

The law: --law requests with seeds of their own write some tokens to the first prompt at each of --law-temperatures, in
the plain engine with other seeds than in the drafting one at its greatest depth. At each position a chi-square test
compares the two. The first position is left out, because nothing is drafted there. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from homogeneity import homogeneity
from race_margins import Sampling, margin_first, margin_second, why
from vllm_side import SOURCE, accept_length, plugin_folder

LAW_TOKENS = 9  # written by each request of the law
OTHER_SEEDS = 1 << 32  # between the seeds of the plain engine's law and the others
PLAIN = "plain"
DRAFTING = "drafting"
INVARIANT = "-invariant"
OFF = "off"
TUNED = "tuned"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="with a drafter in its folder")
    parser.add_argument("--out", type=Path, help="folder for the drafter and the answers; that of vllm_side.py will do")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=384)
    parser.add_argument("--difficulty", default="medium")
    parser.add_argument("--sampling", default="1.0,0.6:0.95", help="temperatures, with top-p behind a colon")
    parser.add_argument("--depths", default="3,5,7")
    parser.add_argument("--law", type=int, default=5120, help="requests of the law; 0 leaves it out")
    parser.add_argument("--law-temperatures", default="1.0,2.0")
    parser.add_argument("--explain", type=int, default=24)
    parser.add_argument("--invariant", action="store_true", help="also with VLLM_BATCH_INVARIANT=1")
    parser.add_argument(
        "--draft-sampling", default="greedy", choices=["greedy", "probabilistic"], help="of the drafter"
    )
    parser.add_argument("--batch", type=int, default=256, help="requests at once")
    parser.add_argument("--eager", action="store_true", help="vLLM without compiling and without CUDA graphs")
    parser.add_argument("--together", action="store_true", help="all engines at the same time: nothing is timed here")
    parser.add_argument("--vllm-kv-gb", type=float, default=8.0, help="for the KV cache of each of them")
    parser.add_argument("--vllm-python", default=sys.executable, help="a Python that has vLLM")
    parser.add_argument("--limit", type=float, default=600, help="seconds that an engine may take")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    words = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(words)
    args.words = words  # for the processes of the engines
    if args.out is None:
        parser.error("--out is missing: a folder for the drafter and the answers")
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    if args.serve:
        serve(args)
        return {}
    args.out.mkdir(parents=True, exist_ok=True)
    prepare(args)
    engines = [PLAIN, DRAFTING, *([PLAIN + INVARIANT, DRAFTING + INVARIANT] if args.invariant else [])]
    with ThreadPoolExecutor(len(engines) if args.together else 1) as pool:
        done = list(pool.map(lambda name: run_process(args, name), engines))
    failed = [name for name, ok in zip(engines, done, strict=True) if not ok]
    if not run_process(args, "explanations"):
        failed.append("explanations")
    result = summarize(args) | {"failed": failed}
    print_result(result)
    print(json.dumps(result))
    return result


def prepare(args: argparse.Namespace) -> None:
    """The drafter in vLLM's form, and the requests."""
    from paceline.integrations.export import export_drafter
    from paceline.model.tokenizer import load_tokenizer
    from paceline.tasks.countdown import Countdown

    if not (args.out / "drafter").exists():
        export_drafter(args.model, args.out / "drafter", depth=max(depths_of(args)))
    tokenizer = load_tokenizer(args.model)
    task = Countdown(args.difficulty, "search", seed=1)
    prompts = [list(tokenizer.encode_prompt(task.sample(i).prompt)) for i in range(args.prompts)]
    work = {"prompts": [p for p in prompts for _ in range(args.samples)], "stop": list(tokenizer.eos_ids)}
    file = args.out / "same-work.json"
    text = json.dumps(work)
    if file.exists() and file.read_text() != text:
        raise SystemExit(f"{args.out} has answers to other requests: name another folder with --out, or empty it")
    file.write_text(text)


def depths_of(args: argparse.Namespace) -> list[int]:
    return [int(depth) for depth in args.depths.split(",")]


def samplings_of(args: argparse.Namespace) -> list[Sampling]:
    found = []
    for one in args.sampling.split(","):
        temperature, _, top_p = one.partition(":")
        found.append(Sampling(float(temperature), float(top_p or 1)))
    return found


def settings_of(args: argparse.Namespace, engine: str) -> list[str]:
    """What an engine is told to do, one after the other."""
    return [OFF] if engine.startswith(PLAIN) else [*map(str, depths_of(args)), TUNED]


def file_of(args: argparse.Namespace, name: str) -> Path:
    return Path(args.out) / f"same-{name}.json"


def read(args: argparse.Namespace, name: str) -> dict[str, Any]:
    file = file_of(args, name)
    return json.loads(file.read_text()) if file.exists() else {}


def run_process(args: argparse.Namespace, name: str) -> bool:
    """Whether it has all it should; one that fails leaves the others alone."""
    command = [args.vllm_python, __file__, *args.words, "--serve", name]
    path = os.pathsep.join(filter(None, [str(plugin_folder(args)), str(SOURCE), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}
    if name.endswith(INVARIANT):
        environment["VLLM_BATCH_INVARIANT"] = "1"
    started = time.perf_counter()
    log = args.out / f"same-{name}.log"
    with log.open("w") as out:
        try:
            code = subprocess.run(
                command, stdout=out, stderr=out, env=environment, timeout=args.limit, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"was still at it after {args.limit:.0f} s"
    print(f"{name} took {time.perf_counter() - started:.0f} s" + (f", and failed ({code}): see {log}" if code else ""))
    sys.stdout.flush()
    return not code


def serve(args: argparse.Namespace) -> None:
    if args.serve == "explanations":
        explain(args)
        return
    found = read(args, args.serve)
    missing = [(setting, part) for setting in settings_of(args, args.serve) for part in parts_of(args, setting)]
    missing = [(setting, part) for setting, part in missing if part not in found.get(setting, {})]
    if not missing:
        return
    started = time.perf_counter()
    engine = Engine(args, drafting=args.serve.startswith(DRAFTING))
    found["start_s"] = round(time.perf_counter() - started, 1)
    found["runner"] = engine.runner
    for setting, part in missing:
        engine.draft(setting)
        found.setdefault(setting, {})[part] = engine.answer(part)
        print(setting, part, {k: v for k, v in found[setting][part].items() if k != "tokens"}, flush=True)
        file_of(args, args.serve).write_text(json.dumps(found))


# One engine


def parts_of(args: argparse.Namespace, setting: str) -> list[str]:
    """The law is compared at the greatest depth, which verifies most."""
    has_law = args.law > 0 and setting in (OFF, str(max(depths_of(args))))
    laws = [f"law {t}" for t in args.law_temperatures.split(",")] if has_law else []
    return [*(s.name for s in samplings_of(args)), *laws]


class Engine:
    """vLLM in this process, by race."""

    def __init__(self, args: argparse.Namespace, drafting: bool):
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_CACHE_ROOT", str(args.out.resolve() / "vllm-cache"))
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its scheduler is told what to do from here
        import torch
        from vllm import LLM

        from paceline.integrations.vllm import paceline_options
        from paceline.integrations.vllm.same_tokens import racing_runners
        from paceline.integrations.vllm.scheduler import TunedScheduler
        from paceline.model.checkpoint import find_model

        class ToldScheduler(TunedScheduler):
            """Drafts as many tokens as it is told; without that, as many as the tuner says."""

            depth: int | None = None

            def _update_after_schedule(self, scheduler_output: Any) -> None:
                if self.depth is not None and scheduler_output.num_scheduled_tokens:
                    scheduler_output.num_spec_tokens_to_schedule = self.depth
                    scheduler_output.paceline_depth = self.depth
                super()._update_after_schedule(scheduler_output)

        self.args = args
        self.drafting = drafting
        self.work = json.loads(file_of(args, "work").read_text())
        options: dict[str, Any] = {"additional_config": {"paceline": {"same_tokens": True}}}
        if drafting:
            depths = depths_of(args)
            drafter = str(args.out.resolve() / "drafter")
            options = paceline_options(drafter, max(depths), depths=sorted({0, *depths}), log_s=10, same_tokens=True)
            options["scheduler_cls"] = ToldScheduler
            if args.draft_sampling != "greedy":
                options["speculative_config"]["draft_sample_method"] = args.draft_sampling
        card = torch.cuda.is_available()
        longest = max(map(len, self.work["prompts"])) + args.max_tokens + 16
        self.llm = LLM(
            model=str(find_model(args.model)),
            dtype="bfloat16" if card else "float32",
            skip_tokenizer_init=True,
            max_model_len=longest,
            max_num_seqs=args.batch,
            enforce_eager=args.eager,
            disable_log_stats=False,
            seed=0,
            **(self.memory(args) if card else {}),
            **options,
        )
        if not racing_runners():
            raise SystemExit("vLLM does not sample by race here; the log says why")
        self.runner = "second" if self.llm.llm_engine.vllm_config.use_v2_model_runner else "first"
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.tuning = getattr(self.scheduler, "paceline", None)

    @staticmethod
    def memory(args: argparse.Namespace) -> dict[str, Any]:
        """What is free while others start is no measure, so the KV cache has a given size then."""
        if not args.together:
            return {"gpu_memory_utilization": 0.8}
        engines = 4 if args.invariant else 2
        return {"gpu_memory_utilization": 0.8 / engines, "kv_cache_memory_bytes": int(args.vllm_kv_gb * 1e9)}

    def draft(self, setting: str) -> None:
        """Between two calls, when nothing runs."""
        if self.drafting:
            self.scheduler.depth = None if setting == TUNED else int(setting)
            self.scheduler.paceline = self.tuning if setting == TUNED else None

    def answer(self, part: str) -> dict[str, Any]:
        from vllm import SamplingParams

        prompts, count, stop = self.work["prompts"], self.args.max_tokens, self.work["stop"]
        if part.startswith("law "):
            first = OTHER_SEEDS if not self.drafting else 0
            sampling = Sampling(float(part.removeprefix("law ")), 1.0)
            prompts = prompts[:1] * self.args.law
            count = LAW_TOKENS
            stop = []
        else:
            first = 0
            sampling = next(s for s in samplings_of(self.args) if s.name == part)
        given = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=count,
                stop_token_ids=stop,
                ignore_eos=True,
                detokenize=False,
                seed=first + i,
            )
            for i in range(len(prompts))
        ]
        before = self.counts()
        started = time.perf_counter()
        done = self.llm.generate([{"prompt_token_ids": p} for p in prompts], given, use_tqdm=False)
        return {
            "seconds": round(time.perf_counter() - started, 2),
            "accept_length": accept_length(before, self.counts()),
            "tokens": [list(answer.outputs[0].token_ids) for answer in done],
        }

    def counts(self) -> tuple[float, float]:
        found = {m.name: m.value for m in self.llm.get_metrics() if hasattr(m, "value")}
        drafts, accepted = (found.get(f"vllm:spec_decode_num_{what}", 0) for what in ("drafts", "accepted_tokens"))
        return float(drafts), float(accepted)


# Why answers differ


class Pair(NamedTuple):
    """A plain answer and another one to the same request."""

    engine: str
    setting: str
    part: str
    request: int


def differing(args: argparse.Namespace) -> dict[tuple[str, str, str], list[int]]:
    """Requests with another answer than the plain engine's, by engine, setting and sampling."""
    found = {}
    for engine in (DRAFTING, DRAFTING + INVARIANT):
        plain = read(args, engine.replace(DRAFTING, PLAIN)).get(OFF, {})
        answers = read(args, engine)
        for setting in settings_of(args, engine):
            for sampling in samplings_of(args):
                other = answers.get(setting, {}).get(sampling.name)
                if other is None or sampling.name not in plain:
                    continue
                pairs = zip(plain[sampling.name]["tokens"], other["tokens"], strict=True)
                found[engine, setting, sampling.name] = [i for i, (a, b) in enumerate(pairs) if a != b]
    return found


def explain(args: argparse.Namespace) -> None:
    known = {Pair(*d["pair"]): d for d in read(args, "explanations").get("differences", [])}
    pairs = [Pair(*key, i) for key, some in differing(args).items() for i in some[: args.explain]]
    missing = [pair for pair in pairs if pair not in known]
    if missing:
        from paceline.model import load_model
        from paceline.setup.device import choose_device

        device = choose_device("auto")
        model = load_model(args.model, "auto" if device.type == "cuda" else "float32", device)
        runner = read(args, DRAFTING)["runner"]
        margin = margin_second if runner == "second" else margin_first
        work = json.loads(file_of(args, "work").read_text())
        answers = {name: read(args, name) for name in {p.engine for p in missing} | plains(missing)}
        for pair in missing:
            plain = answers[pair.engine.replace(DRAFTING, PLAIN)][OFF][pair.part]["tokens"][pair.request]
            other = answers[pair.engine][pair.setting][pair.part]["tokens"][pair.request]
            sampling = next(s for s in samplings_of(args) if s.name == pair.part)
            prompt = work["prompts"][pair.request]
            known[pair] = {"pair": list(pair)} | why(model, prompt, plain, other, sampling, pair.request, margin)
    file_of(args, "explanations").write_text(json.dumps({"differences": [known[pair] for pair in pairs]}))


def plains(pairs: list[Pair]) -> set[str]:
    return {pair.engine.replace(DRAFTING, PLAIN) for pair in pairs}


# What came out


def summarize(args: argparse.Namespace) -> dict[str, Any]:
    requests = args.prompts * args.samples
    explanations = read(args, "explanations").get("differences", [])
    rows = []
    for (engine, setting, part), some in differing(args).items():
        kinds = Counter(d["kind"] for d in explanations if d["pair"][:3] == [engine, setting, part])
        answered = read(args, engine)[setting][part]
        rows.append(
            {
                "engine": engine,
                "depth": setting,
                "sampling": part,
                "identical": requests - len(some),
                "requests": requests,
                "tokens": sum(map(len, answered["tokens"])),
                "near_ties": kinds["near-tie"],
                "boundary": kinds["boundary"],
                "unexplained": kinds["unexplained"] + kinds["another end"],
                "not_looked_at": len(some) - kinds.total(),
                "accept_length": answered["accept_length"],
                "seconds": answered["seconds"],
            }
        )
    gaps = sorted(d["gap"] for d in explanations if d["kind"] == "near-tie")
    return {
        "model": args.model,
        "runner": read(args, DRAFTING).get("runner"),
        "rows": rows,
        "largest_gap_of_a_near_tie": gaps[-1] if gaps else None,
        "unexplained": [d for d in explanations if d["kind"] not in ("near-tie", "boundary")],
        "law": laws(args),
        "starts": {name: read(args, name).get("start_s") for name in (PLAIN, DRAFTING)},
    }


def laws(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Chi-square of the tokens at each position, between the plain engine and the drafting one."""
    plain, drafting = read(args, PLAIN).get(OFF, {}), read(args, DRAFTING)
    found = []
    for setting in settings_of(args, DRAFTING):
        for part in (part for part in parts_of(args, setting) if part.startswith("law ")):
            if part not in plain or part not in drafting.get(setting, {}):
                continue
            theirs, ours = plain[part]["tokens"], drafting[setting][part]["tokens"]
            tests = [homogeneity([t[i] for t in theirs], [t[i] for t in ours]) for i in range(1, LAW_TOKENS)]
            found.append(
                {
                    "depth": setting,
                    "temperature": float(part.removeprefix("law ")),
                    "draws": len(ours) * len(tests),
                    "p": [round(p, 5) for p, _ in tests],
                    "smallest_p_corrected": round(min(1.0, min(p for p, _ in tests) * len(tests)), 5),
                    "kinds_of_token": [kinds for _, kinds in tests],
                    "accept_length": drafting[setting][part]["accept_length"],
                }
            )
    return found


def print_result(result: dict[str, Any]) -> None:
    print(f"{result['model']}, vLLM's {result['runner']} model runner, by race")
    print(f"{'engine':<18} {'depth':>5} {'sampling':<17} {'identical':>11} near-tie boundary unexplained unseen accept")
    for row in result["rows"]:
        accept = f"{row['accept_length']:.2f}" if row["accept_length"] else "–"
        same = f"{row['identical']} of {row['requests']}"
        print(
            f"{row['engine']:<18} {row['depth']:>5} {row['sampling']:<17} {same:>11} {row['near_ties']:>8} "
            f"{row['boundary']:>8} {row['unexplained']:>11} {row['not_looked_at']:>6} {accept:>6}"
        )
    for law in result["law"]:
        kinds = max(law["kinds_of_token"])
        print(
            f"law at T={law['temperature']:g}, depth {law['depth']}: {law['draws']:,} draws, up to {kinds} kinds of "
            f"token, smallest p of {len(law['p'])} positions, corrected: {law['smallest_p_corrected']:.4f}"
        )


if __name__ == "__main__":
    main()
