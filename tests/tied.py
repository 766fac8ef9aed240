"""A model as Qwen and Llama ship their small ones: tied embeddings, several stop tokens, which only
generation_config.json names, and a chat template. The embedded model has none of these."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ["<pad>", "<|im_end|>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<unk>"]
EOS_IDS = [1, 2]
CHARACTERS = "\n 0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+-*/=().,:?!#'<>"
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)


def make_tied(folder: Path, seed: int = 0) -> Path:
    """Write a tied Qwen3 of 30,000 parameters; about one token in forty that it draws is a stop token."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokens = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokens.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>"],
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=EOS_IDS[0],
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 0.1)
    model.generation_config = GenerationConfig(eos_token_id=EOS_IDS, temperature=0.7, do_sample=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
