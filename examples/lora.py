"""LoRA: train adapters, stop, resume, export, and load what came out in PEFT and in Paceline's own engine.

    python examples/lora.py --run runs/lora
    python examples/lora.py --run runs/lora --model FOLDER

Without --model it makes a small, untrained Qwen3 with a vocabulary of eleven words, and teaches it to say "yes".
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from own_model import make_model, says_yes
from paceline import Engine, Trainer
from paceline.errors import Stopped
from paceline.integrations.export import export_policy
from paceline.integrations.export_adapter import export_adapter
from paceline.library.trainer import Trained

ROWS = [{"prompt": "is it ?"}]


def train(model: str, run: Path, steps: int) -> Trained:
    """Adapters of rank 8 on all linear maps. Half-way it is stopped, as Ctrl-C would do it, and resumed."""
    answered = 0

    def stop_half_way(completions: list[str], **columns: object) -> list[float]:
        nonlocal answered
        answered += len(completions)
        if answered > steps // 2 * 64:
            trainer.stop()
        return says_yes(completions)

    trainer = Trainer(
        model,
        ROWS,
        stop_half_way,
        steps=steps,
        run_dir=run,
        settings={
            "learn.lora.rank": 8,
            "learn.lr": 1e-2,
            "learn.algorithm": "dr_grpo",
            "rollout.prompts": 4,
            "rollout.samples": 16,
            "rollout.max_tokens": 16,
            "checkpoint.every": 0,
        },
    )
    try:
        return trainer.train()
    except Stopped as stopped:
        print(stopped)
    return Trainer.resume(run, ROWS, says_yes).train()


@torch.no_grad()
def peft_logprobs(model: str, adapter: Path, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Of an answer's tokens, by PEFT: the base with the adapter beside it, not merged."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy = PeftModel.from_pretrained(base, adapter)
    row = torch.tensor([prompt + tokens])
    logp = policy(input_ids=row).logits[0].log_softmax(-1)
    return logp[len(prompt) - 1 : -1].gather(-1, row[0, len(prompt) :, None])[:, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a hub id")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--run", type=Path, default=Path("runs/lora"), help="the run's directory")
    args = parser.parse_args()
    model, merged, adapter = (str(args.run.with_name(f"{args.run.name}-{name}")) for name in ("base", "merged", "lora"))
    if args.model is None:
        make_model(Path(model))
    model = args.model or model

    done = train(model, args.run, args.steps)
    print(f"mean reward: first {done.rewards[0]:.3f}, last {done.rewards[-1]:.3f}")
    export_policy(str(args.run), Path(merged))
    rank = export_adapter(str(args.run), Path(adapter))["rank"]
    print(f"merged weights in {merged}; adapter of rank {rank} in {adapter}")

    ours = Engine(merged, dtype="float32")
    (answer,) = ours.generate([ROWS[0]["prompt"]], max_tokens=16)[0]
    (same,) = Engine(model, adapter=adapter, dtype="float32").generate([ROWS[0]["prompt"]], max_tokens=16)[0]
    print(f"is it ? {answer.text}")
    assert same.tokens == answer.tokens, "merged weights, and the base with the adapter"
    prompt = ours.tokenizer.encode_prompt(ROWS[0]["prompt"])
    theirs = peft_logprobs(model, Path(adapter), list(prompt), answer.tokens)
    print(f"log-probabilities differ from PEFT's by {(theirs - torch.tensor(answer.logprobs)).abs().max():.1e} at most")


if __name__ == "__main__":
    main()
