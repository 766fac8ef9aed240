"""The decoder computes what transformers computes, for every family and rope variant, with and without the cache."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.model import Decoder, load_model, save_model
from paceline.model.attention import PackedAttention
from paceline.rollout.attention import DecodeAttention, PrefillAttention
from paceline.rollout.pages import PagePool

from ..conftest import tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 6}),
    "llama-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-llama3": ("llama", {"rope_scaling": LLAMA3}),
    "llama-old-spelling": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama-parameters": ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}, "rope_theta": None}),
    "qwen2": ("qwen2", {"head_dim": None, "num_attention_heads": 6, "hidden_size": 96}),
    "qwen2-yarn": ("qwen2", {"head_dim": None, "hidden_size": 96, "rope_scaling": YARN}),
    "qwen2-yarn-mscale": (
        "qwen2",
        {"head_dim": None, "hidden_size": 96, "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}},
    ),
    "qwen2-yarn-factor": (
        "qwen2",
        {
            "head_dim": None,
            "hidden_size": 96,
            "rope_scaling": YARN | {"attention_factor": 1.3, "beta_fast": 20},
        },
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-yarn": ("qwen3", {"rope_scaling": YARN}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 256}),
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    """The same random weights in our decoder and in transformers, through a saved checkpoint."""
    family, changes = VARIANTS[request.param]
    changes = {k: v for k, v in changes.items() if v is not None or k not in ("head_dim", "rope_theta")}
    dropped = [k for k, v in VARIANTS[request.param][1].items() if v is None and k in ("head_dim", "rope_theta")]
    ours = _without(family, dropped, changes)
    folder = tmp_path_factory.mktemp("model")
    save_model(ours, folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return ours, theirs, folder


def _without(family: str, dropped: list[str], changes: dict) -> Decoder:
    from paceline.model import DecoderConfig

    from ..conftest import tiny_config

    hf = {k: v for k, v in tiny_config(family, **changes).items() if k not in dropped}
    model = Decoder(DecoderConfig.from_hf(hf))
    source = tiny_model(family, dtype=torch.float32, **changes) if not dropped else model.init_weights(0, 0.15)
    model.load_state_dict(source.state_dict())
    return model.requires_grad_(False)


def test_logits_of_packed_sequences(pair):
    ours, theirs, _ = pair
    lengths = [7, 100, 31]
    torch.manual_seed(0)
    tokens = torch.randint(0, 128, (sum(lengths),))
    attention = PackedAttention(lengths, torch.device("cpu"))
    hidden, _ = ours(tokens, attention.positions(), attention)
    got = ours.logits(hidden).split(lengths)
    for row, mine in zip(tokens.split(lengths), got, strict=True):
        expected = theirs(row[None]).logits[0]
        torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("page_size", [16, 64])
def test_logits_through_the_paged_cache(pair, page_size):
    """Prefill two sequences, then feed the rest one token and several tokens at a time."""
    ours, theirs, _ = pair
    torch.manual_seed(1)
    rows = torch.randint(0, 128, (2, 90))
    expected = theirs(rows).logits
    pool = PagePool(ours.config, 20, page_size, torch.float32, torch.device("cpu"))
    count = pool.needed(90)
    pages = [pool.take(count), pool.take(count)]
    table = torch.tensor(pages, dtype=torch.int32)
    start = [10, 37]
    tokens = torch.cat([row[:n] for row, n in zip(rows, start, strict=True)])
    positions = torch.cat([torch.arange(n) for n in start])
    page_of = torch.cat([torch.tensor(p)[torch.arange(n) // page_size] for p, n in zip(pages, start, strict=True)])
    attention = PrefillAttention(pool, start, pool.slots(page_of, positions % page_size))
    with torch.inference_mode():
        hidden, _ = ours(tokens, positions, attention)
        last = ours.logits(hidden)[torch.tensor(start).cumsum(0) - 1]
        torch.testing.assert_close(
            last, torch.stack([expected[i, n - 1] for i, n in enumerate(start)]), atol=1e-4, rtol=1e-4
        )
        context = torch.tensor(start, dtype=torch.int32)
        for new in (1, 1, 4, 1, 7, 16):
            tree = None
            if new > 1:
                from paceline.kernels.paged_attention import chain_tree

                tree = chain_tree(2, new, torch.device("cpu"))
            where = context.long()[:, None] + torch.arange(new)
            attention = DecodeAttention(pool, table, context, ours.config.heads, tree)
            hidden, _ = ours(rows.gather(1, where).view(-1), where.view(-1), attention)
            wanted = torch.stack([expected[i, w] for i, w in enumerate(where)])
            torch.testing.assert_close(ours.logits(hidden).view(wanted.shape), wanted, atol=1e-4, rtol=1e-4)
            context += new


def test_checkpoint_round_trip_is_exact(pair, tmp_path):
    ours, theirs, folder = pair
    again = load_model(str(folder), "float32")
    for (name, a), (_, b) in zip(ours.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    save_model(again, tmp_path, shard_bytes=40_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    sharded = load_model(str(tmp_path), "float32")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), sharded.parameters(), strict=True))
    reread = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, reread.state_dict()[name]), name


def test_loads_what_transformers_saves(pair, tmp_path):
    ours, theirs, _ = pair
    theirs.save_pretrained(tmp_path, max_shard_size="60KB")
    again = load_model(str(tmp_path), "float32")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))
    assert AutoConfig.from_pretrained(tmp_path).model_type == ours.config.family
    assert again.config == ours.config or again.config.rope.frequencies(16)[0].equal(
        ours.config.rope.frequencies(16)[0]
    )
