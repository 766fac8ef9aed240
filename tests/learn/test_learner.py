"""The learner: its update is the one the formulas give, however the batch is cut, and equals TRL's."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from safetensors.torch import load_file

from paceline.config import build_config
from paceline.core import Trajectory
from paceline.learn.algorithms import resolve
from paceline.learn.learner import Learner
from paceline.learn.logprobs import hidden_states, token_logprobs
from paceline.learn.losses import policy_loss, token_weights
from paceline.learn.packing import pack
from paceline.learn.state import load_learner, save_learner

from ..conftest import tiny_model
from .updates import update


def config(**learn):
    values = {"rollout": {"samples": 4, "max_tokens": 40}, "learn": {"lr": 1e-3, **learn}, "steps": 10}
    return resolve(build_config(values, "test"))


def make_trajectories(count=8, seed=0, model=None):
    r = random.Random(seed)
    out = []
    for i in range(count):
        prompt = tuple(r.randrange(2, 128) for _ in range(5 + i // 4))
        tokens = [r.randrange(2, 128) for _ in range(r.randint(1, 30))]
        out.append(Trajectory(prompt, tokens, [0.0] * len(tokens), float(r.random() < 0.5)))
    if model is not None:  # as if the engine had reported exactly the policy's own log-probabilities
        batch = pack(out, list(range(count)), model.device, torch.float64)
        logp, _ = token_logprobs(model, batch, 1.0)
        for trajectory, part in zip(out, logp.split([len(a.tokens) for a in out]), strict=True):
            trajectory.logprobs = part.tolist()
    return out


def gradients(model, settings, trajectories) -> dict[str, torch.Tensor]:
    """The gradient that an update would take, caught before the optimizer."""
    model = copy.deepcopy(model)
    learner = Learner(model, settings)
    caught = {}

    def catch(rate):
        caught.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    learner.optimizer.step = catch
    update(learner, trajectories, step=0)
    return caught


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-8, atol=1e-10)


ALGORITHMS = ["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradient_by_hand(algorithm):
    """One sequence at a time through the model, losses summed as the papers have it."""
    model = tiny_model()
    trajectories = make_trajectories(model=model)
    settings = config(algorithm=algorithm, max_grad_norm=1e9, overlong_buffer=0)
    got = gradients(model, settings, trajectories)

    rewards = torch.tensor([a.reward for a in trajectories], dtype=torch.float64).view(2, 4)
    mean, std = rewards.mean(1, keepdim=True), rewards.std(1, keepdim=True)
    advantage = {
        "grpo": (rewards - mean) / (std + 1e-4),
        "dapo": (rewards - mean) / (std + 1e-4),
        "dr_grpo": rewards - mean,
        "rloo": (rewards - mean) * 4 / 3,
        "reinforce_pp": rewards,
    }[algorithm].view(-1)
    lengths = torch.tensor([len(a.tokens) for a in trajectories])
    per_token = [advantage[i].expand(int(n)) for i, n in enumerate(lengths)]
    if algorithm == "reinforce_pp":
        flat = torch.cat(per_token)
        per_token = ((flat - flat.mean()) / torch.sqrt(flat.var() + 1e-8)).split(lengths.tolist())
    model.requires_grad_(True)
    total = 0
    for i, trajectory in enumerate(trajectories):
        logp, _ = token_logprobs(model, pack([trajectory], [0], model.device, torch.float64), 1.0)
        loss = -(torch.exp(logp - logp.detach()) * per_token[i]).sum()
        n = len(trajectory.tokens)
        total = (
            total
            + loss
            * {
                "grpo": 1 / (8 * n),
                "dapo": 1 / int(lengths.sum()),
                "dr_grpo": 1 / (8 * 40),
                "rloo": 1 / 8,
                "reinforce_pp": 1 / int(lengths.sum()),
            }[algorithm]
        )
    total.backward()
    assert_same(got, {n: p.grad for n, p in model.named_parameters()})


@pytest.mark.parametrize(
    "change", [{"micro_tokens": 40}, {"micro_tokens": 1}, {"activation_checkpointing": True}], ids=str
)
def test_how_the_batch_is_cut_changes_nothing(change):
    model = tiny_model("qwen3")
    trajectories = make_trajectories(model=model)
    base = gradients(model, config(kl_coef=0.1), trajectories)
    assert_same(base, gradients(model, config(kl_coef=0.1, **change), trajectories))


@pytest.mark.parametrize("watched", [False, True])
def test_answers_that_teach_nothing_are_left_out_unless_somebody_looks(monkeypatch, watched):
    """A group of equal rewards is not learned from: same gradients as if it were, and the drafter still sees it."""
    model = tiny_model()
    trajectories = make_trajectories(12, model=model)
    for i, trajectory in enumerate(trajectories):
        trajectory.reward = 0.1 if i // 4 == 1 else float(i % 3 == 0)  # the second group is of one mind
    others = [0, 1, 2, 3, 8, 9, 10, 11]
    learner = Learner(copy.deepcopy(model), config())
    batch = learner.make_batch(trajectories, 0, learner.score(trajectories, range(12)))
    assert batch.has_signal == [True] * 4 + [False] * 4 + [True] * 4 and batch.counted(0) == others
    assert batch.work(watched) == [a.length * (int(watched) if i // 4 == 1 else 3) for i, a in enumerate(trajectories)]
    learned, seen = [], []
    monkeypatch.setattr(
        "paceline.learn.learner.token_logprobs", lambda *a: (learned.extend(a[1].indices), token_logprobs(*a))[1]
    )
    learner.on_hidden = (lambda i, *_: seen.append(i)) if watched else None
    sums = learner.gradients(batch, 0, range(12))
    assert sorted(learned) == others
    assert sorted(seen) == (list(range(12)) if watched else [])

    batch.has_signal = [True] * 12
    other = Learner(copy.deepcopy(model), config())
    expected = other.gradients(batch, 0, range(12))
    assert_same(*({n: p.grad for n, p in it.model.named_parameters()} for it in (learner, other)))
    torch.testing.assert_close(sums.values["loss"], expected.values["loss"])
    assert sums.values["entropy"] < expected.values["entropy"], "of what was learned from"


def test_what_nobody_wants_to_see_does_not_go_through_the_policy(monkeypatch):
    model = tiny_model()
    trajectories = make_trajectories(12, model=model)
    for i, trajectory in enumerate(trajectories):
        trajectory.reward = 0.1 if i // 4 == 1 else float(i % 3 == 0)  # the second group has no signal
    learner = Learner(model, config())
    ran, seen = [], []
    monkeypatch.setattr(
        "paceline.learn.learner.hidden_states", lambda m, b, **k: (ran.extend(b.indices), hidden_states(m, b, **k))[1]
    )
    learner.on_hidden = lambda i, *_: seen.append(i)
    learner.wants_hidden = lambda i: i in (2, 5)
    batch = learner.make_batch(trajectories, 0, learner.score(trajectories, range(12)))
    learner.gradients(batch, 0, range(12))
    assert ran == [5] and {2, 5} <= set(seen) and not {4, 6, 7} & set(seen)


@pytest.mark.parametrize("change", [{"kl_coef": 0.1}, {"overlong_buffer": 30}], ids=str)
def test_equal_rewards_teach_where_more_than_rewards_counts(change):
    trajectories = make_trajectories()
    for trajectory in trajectories:
        trajectory.reward = 1.0
    learner = Learner(tiny_model(), config(**change))
    batch = learner.make_batch(trajectories, 0, learner.score(trajectories, range(8)))
    assert any(batch.has_signal)


def test_a_step_that_teaches_nothing_still_goes_on_with_the_momentum():
    model = tiny_model()
    trajectories = make_trajectories(model=model)
    learner = Learner(model, config())
    first = update(learner, trajectories, 0)
    assert first["actor/tokens"] == sum(a.length for a in trajectories)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for trajectory in trajectories:
        trajectory.reward = 0.0
    metrics = update(learner, trajectories, 1)
    assert metrics["actor/grad_norm"] == 0 == metrics["actor/tokens"] and metrics["actor/skipped"] == 0
    assert any(not torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_logits_in_pieces_change_nothing(monkeypatch):
    model = tiny_model()
    trajectories = make_trajectories(model=model)
    base = gradients(model, config(), trajectories)
    monkeypatch.setattr("paceline.learn.logprobs.LOGITS_AT_ONCE", 128 * 7)
    assert_same(base, gradients(model, config(), trajectories))


def test_old_policy_reference_and_truncated_weights():
    """With a perturbed engine, several epochs and a reference, the loss is still the formula."""
    model = tiny_model()
    trajectories = make_trajectories(model=model)
    r = random.Random(1)
    for trajectory in trajectories:
        trajectory.logprobs = [p + r.gauss(0, 0.8) for p in trajectory.logprobs]
    learner = Learner(copy.deepcopy(model), config(importance_sampling_cap=1.5))
    metrics = update(learner, trajectories, 0)
    batch = pack(trajectories, list(range(8)), model.device, torch.float64)
    logp, entropy = token_logprobs(model, batch, 1.0)
    rewards = torch.tensor([a.reward for a in trajectories], dtype=torch.float64).view(2, 4)
    advantage = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1)
    lengths = torch.tensor([len(a.tokens) for a in trajectories])
    each = -advantage.repeat_interleave(lengths) * torch.exp(logp - batch.rollout_logp).clamp(max=1.5)
    assert metrics["actor/pg_loss"] == pytest.approx(float((token_weights(lengths, "sequence_mean", 40) * each).sum()))
    assert metrics["actor/entropy"] == pytest.approx(float(entropy.mean()))
    assert metrics["rollout_corr/kl"] == pytest.approx(float((batch.rollout_logp - logp).mean()))
    d = logp - batch.rollout_logp
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(float((d.exp() - d - 1).mean()))


def test_several_updates_per_step_clip_against_the_first_policy():
    model = tiny_model()
    trajectories = make_trajectories(model=model)
    learner = Learner(model, config(epochs=3, minibatches=2, lr=0.05))
    metrics = update(learner, trajectories, 0)
    assert learner.updates == 6 and metrics["actor/pg_clipfrac"] > 0 and metrics["actor/ppo_kl"] != 0


def test_temperature_enters_the_policy():
    model = tiny_model()
    batch = pack(make_trajectories(4), [0, 1, 2, 3], model.device, torch.float64)
    hot, _ = token_logprobs(model, batch, 2.0)
    cold, _ = token_logprobs(model, batch, 1.0)
    assert not torch.allclose(hot, cold)


def test_updates_that_are_not_finite_are_skipped():
    model = tiny_model()
    trajectories = make_trajectories(model=model)
    trajectories[3].logprobs[0] = float("nan")
    before = {n: p.clone() for n, p in model.named_parameters()}
    metrics = update(Learner(model, config()), trajectories, 0)
    assert metrics["actor/skipped"] == 1
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_learning_raises_the_probability_of_what_was_rewarded():
    model = tiny_model()
    trajectories = make_trajectories(16, model=model)
    learner = Learner(model, config(lr=3e-3))
    batch = pack(trajectories, list(range(16)), model.device, torch.float64)
    good = (
        torch.tensor([a.reward for a in trajectories]).repeat_interleave(
            torch.tensor([len(a.tokens) for a in trajectories])
        )
        > 0
    )
    before, _ = token_logprobs(model, batch, 1.0)
    for step in range(5):
        update(learner, trajectories, step)
    after, _ = token_logprobs(model, batch, 1.0)
    assert (after - before)[good].mean() > 0 > (after - before)[~good].mean()


def test_state_goes_on_exactly():
    model = tiny_model()
    trajectories = make_trajectories(model=model)
    one = Learner(model, config(kl_coef=0.1))
    update(one, trajectories, 0)
    copied = copy.deepcopy(model)
    two = Learner(copied, config(kl_coef=0.1))
    two.load({k: v.clone() for k, v in one.state().items()})
    for learner in (one, two):
        update(learner, trajectories, 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copied.parameters(), strict=True))
    assert two.updates == 2


@pytest.mark.parametrize(
    ("loss_type", "aggregate"), [("grpo", "sequence_mean"), ("dr_grpo", "constant"), ("dapo", "token_mean")]
)
def test_equals_trl(loss_type, aggregate, tmp_path):
    """TRL's own loss on the same weights, trajectories, advantages and old log-probabilities."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from paceline.model import save_model

    ours = tiny_model(dtype=torch.float32)
    save_model(ours, tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    vocabulary = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, 128)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path), loss_type=loss_type, epsilon=0.2, epsilon_high=0.28, beta=0.0, use_cpu=True,
        bf16=False, max_completion_length=40, per_device_train_batch_size=4, num_generations=4, report_to=[],
        disable_dropout=True,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        theirs, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "w2"}] * 4), processing_class=tokenizer,
    )  # fmt: skip

    trajectories = make_trajectories(4)
    batch = pack(trajectories, [0, 1, 2, 3], ours.device, torch.float32)
    lengths = torch.tensor([len(a.tokens) for a in trajectories])
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(4, generator=generator)
    with torch.no_grad():
        old = token_logprobs(ours, batch, 1.0)[0] + 0.3 * torch.randn(len(batch.targets), generator=generator)

    ours.requires_grad_(True)
    logp, _ = token_logprobs(ours, batch, 1.0)
    each = policy_loss(logp, old, advantages.repeat_interleave(lengths), 0.2, 0.28)
    mine = (token_weights(lengths, aggregate, 40) * each).sum()
    mine.backward()

    pad = lambda rows, side: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)  # noqa: E731
    prompts = pad([torch.tensor(a.prompt) for a in trajectories], "left")
    trainer.current_gradient_accumulation_steps = 1
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": (prompts != 0).long(),
        "completion_ids": pad([torch.tensor(a.tokens) for a in trajectories], "right"),
        "completion_mask": pad([torch.ones(len(a.tokens), dtype=torch.long) for a in trajectories], "right"),
        "advantages": advantages,
        "old_per_token_logps": pad(list(old.split(lengths.tolist())), "right"),
        "num_items_in_batch": lengths.sum(),
    }
    other = trainer._compute_loss(theirs.train(), inputs)
    other.backward()
    assert mine.item() == pytest.approx(other.item(), rel=1e-4, abs=1e-6)
    ours_grad, their_grad = ours.head.weight.grad, theirs.lm_head.weight.grad
    torch.testing.assert_close(ours_grad, their_grad.to(ours_grad.dtype), rtol=1e-3, atol=1e-6)


