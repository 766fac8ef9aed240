"""Answer prompts greedily with vLLM and Paceline's scheduler, or without it. Runs in an environment of its own (`make
test-vllm`), with the package on its path:

python serve_tuned.py JOB.json
    {model, drafter or null, prompts, max_tokens by prompt, stop, slots, out, depth; tuner: the tuner's settings, or
    null for vLLM alone; table: depths by batch size or null; overlap: asynchronous scheduling; knee: tokens of a pass
    beyond which it costs ever more, by a virtual clock, or null for a real one}
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import Counter
from typing import Any, ClassVar

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler's counts are read from this process

from vllm import LLM, SamplingParams

from paceline.integrations.vllm import TunedScheduler, drafter_changed, tuner_state

FLOOR_S = 0.01
DRAFT_S = 0.0006


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


HEARD = Heard()


class CountingScheduler(TunedScheduler):
    """Counts steps by batch and depth; its clock goes on by what a step would cost on a machine with a `knee`."""

    knee: int | None = None
    now = 0.0
    steps: ClassVar[Counter[tuple[int, int]]] = Counter()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        logging.getLogger("vllm.paceline").addHandler(HEARD)  # vLLM has set up its logging by now
        super().__init__(*args, **kwargs)

    def clock(self) -> float:
        return self.now if self.knee else TunedScheduler.clock()

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        batch = len(scheduler_output.num_scheduled_tokens)
        if batch:
            drafts = scheduler_output.scheduled_spec_decode_tokens.values()
            self.steps[batch, max(map(len, drafts), default=0)] += 1
            rows = scheduler_output.total_num_scheduled_tokens
            passes = max(1, scheduler_output.num_spec_tokens_to_schedule)  # the first one reads what was verified
            CountingScheduler.now += FLOOR_S * max(1.0, rows / (self.knee or rows)) ** 1.5 + DRAFT_S * passes
        return super().update_from_output(scheduler_output, model_runner_output)


def main(job: dict) -> None:
    CountingScheduler.knee = job["knee"]
    drafter = {"method": "eagle3", "model": job["drafter"], "num_speculative_tokens": job["depth"]}
    if job["table"]:
        drafter["num_speculative_tokens_per_batch_size"] = job["table"]
    tuned = {"scheduler_cls": CountingScheduler, "additional_config": {"paceline": job["tuner"]}}
    llm = LLM(
        model=job["model"],
        dtype="float32",
        speculative_config=drafter if job["drafter"] else None,
        enforce_eager=True,  # compiling takes longer than the answers
        max_num_seqs=job["slots"],
        disable_log_stats=False,
        async_scheduling=job["overlap"],
        **(tuned if job["tuner"] is not None else {}),
    )
    sampling = [
        SamplingParams(temperature=0, max_tokens=most, stop_token_ids=job["stop"], ignore_eos=True, detokenize=False)
        for most in job["max_tokens"]
    ]
    done = llm.generate([{"prompt_token_ids": p} for p in job["prompts"]], sampling, use_tqdm=False)
    state = tuner_state(llm) if job["tuner"] is not None else None
    if state:
        drafter_changed(llm)
    llm.llm_engine.engine_core.shutdown()
    result = {
        "tokens": [list(answer.outputs[0].token_ids) for answer in done],
        "steps": [[*at, count] for at, count in sorted(CountingScheduler.steps.items())],
        "seconds": CountingScheduler.now,
        "state": state,
        "said": HEARD.lines,
    }
    with open(job["out"], "w") as out:
        json.dump(result, out)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        main(json.load(file))
