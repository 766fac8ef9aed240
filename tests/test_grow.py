"""benchmarks/grow.py: a grown model writes what it wrote, its drafter reads what it read, unused tokens stay unused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.core import Request, SamplingParams
from paceline.draft.eagle.drafter import EagleDrafter
from paceline.draft.eagle.files import load_drafter, save_drafter
from paceline.draft.eagle.model import DrafterShape, EagleModel
from paceline.draft.strategy import Strategy
from paceline.model import Decoder, DecoderConfig, load_model
from paceline.model.attention import PackedAttention
from paceline.rollout import EngineSettings, RolloutEngine

from .conftest import benchmark, load_file, tiny_config

make_reasoner = benchmark("make_reasoner")
growing = load_file(Path(__file__).parents[1] / "benchmarks" / "grow.py")
active_layers, grow, lean_away, push_down = growing.active_layers, growing.grow, growing.lean_away, growing.push_down
IDLE_LAYERS = growing.IDLE_LAYERS


def fresh(family: str = "llama", layers: int = 4, tied: bool = False) -> Decoder:
    """A random model that knows which token is never used."""
    hf = tiny_config(family, num_hidden_layers=layers, tie_word_embeddings=tied)
    return lean_away(Decoder(DecoderConfig.from_hf(hf)).init_weights(0, std=0.05)).double().requires_grad_(False)


def outputs(model: Decoder) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, logits and features of two sequences."""
    tokens = torch.randint(0, 100, (50,), generator=torch.Generator().manual_seed(3))
    attention = PackedAttention([30, 20], tokens.device)
    with torch.no_grad():
        hidden, features = model(tokens, attention.positions(), attention, taps=True)
        assert features is not None
        return hidden, model.logits(hidden), features


def answers(model: Decoder, temperature: float, drafter: EagleModel | None = None) -> tuple[list, float]:
    strategies = [Strategy.parse("neural:3")] if drafter else None
    engine = RolloutEngine(
        model, EngineSettings(max_batch=4), None, [EagleDrafter(drafter)] if drafter else [], strategies
    )
    if strategies:
        engine.choose = lambda _: strategies[0]
    sampling = SamplingParams(temperature, max_tokens=40)
    requests = [Request(i, (5 + i, 7, 9), sampling, seed=1) for i in range(6)]
    done = sorted(engine.run(requests), key=lambda c: c.request.id)
    return [(c.tokens, c.logprobs) for c in done], engine.stats.accept_length