def test_adding_up_micro_batches_in_bfloat16_loses_little():
    """Gradients have the precision of the weights. Eight micro-batches, each rounded, and so is every sum: what that
    costs is far below what another draw of trajectories would change."""
    model = tiny_model(dtype=torch.float32)
    parts, others = [], []
    for into, first in ((parts, 0), (others, 100)):
        for i in range(8):
            into.append(gradients(model, config(max_grad_norm=1e9), make_trajectories(4, seed=first + i)))

    def direction(a, b):
        return float(
            torch.cosine_similarity(*(torch.cat([t.double().flatten() for t in x.values()]) for x in (a, b)), 0)
        )

    exact = {name: sum(p[name].double() for p in parts) for name in parts[0]}
    another = {name: sum(p[name].double() for p in others) for name in others[0]}
    rounded = {name: torch.zeros_like(t, dtype=torch.bfloat16) for name, t in exact.items()}
    for part in parts:
        for name, total in rounded.items():
            total += part[name].bfloat16()
    assert direction(exact, rounded) > 0.9999 > 0.9 > direction(exact, another)


def test_a_reference_with_tied_embeddings_is_saved_once_and_loaded(tmp_path):
    """safetensors refuses tensors that share memory, and a loaded copy must stay tied."""
    settings = config(kl_coef=0.1)
    model = tiny_model(tie_word_embeddings=True)
    learner = Learner(copy.deepcopy(model), settings)
    update(learner, make_trajectories(model=model), step=0)
    save_learner(learner, tmp_path, 0, learner.optimizer.mean, reference=True)
    assert "reference.head.weight" not in load_file(tmp_path / "learner-0.safetensors")
    resumed = Learner(copy.deepcopy(learner.model), settings)
    load_learner(resumed, tmp_path)
    assert resumed.reference.head.weight is resumed.reference.embed.weight
    assert_same(dict(resumed.reference.named_parameters()), dict(model.named_parameters()))
    assert_same(resumed.state(), learner.state())
