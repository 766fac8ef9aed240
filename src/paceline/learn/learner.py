"""The learner: turns the answers of a step and their rewards into an update of the policy, in place."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from paceline.config import Config
from paceline.learn import advantages as adv
from paceline.learn.logprobs import Watch, token_logprobs
from paceline.learn.losses import clipped, importance_weights, kl_k3, policy_loss, token_weights
from paceline.learn.optimizer import AdamW
from paceline.learn.packing import Answer, Packed, pack, plan
from paceline.learn.schedule import learning_rate
from paceline.model.decoder import Decoder
from paceline.tasks.sample import mix_seed

T = TypeVar("T")
ADVANTAGES = {"grpo": adv.grpo, "dapo": adv.grpo, "dr_grpo": adv.dr_grpo, "rloo": adv.rloo}


@dataclass
class Sums:
    """Weighted sums over the tokens of an update; kept on the device so that nothing waits for them."""

    values: dict[str, Tensor] = field(default_factory=dict)

    def add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.values[name] = self.values.get(name, 0.0) + value.detach().double().sum()

    def mean(self, name: str, count: int) -> float:
        return float(self.values[name]) / count


class Learner:
    def __init__(self, model: Decoder, config: Config):
        self.model, self.config = model, config
        c = config.learn
        self.optimizer = AdamW(
            model.named_parameters(),
            betas=c.betas,
            eps=c.eps,
            weight_decay=c.weight_decay,
            state_dtype=torch.bfloat16 if c.optimizer_dtype == "bfloat16" else torch.float32,
            master_weights=c.master_weights,
        )
        self.reference = copy.deepcopy(model).requires_grad_(False) if c.kl_coef else None
        self.watch: Watch | None = None
        """Is shown what the policy thinks of each answer, the first time it is learned from."""
        self.updates = 0
        self.total_updates = config.steps * c.epochs * c.minibatches
        self.temperature = config.rollout.temperature or 1.0

    def update(self, answers: list[Answer], step: int) -> dict[str, float]:
        """Learn from the answers of a step, which come group by group, `rollout.samples` each."""
        c = self.config.learn
        wide = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        rewards = torch.tensor([a.reward for a in answers], dtype=torch.float64)
        if c.overlong_buffer:
            lengths = torch.tensor([len(a.tokens) for a in answers])
            limit = self.config.rollout.max_tokens
            rewards = rewards + adv.overlong_penalty(lengths, limit, c.overlong_buffer, c.overlong_penalty)
        # Old log-probabilities are the present ones, unless more than one update is made of the same answers.
        several = c.epochs * c.minibatches > 1
        reference_first = self.reference is not None and c.algorithm == "reinforce_pp"
        old = self._score(self.model, answers) if several or reference_first else None
        reference = self._score(self.reference, answers) if self.reference is not None else None
        advantage = self._advantages(rewards, answers, old, reference)
        updates: list[dict[str, float]] = []
        for epoch in range(c.epochs):
            for members in self._minibatches(len(answers), step, epoch):
                batches = [
                    pack(answers, [members[i] for i in part], self.model.device, wide)
                    for part in plan([answers[i].length for i in members], c.micro_tokens)
                ]
                watch = self.watch if epoch == 0 else None
                updates.append(self._minibatch(batches, answers, members, advantage, old, reference, watch))
        return {name: sum(u[name] for u in updates) / len(updates) for name in updates[0]}

    def _advantages(
        self, rewards: Tensor, answers: list[Answer], old: list[Tensor] | None, reference: list[Tensor] | None
    ) -> list[Tensor]:
        """Advantage of every token, a tensor per answer."""
        c = self.config.learn
        lengths = torch.tensor([len(a.tokens) for a in answers])
        if c.algorithm == "reinforce_pp":
            kl = None
            if old is not None and reference is not None:
                kl = torch.cat(old).double().cpu() - torch.cat(reference).double().cpu()
            flat = adv.reinforce_pp(rewards, lengths, kl, c.kl_coef)
        else:
            groups = rewards.view(-1, self.config.rollout.samples)
            flat = ADVANTAGES[c.algorithm](groups).view(-1).repeat_interleave(lengths)
        return list(flat.split(lengths.tolist()))

    def _minibatches(self, count: int, step: int, epoch: int) -> list[list[int]]:
        c = self.config.learn
        if c.minibatches == 1:
            return [list(range(count))]
        generator = torch.Generator().manual_seed(mix_seed(self.config.seed, "minibatches", step, epoch) % 2**63)
        order = torch.randperm(count, generator=generator)
        return [sorted(part.tolist()) for part in order.tensor_split(c.minibatches) if len(part)]

    @torch.no_grad()
    def _score(self, model: Decoder | None, answers: list[Answer]) -> list[Tensor]:
        """Log-probabilities of all answers under a model, a tensor per answer."""
        assert model is not None
        out: list[Tensor] = [torch.empty(0)] * len(answers)
        for members in plan([a.length for a in answers], self.config.learn.micro_tokens):
            batch = pack(answers, members, model.device, torch.float32)
            logp, _ = token_logprobs(model, batch, self.temperature)
            for i, part in zip(members, logp.split([len(answers[i].tokens) for i in members]), strict=True):
                out[i] = part
        return out

    def _minibatch(
        self,
        batches: list[Packed],
        answers: list[Answer],
        members: list[int],
        advantage: list[Tensor],
        old: list[Tensor] | None,
        reference: list[Tensor] | None,
        watch: Watch | None,
    ) -> dict[str, float]:
        """One update from one mini-batch, which is cut into micro-batches only for memory's sake."""
        c, device = self.config.learn, self.model.device
        low, high = _known(c.clip_low), _known(c.clip_high)
        lengths = torch.tensor([len(answers[i].tokens) for i in members])
        weights = token_weights(lengths, _known(c.aggregate), self.config.rollout.max_tokens)
        weight_of = dict(zip(members, weights.split(lengths.tolist()), strict=True))
        sums = Sums()
        self.model.requires_grad_(True)
        for batch in batches:
            logp, entropy = token_logprobs(self.model, batch, self.temperature, c.activation_checkpointing, watch)
            gather = lambda parts: torch.cat([parts[i] for i in batch.answers]).to(device, logp.dtype)  # noqa: B023, E731
            weight, a = gather(weight_of), gather(advantage)
            before = gather(old) if old is not None else logp.detach()
            token_loss = policy_loss(logp, before, a, low, high)
            if c.is_cap is not None:
                token_loss = token_loss * importance_weights(before, batch.rollout_logp, c.is_cap)
            loss = (weight * token_loss).sum()
            if reference is not None and c.algorithm != "reinforce_pp":
                kl = kl_k3(logp, gather(reference))
                loss = loss + c.kl_coef * (weight * kl).sum()
                sums.add(kl=kl)
            loss.backward()
            mismatch = before - batch.rollout_logp
            sums.add(
                loss=loss,
                entropy=entropy,
                clipped=clipped(logp, before, a, low, high),
                update_kl=before - logp,
                mismatch=-mismatch,
                mismatch_k3=torch.exp(mismatch) - mismatch - 1,
            )
        self.model.requires_grad_(False)
        return self._apply(sums, int(lengths.sum()))

    def _apply(self, sums: Sums, tokens: int) -> dict[str, float]:
        """Clip, step, and say what happened. An update that is not finite is thrown away."""
        c = self.config.learn
        rate = learning_rate(self.updates, self.total_updates, c.lr, c.warmup_steps, c.decay, c.lr_end)
        grads = [p for p in self.model.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(grads, c.max_grad_norm))
        loss = float(sums.values["loss"])
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        if not skipped:
            self.optimizer.step(rate)
        self.optimizer.zero_grad()
        self.updates += 1
        metrics = {
            "actor/pg_loss": loss,
            "actor/grad_norm": norm,
            "actor/lr": rate,
            "actor/entropy": sums.mean("entropy", tokens),
            "actor/pg_clipfrac": sums.mean("clipped", tokens),
            "actor/ppo_kl": sums.mean("update_kl", tokens),
            "actor/skipped": float(skipped),
            "rollout_corr/kl": sums.mean("mismatch", tokens),
            "rollout_corr/k3_kl": sums.mean("mismatch_k3", tokens),
        }
        if "kl" in sums.values:
            metrics["actor/kl_loss"] = sums.mean("kl", tokens)
        return metrics

    def state(self) -> dict[str, Tensor]:
        tensors = {f"optimizer.{k}": v for k, v in self.optimizer.state().items()}
        if self.reference is not None:
            tensors |= {f"reference.{k}": v for k, v in self.reference.state_dict().items()}
        return tensors | {"updates": torch.tensor(self.updates)}

    def load(self, state: dict[str, Tensor]) -> None:
        part = lambda name: {k.removeprefix(name): v for k, v in state.items() if k.startswith(name)}  # noqa: E731
        self.optimizer.load(part("optimizer."))
        self.updates = int(state["updates"])
        if self.reference is not None:
            self.reference.load_state_dict(part("reference."))


def _known(value: T | None) -> T:
    """A setting that `algorithms.resolve` has filled in."""
    assert value is not None, "the config was not resolved"
    return value
