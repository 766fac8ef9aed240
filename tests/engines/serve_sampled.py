"""Sample answers with vLLM, by race or as vLLM does, and with the speculation that a job names. Runs in an environment
of its own (`make test-vllm`), with the package on its path:

python serve_sampled.py JOB.json
    {model, drafter, out, slots; speculation: 0, a depth, or "tuned"; raced; parts: by name {prompts, seeds or null,
    temperature, top_p, max_tokens, and what else SamplingParams takes}}
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # counters are read from this process

from vllm import LLM, SamplingParams

from paceline.integrations.vllm import paceline_options, tuner_state
from paceline.integrations.vllm.same_tokens import racing_runners


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def options_of(job: dict) -> dict[str, Any]:
    raced = {"same_tokens": True} if job["raced"] else {}
    if job["speculation"] == "tuned":
        return paceline_options(job["drafter"], depth=7, **raced)
    options: dict[str, Any] = {"additional_config": {"paceline": raced}}
    if job["speculation"]:
        options["speculative_config"] = {
            "method": "eagle3", "model": job["drafter"], "num_speculative_tokens": job["speculation"]
        }  # fmt: skip
    return options


def main(job: dict) -> None:
    heard = Heard()
    logging.getLogger("vllm.paceline").addHandler(heard)
    llm = LLM(
        model=job["model"],
        dtype="float32",
        enforce_eager=True,  # compiling takes longer than the answers
        max_num_seqs=job["slots"],
        disable_log_stats=False,
        skip_tokenizer_init=True,
        seed=job.get("seed", 0),
        **options_of(job),
    )
    answers = {}
    for name, part in job["parts"].items():
        prompts = part.pop("prompts")
        seeds = part.pop("seeds") or [None] * len(prompts)
        sampling = [SamplingParams(seed=seed, detokenize=False, **part) for seed in seeds]
        done = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        answers[name] = [list(answer.outputs[0].token_ids) for answer in done]
    counts = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    drafts, accepted = (counts.get(f"vllm:spec_decode_num_{what}", 0) for what in ("drafts", "accepted_tokens"))
    result = {
        "tokens": answers,
        "accept_length": 1 + accepted / drafts if drafts else None,
        "state": tuner_state(llm) if job["speculation"] == "tuned" else None,
        "said": heard.lines,
        "racing": sorted(racing_runners()),
    }
    with open(job["out"], "w") as out:
        json.dump(result, out)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        main(json.load(file))
