"""A drafter for a model: trained on the model's own answers, examined, saved, used.

    python examples/train_drafter.py --seconds 60

With the embedded model a minute is enough for drafting to pay.
"""

from __future__ import annotations

import argparse

from paceline import Drafter, Engine
from paceline.tasks.countdown import Countdown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="a folder, a hub id, or the model that ships with Paceline")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--prompts", type=int, default=256, help="to learn from")
    parser.add_argument("--tokens", type=int, default=400, help="longest answer")
    parser.add_argument("--out", default="runs/drafter")
    args = parser.parse_args()
    task = Countdown("easy", "search")
    prompts = [str(task.sample(i).prompt) for i in range(args.prompts + 8)]
    drafter = Drafter.train(
        args.model, prompts[8:], seconds=args.seconds, samples=1, max_tokens=args.tokens, window=128
    )
    f = drafter.fitted
    print(f"{f.steps} steps over {f.tokens} tokens, loss {f.loss:.3f}")
    measured = drafter.examine(prompts[:8], max_tokens=args.tokens)
    print(f"accept length {measured['accept_length']:.2f} on prompts that it has not seen")
    folder = drafter.save(args.out)
    engine = Engine(args.model, drafter=folder)
    engine.generate(prompts[:8], max_tokens=args.tokens)
    print(f"{engine.stats.decoded_tokens} tokens written in {engine.stats.decode_s:.2f} s with the drafter in {folder}")


if __name__ == "__main__":
    main()
