"""Answers without training: several to each prompt, with their log-probabilities.

    python examples/generate.py --samples 2

The same seed gives the same answers, in any batch, with or without a drafter.
"""

from __future__ import annotations

import argparse

from paceline import Engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="a folder, a hub id, or the model that ships with Paceline")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=400, help="longest answer")
    args = parser.parse_args()

    engine = Engine(args.model)
    prompts = ["Make 45 from 3 17 32 33.\n", "Make 24 from 2 3 9.\n"]
    answers = engine.generate(prompts, samples=args.samples, temperature=0.8, max_tokens=args.tokens, seed=1)
    for prompt, group in zip(prompts, answers, strict=True):
        print(prompt.strip())
        for answer in group:
            print(f"  {answer.text.splitlines()[-1]}  ({len(answer.tokens)} tokens, log p {sum(answer.logprobs):.1f})")

    # The same answers, one by one as they are finished.
    for prompt, sample, answer in engine.stream(
        prompts, samples=args.samples, temperature=0.8, max_tokens=args.tokens, seed=1
    ):
        assert answer.tokens == answers[prompt][sample].tokens
    stats = engine.stats
    print(f"{stats.decoded_tokens} tokens, accept length {stats.accept_length:.2f} while speculating")


if __name__ == "__main__":
    main()
