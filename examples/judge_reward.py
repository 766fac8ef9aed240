"""Rewards by a judge behind an HTTP API: a language model served by vLLM, SGLang or anybody with chat completions.

    python examples/judge_reward.py --url http://localhost:8000/v1 --model Qwen/Qwen2.5-7B-Instruct
    python examples/judge_reward.py --serve --steps 2        # with a server of this file's own, that counts letters

All answers that have arrived are asked about in one call, side by side, in a process beside the rollout. A request that
fails is made again; an answer that the judge does not grade gets no opinion (None).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

from paceline import Judge, Trainer, per

JUDGE = Judge(
    os.environ.get("JUDGE_URL", "http://localhost:8000/v1"),
    os.environ.get("JUDGE_MODEL", "judge"),
    system="Grade the answer to the problem from 0 to 10. Reply with the number alone.",
    concurrency=16,  # questions that are open at a time
    retries=4,  # of each, after a timeout, 429 or 5xx
    timeout_s=10,
    per_minute=600,
    on_failure="none",
    settings={"temperature": 0, "max_tokens": 8},
)


@per("arrived")
def judged(
    prompts: list[str], completions: list[str], log_metric: Callable[[str, float], None], **columns: object
) -> list[float | None]:
    replies = JUDGE.ask([f"Problem: {p}\nAnswer: {c}" for p, c in zip(prompts, completions, strict=True)])
    grades = [re.search(r"\d+(\.\d+)?", reply or "") for reply in replies]
    log_metric("judge/graded", sum(grade is not None for grade in grades) / len(grades))
    return [min(1.0, float(grade[0]) / 10) if grade else None for grade in grades]


class LetterCounter(BaseHTTPRequestHandler):
    """Stands in for a model: the grade is how many different letters the question has, and some requests fail."""

    seen: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"]
        self.seen.append(question)
        if len(self.seen) % 5 == 1:
            self.send_response(503)
            self.send_header("Retry-After", "0.05")
            self.end_headers()
            return
        grade = len(set(question.partition("Answer: ")[2])) % 11
        body = json.dumps({"choices": [{"message": {"role": "assistant", "content": f"{grade}"}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--model", default="judge")
    parser.add_argument("--serve", action="store_true", help="start a small server to try it with")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=200, help="longest answer")
    parser.add_argument("--run", default=None, help="the run's directory")
    args = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), LetterCounter) if args.serve else None
    if server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["JUDGE_URL"] = f"http://127.0.0.1:{server.server_port}/v1" if server else args.url
    os.environ["JUDGE_MODEL"] = args.model  # the reward process imports this file anew, and reads both
    settings = {
        "task.difficulty": "easy",
        "rollout.prompts": 4,
        "rollout.samples": 4,
        "rollout.max_tokens": args.tokens,
        "reward.timeout_s": 60,
    }
    done = Trainer(
        "embedded",
        "countdown",
        f"{__file__}:judged",  # by name, so that it runs in a process of its own
        steps=args.steps,
        run_dir=args.run,
        settings=settings,
        progress=True,
    ).train()
    print(f"mean grade: first {done.rewards[0]:.3f}, last {done.rewards[-1]:.3f}")
    if server:
        server.shutdown()
        server.server_close()
        print(f"the judge was asked {len(LetterCounter.seen)} times")


if __name__ == "__main__":
    main()
