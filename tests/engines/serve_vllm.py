"""Answer prompts with vLLM, greedily, with or without a drafter. Runs in an environment of its own (`make test-vllm`):

python serve_vllm.py JOB.json    {model, prompts, max_tokens, stop, out, depth, drafter or null, tokenizer}
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # counters are read from this process

from vllm import LLM, SamplingParams


def main(job: dict) -> None:
    drafter = {"method": "eagle3", "model": job["drafter"], "num_speculative_tokens": job["depth"]}
    llm = LLM(
        model=job["model"],
        dtype="float32",
        speculative_config=drafter if job["drafter"] else None,
        enforce_eager=True,  # compiling takes longer than the answers
        max_num_seqs=16,
        disable_log_stats=False,
        skip_tokenizer_init=not job["tokenizer"],
    )
    sampling = SamplingParams(
        temperature=0,
        max_tokens=job["max_tokens"],
        stop_token_ids=job["stop"],
        ignore_eos=True,  # the job says where answers end
        detokenize=job["tokenizer"],
    )
    done = llm.generate([{"prompt_token_ids": p} for p in job["prompts"]], sampling, use_tqdm=False)
    counts = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    drafts, accepted = (counts.get(f"vllm:spec_decode_num_{what}", 0) for what in ("drafts", "accepted_tokens"))
    result = {
        "tokens": [list(answer.outputs[0].token_ids) for answer in done],
        "accept_length": 1 + accepted / drafts if drafts else None,
    }
    with open(job["out"], "w") as out:
        json.dump(result, out)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        main(json.load(file))
