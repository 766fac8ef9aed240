"""One vLLM engine whose drafter begins untrained, learns, is exchanged, and loses its trainer. Runs in an environment
of its own (`make test-vllm`):

python drive_drafter.py JOB.json    {policy, good, worse, other, prompts, more, max_tokens, eos, folder, out, depth}

Everything that it saw goes to `out`; the tests are about that.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

from vllm import LLM, SamplingParams

from paceline.errors import RunError, UserError
from paceline.integrations.vllm.cold_start import speculation
from paceline.integrations.vllm.drafter_trainer import DrafterTrainer

ENOUGH = 3.3  # accept length at which the cold start has succeeded
BETTER = 0.6  # accept length by which a version is to be better on held-out answers before the next round
DEADLINE_S = 900.0  # for all rounds
SETTINGS = {"merge_share": 0.1, "buffer_mb": 64, "step_ms": 150}  # of a CPU that others use too


class Driver:
    def __init__(self, job: dict[str, Any]):
        self.job = job
        self.said: list[str] = []
        self.seen: dict[str, Any] = {}
        job["folder"] = Path(job["folder"])
        arguments = speculation(job["policy"], job["folder"], depth=job["depth"], dtype="float32")
        self.llm = LLM(
            model=job["policy"],
            dtype="float32",
            enforce_eager=True,  # compiling takes longer than the answers
            max_num_seqs=16,
            disable_log_stats=False,
            **arguments | {"worker_extension_cls": "faulty_worker.FaultyWorker"},
        )
        self.sampling = SamplingParams(
            temperature=0, max_tokens=job["max_tokens"], stop_token_ids=[job["eos"]], ignore_eos=True
        )
        self.prompts, self.more = ([{"prompt_token_ids": p} for p in job[name]] for name in ("prompts", "more"))

    def trainer(self, **options: Any) -> DrafterTrainer:
        return DrafterTrainer(self.llm, settings=SETTINGS, report=self.said.append, **options)

    def answer(self, prompts: list | None = None) -> dict[str, Any]:
        """Their answers, and the accept length."""
        before = self.counts()
        done = self.llm.generate(prompts or self.prompts, self.sampling, use_tqdm=False)
        return {"tokens": [list(answer.outputs[0].token_ids) for answer in done], "accept_length": self.since(before)}

    def counts(self) -> tuple[float, float]:
        found = {m.name: m.value for m in self.llm.get_metrics() if hasattr(m, "value")}
        drafts, accepted = (found.get(f"vllm:spec_decode_num_{what}", 0) for what in ("drafts", "accepted_tokens"))
        return drafts, accepted

    def since(self, before: tuple[float, float]) -> float:
        drafts, accepted = (now - then for now, then in zip(self.counts(), before, strict=True))
        return 1 + accepted / max(1, drafts)

    def sentences(self) -> list[str]:
        said = list(self.said)
        self.said.clear()
        return said

    def cold_start(self) -> None:
        """From nothing, trained by a process of its own."""
        rounds = [self.answer()]
        with self.trainer(where="process", device="cpu").attach() as trainer:
            trainer.training.wait_until_following()
            self.answer(self.more)
            end = time.monotonic() + DEADLINE_S
            expected = 1.0
            while rounds[-1]["accept_length"] < ENOUGH and time.monotonic() < end:
                while self.expected(trainer) < expected + BETTER and time.monotonic() < end:
                    trainer.train(2.0)
                expected = self.expected(trainer)
                rounds.append(self.answer())
            self.seen["cold_start"] = {
                "rounds": rounds, "version": trainer.version, "said": self.sentences(), "rows": trainer.versions,
            }  # fmt: skip
            self.kill(trainer)

    @staticmethod
    def expected(trainer: DrafterTrainer) -> float:
        """Accept length on held-out answers, of the version that the engine has."""
        rows = [row for row in trainer.versions if row.get("version") == trainer.version]
        return max((row.get("expected_accept_after", 1.0) for row in rows), default=1.0)

    def kill(self, trainer: DrafterTrainer) -> None:
        """The trainer's process dies in the middle of answers."""
        ids = self.submit()
        finished = self.step_until(len(ids) // 4)
        os.kill(trainer.training.pid, signal.SIGKILL)
        time.sleep(1.0)
        finished |= self.step_until(len(ids))
        self.seen["killed"] = {
            "tokens": [finished[i] for i in ids], "said": self.sentences(), "version": trainer.version,
        }  # fmt: skip

    def submit(self) -> list[str]:
        ids = [f"{time.monotonic()}-{i}" for i in range(len(self.prompts))]
        for request_id, prompt in zip(ids, self.prompts, strict=True):
            self.llm.llm_engine.add_request(request_id, prompt, self.sampling)
        return ids

    def step_until(self, count: int) -> dict[str, list[int]]:
        """Step until so many requests have finished, or none is left -> their answers."""
        finished: dict[str, list[int]] = {}
        engine = self.llm.llm_engine
        while len(finished) < count and engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = list(output.outputs[0].token_ids)
        return finished

    def here(self) -> None:
        """The rest, with a trainer in this process that goes on where the other one stood."""
        with self.trainer(where="here", share=0.0).attach() as trainer:
            self.seen["resumed_at"] = trainer.version
            before = self.answer()
            self.answer(self.more)  # some of all these are held out
            self.seen["before_faults"] = before["accept_length"]
            self.seen["interrupted"] = self.offer_with(trainer, breaks_after=4)
            self.seen["disk_full"] = self.full_disk(trainer)
            self.seen["swapped"] = self.swap_under_load(trainer)
            self.seen["after_swap"] = self.answer()
            self.seen["worse"] = self.refused(trainer, self.job["worse"])
            self.seen["other"] = self.refused(trainer, self.job["other"])
            (self.seen["other_by_worker"],) = self.llm.collective_rpc(
                "paceline_load_drafter", args=(self.job["other"],)
            )
            self.seen["after_refusals"] = self.answer() | {"version": trainer.version}
            self.seen["rows"] = trainer.versions

    def offer_with(self, trainer: DrafterTrainer, breaks_after: int) -> dict[str, Any]:
        version = trainer.version
        self.llm.collective_rpc("paceline_break_after", args=(breaks_after,))
        trainer.offer(self.job["good"])
        return self.answer() | {"said": self.sentences(), "version": trainer.version, "before": version}

    def full_disk(self, trainer: DrafterTrainer) -> dict[str, Any]:
        """No file may have more than a few bytes, as where the disk is full."""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        trainer.policy_updated(self.job["policy"])  # the same one: what was read for the one before is let go
        self.answer(self.prompts + self.more)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
        try:
            refused = ""
            try:
                trainer.offer(self.job["good"])
            except RunError as err:
                refused = str(err)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return self.answer() | {"said": [refused, *self.sentences()], "version": trainer.version}

    def swap_under_load(self, trainer: DrafterTrainer) -> dict[str, Any]:
        version = trainer.version
        ids = self.submit()
        finished = self.step_until(len(ids) // 4)
        end = time.monotonic() + DEADLINE_S
        while trainer.version == version and time.monotonic() < end:
            trainer.train(0.5)  # what could not be written is written now
        unfinished = self.llm.llm_engine.get_num_unfinished_requests()
        swapped = trainer.version
        finished |= self.step_until(len(ids))
        return {
            "tokens": [finished[i] for i in ids],
            "unfinished": unfinished,
            "versions": [version, swapped],
            "said": self.sentences(),
            "folder": self.llm.collective_rpc("paceline_loaded_from")[0],
        }

    def refused(self, trainer: DrafterTrainer, folder: str) -> str:
        try:
            trainer.offer(folder)
        except UserError as err:
            return str(err)
        return ""

    def thread(self) -> None:
        with self.trainer(where="thread", share=0.3).attach() as trainer:
            done = self.answer()
            trainer.train(2.0)
            trained = trainer.training.loop.online.learning.trainer.tokens
            rows = [row for row in trainer.versions if "steps" in row]
            self.seen["thread"] = done | {"said": self.sentences(), "tokens_trained": trained, "rows": len(rows)}


def main(job: dict[str, Any]) -> None:
    driver = Driver(job)
    driver.cold_start()
    driver.here()
    driver.thread()
    with open(job["out"], "w") as out:
        json.dump(driver.seen, out)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        main(json.load(file))