def test_as_many_active_layers_come_before_each_tap():
    for active in (4, 5, 6, 9):
        for layers in (active + IDLE_LAYERS, 28, 40):
            chosen = growing.active_indices(active, layers)
            assert chosen == sorted(set(chosen)) and len(chosen) == active
            seen = [sum(p < tap for p in chosen) for tap in (2, layers // 2, layers - 3)]
            assert seen == [2, (active + IDLE_LAYERS) // 2, active], "before each tap"


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("qwen2", False), ("qwen3", False)])
def test_growing_changes_nothing(family, tied):
    shallow = fresh(family, tied=tied)
    base = grow(shallow, 4 + IDLE_LAYERS)
    deep, wide = grow(base, 28), grow(base, 28, vocab_size=1000)
    assert (
        deep.config.layers == 28
        and active_layers(deep) == growing.active_indices(4, 28)
        and active_layers(base) == [0, 1, 2, 3]
    )
    (hidden, logits, _), (_, _, features) = outputs(shallow), outputs(base)
    for model in (base, deep):
        assert all(map(torch.equal, outputs(model)[:2], (hidden, logits))), "bit for bit"
    wide_hidden, wide_logits, wide_features = outputs(wide)
    assert torch.equal(wide_hidden, hidden)
    assert torch.equal(outputs(deep)[2], features) and torch.equal(wide_features, features), "what a drafter reads"
    # The head is the same rows, but a matmul with more of them may round otherwise: that is up to the library.
    rows, last = wide.head.weight, shallow.head.weight[-1]
    assert torch.equal(rows[:128], shallow.head.weight) and torch.equal(rows[128:], last.expand(872, -1))
    expected = torch.cat((logits, logits[:, -1:].expand(-1, 872)), 1)
    torch.testing.assert_close(wide_logits, expected, rtol=1e-12, atol=1e-12)


def test_a_grown_model_writes_the_same_with_the_same_draft_tokens(tmp_path, make_reasoner):
    base = grow(fresh(), 4 + IDLE_LAYERS, vocab_size=256)
    deep = grow(base, 14, vocab_size=600)
    drafter = EagleModel(base, DrafterShape(64, 32)).init_weights(std=0.1)
    save_drafter(make_reasoner.grow_drafter(drafter, deep, 256), tmp_path)
    grown = load_drafter(tmp_path, deep)
    assert grown.vocab is not None and len(grown.vocab) == 256
    for temperature in (0.0, 1.0):
        before, after = answers(base, temperature), answers(deep, temperature)
        assert [t for t, _ in before[0]] == [t for t, _ in after[0]]
        drafted, again = answers(base, temperature, drafter), answers(deep, temperature, grown)
        assert [t for t, _ in drafted[0]] == [t for t, _ in again[0]] == [t for t, _ in before[0]]
        assert drafted[1] == again[1] > 1.0, "the same draft tokens were accepted"


def test_the_loss_is_that_of_the_grown_model():
    """Pushing down counts the last row as often as the grown model has it, and for the margin more."""
    logits = torch.randn(3, 8, dtype=torch.float64)
    full = torch.cat((logits, logits[:, -1:].expand(-1, 92)), 1)
    shifted = push_down(logits, 92)
    shifted[:, -1] -= growing.MARGIN
    torch.testing.assert_close(shifted.logsumexp(1), full.logsumexp(1))


@pytest.mark.parametrize("layers", [4, 6])
def test_unused_tokens_are_out_of_reach_from_the_start(layers):
    model = grow(fresh(layers=layers), 28, vocab_size=152064 // 8)
    mass = outputs(model)[0].softmax(-1)[:, 127:].sum(-1)
    assert mass.max() < 1e-3


def test_gradients_reach_idle_layers():
    model = grow(fresh(), 8).requires_grad_(True)
    tokens = torch.arange(20)
    hidden, _ = model(tokens, tokens, PackedAttention([20], tokens.device))
    model.logits(hidden).log_softmax(-1)[:, 3].sum().backward()
    idle = next(layer for i, layer in enumerate(model.layers) if i not in active_layers(model))
    assert idle.o.grad.abs().sum() > 0 and idle.down.grad.abs().sum() > 0


def test_a_reasoner_is_made_and_grown(tmp_path, make_reasoner, monkeypatch, capsys):
    """The commands of the docstring, at a size for a CPU."""
    from paceline.model.tokenizer import load_tokenizer

    from .test_cli import here

    def run(*words: object) -> dict:
        monkeypatch.setattr("sys.argv", ["make_reasoner.py", *map(str, words)])
        make_reasoner.main()
        return json.loads(capsys.readouterr().out.strip().splitlines()[-1])

    shallow, deep = tmp_path / "shallow", tmp_path / "deep"
    words = ["--preset", "tiny", "--max-steps", 2, "--workers", 1, "--eval-prompts", 4, "--eval-tokens", 16]
    made = run(*words, "--out", shallow)
    assert made["training"]["steps"] == 2 and made["levels"][0]["difficulty"] == "tail"
    quick = ["--minutes", "0.02", "--answers", "16", "--window", "32", "--set", "rollout.max_tokens=30"]
    assert here("draft", "train", "--model", shallow, *quick, "--out", shallow / "drafter") == 0
    capsys.readouterr()
    grown = run("--grow", "tiny", "--trained", shallow, "--out", deep)
    assert grown["drafter"]
    small, large = load_model(str(shallow), "float64"), load_model(str(deep), "float64")
    assert (large.config.layers, large.config.vocab_size, large.config.max_positions) == (12, 512, 9216)
    assert torch.equal(outputs(small)[0], outputs(large)[0]) and small.config.layers == 7
    assert answers(small, 1.0)[0][0][0] == answers(large, 1.0, load_drafter(deep / "drafter", large))[0][0][0]
    assert load_tokenizer(str(deep)).eos_ids == (1,)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(deep, dtype=torch.float64)
    tokens = torch.tensor([[5, 17, 33, 99]])
    attention = PackedAttention([4], tokens.device)
    with torch.no_grad():
        ours = large.logits(large(tokens[0], attention.positions(), attention)[0])
        torch.testing.assert_close(theirs(tokens).logits[0], ours, rtol=1e-6, atol=1e-6)


def test_the_presets_have_the_geometry_that_they_name(make_reasoner):
    for name, parameters in (("7b", 7.6e9), ("1.5b", 1.54e9)):
        preset = make_reasoner.PRESETS[name]
        layers, vocab = preset.grown
        hf = preset.shape | {"model_type": "llama", "num_hidden_layers": layers, "vocab_size": vocab}
        with torch.device("meta"):
            model = Decoder(DecoderConfig.from_hf(hf))
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.01)
        assert preset.context > 8192 and preset.batch_tokens >= preset.context


def test_traces_of_the_long_presets_have_a_tail(make_reasoner):
    tokens, lengths, prompts = make_reasoner.make_traces((1, 600, True))
    assert len(tokens) == lengths.sum() and lengths.max() <= make_reasoner.LONG_CONTEXT
    own = sorted(lengths - prompts)
    assert own[594] > 8 * own[300]
