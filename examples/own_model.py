"""Reinforcement learning on a model of one's own: any Hugging Face folder of the Llama, Qwen2, Qwen3 or Mistral family.

    python examples/own_model.py --steps 20
    python examples/own_model.py --model FOLDER

Without --model it makes a small, untrained Qwen3 with a vocabulary of eleven words, and teaches it to say "yes".
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from paceline import Engine, Trainer

WORDS = ["<eos>", "<unk>", "is", "it", "?", "yes", "no", "maybe", "never", "always", "often"]


def make_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)


def says_yes(completions: list[str], **columns: object) -> list[float]:
    """The share of the words that are "yes"."""
    return [text.split().count("yes") / max(1, len(text.split())) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a hub id")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--run", default=None, help="the run's directory")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            make_model(Path(folder))
        done = Trainer(
            args.model or folder,
            [{"prompt": "is it ?"}],
            says_yes,
            steps=args.steps,
            run_dir=args.run,
            settings={
                "rollout.prompts": 4,
                "rollout.samples": 16,
                "rollout.max_tokens": 16,
                "learn.lr": 3e-3 if args.model is None else 1e-6,
                "learn.algorithm": "dr_grpo",
                "checkpoint.every": 0,
            },
            progress=True,
        ).train()
    print(f"mean reward: first {done.rewards[0]:.3f}, last {done.rewards[-1]:.3f}")
    (answer,) = Engine(done.checkpoint).generate(["is it ?"], max_tokens=16)[0]
    print(f"is it ? {answer.text}")
    AutoModelForCausalLM.from_pretrained(done.checkpoint)  # the checkpoint is an ordinary one
    print(f"saved in {done.checkpoint}")


if __name__ == "__main__":
    main()
