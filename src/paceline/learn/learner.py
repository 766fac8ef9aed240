"""The learner: turns the answers of a step and their rewards into an update of the policy, in place.

Several learners can share the work. What a step teaches is the same `UpdateBatch` for all; each makes the gradients of
its share of the answers, somebody sums them, and then each applies the sum to the parameters that its optimizer holds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from paceline.config import Config
from paceline.core import Trajectory, TrajectoryFacts, mix_seed
from paceline.learn import advantages as adv
from paceline.learn.logprobs import Watch, hidden_states, token_logprobs
from paceline.learn.losses import clipped, importance_weights, kl_k3, policy_loss, token_weights
from paceline.learn.optimizer import AdamW
from paceline.learn.packing import MicroBatch, pack, plan
from paceline.learn.schedule import learning_rate
from paceline.model.decoder import Decoder

T = TypeVar("T")
Answers = Sequence[Trajectory | TrajectoryFacts]
"""All answers of a step: whole where this learner is given a share of the work that has them, else what is known of
them."""
ADVANTAGES = {"grpo": adv.grpo, "dapo": adv.grpo, "dr_grpo": adv.dr_grpo, "rloo": adv.rloo}
SUMMED = ("loss", "entropy", "clipped", "update_kl", "mismatch", "mismatch_k3", "kl")


@dataclass
class Sums:
    """Weighted sums over the tokens of an update; kept on the device so that nothing waits for them."""

    values: dict[str, Tensor] = field(default_factory=dict)

    def add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.values[name] = self.values.get(name, 0.0) + value.detach().double().sum()

    def mean(self, name: str, count: int) -> float:
        return float(self.values[name]) / count

    def tensor(self, device: torch.device) -> Tensor:
        """All of them in a fixed order, so that those of several learners can be added."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([self.values.get(name, zero) for name in SUMMED])

    @classmethod
    def of(cls, tensor: Tensor) -> Sums:
        return cls(dict(zip(SUMMED, tensor.unbind(), strict=True)))


class Score(NamedTuple):
    """Log-probabilities of an answer before the step's first update, where they are needed."""

    old: Tensor | None
    reference: Tensor | None


@dataclass
class UpdateBatch:
    """What a step teaches."""

    answers: Answers
    scores: list[Score]
    advantage: list[Tensor]
    updates: list[list[int]]
    """Answers of each update that is made of them."""
    fresh: int
    """Updates in which each answer is learned from for the first time."""
    teaches: list[bool]
    """Whether an answer changes anything. Where a whole group got the same reward, no answer of it does, and those are
    the longest as a rule."""

    def counted(self, update: int) -> list[int]:
        """Answers that the numbers of an update are about: those that teach something, or all if none does."""
        members = self.updates[update]
        return [i for i in members if self.teaches[i]] or members

    def work(self, watched: bool) -> list[int]:
        """What each answer costs, in tokens that go forward: the way back takes twice as much, and what teaches nothing
        is looked at only if it is `watched`, or if nothing does."""
        seen = watched or not any(self.teaches)
        return [a.length * (3 if t else int(seen)) for a, t in zip(self.answers, self.teaches, strict=True)]


class Learner:
    def __init__(self, model: Decoder, config: Config, names: Iterable[str] | None = None):
        """`names` are the parameters that this learner's optimizer holds; all, unless others share the work."""
        self.model, self.config = model, config
        c = config.learn
        self.optimizer = AdamW(
            model.named_parameters(),
            betas=c.betas,
            eps=c.eps,
            weight_decay=c.weight_decay,
            state_dtype=torch.bfloat16 if c.optimizer_dtype == "bfloat16" else torch.float32,
            master_weights=c.master_weights,
            names=names,
        )
        self.reference = copy.deepcopy(model).requires_grad_(False) if c.kl_coef else None
        self.watch: Watch | None = None
        """Is shown what the policy thinks of each answer, the first time it is learned from."""
        self.wants: Callable[[int], bool] = lambda answer: True
        """Whether it will look at an answer: what teaches nothing goes through the policy for its sake alone."""
        self.on_batch: Callable[[], None] = lambda: None
        """Called after every micro-batch."""
        self.updates = 0
        self.total_updates = config.steps * c.epochs * c.minibatches
        self.temperature = config.rollout.temperature or 1.0

    def update(self, answers: list[Trajectory], step: int) -> dict[str, float]:
        """Learn from the answers of a step, which come group by group, `rollout.samples` each: the whole of it."""
        everything = range(len(answers))
        lesson = self.lesson(answers, step, self.score(answers, everything))
        done = []
        for update, members in enumerate(lesson.updates):
            sums = self.gradients(lesson, update, members)
            done.append(self.apply(lesson, update, sums))
        return mean_metrics(done)

    def score(self, answers: Answers, share: Sequence[int]) -> list[Score]:
        """What has to be known of these answers before the policy changes."""
        c = self.config.learn
        # Old log-probabilities are the present ones, unless more than one update is made of the same answers.
        several = c.epochs * c.minibatches > 1
        reference_first = self.reference is not None and c.algorithm == "reinforce_pp"
        mine = [answers[i] for i in share]
        nothing: list[Tensor | None] = [None] * len(mine)
        old = self._logprobs(self.model, mine) if several or reference_first else nothing
        reference = self._logprobs(self.reference, mine) if self.reference is not None else nothing
        return [Score(*pair) for pair in zip(old, reference, strict=True)]

    def lesson(self, answers: Answers, step: int, scores: list[Score]) -> UpdateBatch:
        c = self.config.learn
        rewards = torch.tensor([a.reward for a in answers], dtype=torch.float64)
        if c.overlong_buffer:
            lengths = torch.tensor([a.num_tokens for a in answers])
            limit = self.config.rollout.max_tokens
            rewards = rewards + adv.overlong_penalty(lengths, limit, c.overlong_buffer, c.overlong_penalty)
        advantage = self._advantages(rewards, answers, scores)
        epochs = [self._minibatches(len(answers), step, epoch) for epoch in range(c.epochs)]
        updates = [members for epoch in epochs for members in epoch]
        teaches = [self._pulls() or bool(a.any()) for a in advantage]
        return UpdateBatch(answers, scores, advantage, updates, len(epochs[0]), teaches)

    def _pulls(self) -> bool:
        """Whether each answer is pulled towards the reference, whatever its advantage."""
        return self.reference is not None and self.config.learn.algorithm != "reinforce_pp"

    def _advantages(self, rewards: Tensor, answers: Answers, scores: list[Score]) -> list[Tensor]:
        """Advantage of every token, a tensor per answer."""
        c = self.config.learn
        lengths = torch.tensor([a.num_tokens for a in answers])
        if c.algorithm == "reinforce_pp":
            pairs = [(s.old, s.reference) for s in scores if s.old is not None and s.reference is not None]
            kl = torch.cat([(old - reference).double().cpu() for old, reference in pairs]) if pairs else None
            flat = adv.reinforce_pp(rewards, lengths, kl, c.kl_coef)
        else:
            groups = rewards.view(-1, self.config.rollout.samples)
            each = ADVANTAGES[c.algorithm](groups)
            if groups.shape[1] > 1:  # what is left of equal rewards is rounding
                each = each * adv.mixed(groups)[:, None]
            flat = each.view(-1).repeat_interleave(lengths)
        return list(flat.split(lengths.tolist()))

    def _minibatches(self, count: int, step: int, epoch: int) -> list[list[int]]:
        c = self.config.learn
        if c.minibatches == 1:
            return [list(range(count))]
        generator = torch.Generator().manual_seed(mix_seed(self.config.seed, "minibatches", step, epoch) % 2**63)
        order = torch.randperm(count, generator=generator)
        return [sorted(part.tolist()) for part in order.tensor_split(c.minibatches) if len(part)]

    @torch.no_grad()
    def _logprobs(self, model: Decoder, answers: Answers) -> list[Tensor]:
        """Log-probabilities of all answers under a model, a tensor per answer."""
        out: list[Tensor] = [torch.empty(0)] * len(answers)
        for batch in self._micro_batches(answers, range(len(answers)), torch.float32):
            logp, _ = token_logprobs(model, batch, self.temperature)
            for i, part in zip(batch.answers, logp.split([answers[i].num_tokens for i in batch.answers]), strict=True):
                out[i] = part
        return out

    def gradients(self, lesson: UpdateBatch, update: int, share: Sequence[int]) -> Sums:
        """Leave the gradients of a share of an update's answers in the parameters, and return what they came to. It is
        cut into micro-batches only for memory's sake. Answers that teach nothing go forward only, if anybody looks."""
        c, answers = self.config.learn, lesson.answers
        wide = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        members = lesson.updates[update]
        lengths = torch.tensor([answers[i].num_tokens for i in members])
        weights = token_weights(lengths, _known(c.aggregate), self.config.rollout.max_tokens)
        weight_of = dict(zip(members, weights.split(lengths.tolist()), strict=True))
        watch = self.watch if update < lesson.fresh else None
        sums = Sums()
        self.optimizer.zero_grad()
        self.model.requires_grad_(True)
        counted = set(lesson.counted(update))
        teaches = any(lesson.teaches[i] for i in counted)
        for batch in self._micro_batches(answers, [i for i in share if i in counted], wide):
            looks = watch if any(map(self.wants, batch.answers)) else None
            with torch.set_grad_enabled(teaches):
                loss = self._loss(batch, lesson, weight_of, looks, sums)
            if teaches:
                loss.backward()
            self.on_batch()
        self.model.requires_grad_(False)
        if watch is not None:
            for batch in self._micro_batches(answers, [i for i in share if i not in counted and self.wants(i)], wide):
                hidden_states(self.model, batch, watch=watch)
                self.on_batch()
        for param in self.model.parameters():
            if param.grad is None:  # nothing in this share teaches anything
                param.grad = torch.zeros_like(param)
        return sums

    def _loss(
        self, batch: MicroBatch, lesson: UpdateBatch, weight_of: dict[int, Tensor], watch: Watch | None, sums: Sums
    ) -> Tensor:
        """What a micro-batch adds to the loss of its update, and to its numbers."""
        c = self.config.learn
        low, high = _known(c.clip_low), _known(c.clip_high)
        logp, entropy = token_logprobs(self.model, batch, self.temperature, c.activation_checkpointing, watch)
        weight = self._row(weight_of, batch, logp)
        a = self._row(lesson.advantage, batch, logp)
        scores = [lesson.scores[i] for i in batch.answers]
        before = _cat([s.old for s in scores], logp)
        before = logp.detach() if before is None else before
        token_loss = policy_loss(logp, before, a, low, high)
        if c.importance_sampling_cap is not None:
            token_loss = token_loss * importance_weights(before, batch.rollout_logp, c.importance_sampling_cap)
        loss = (weight * token_loss).sum()
        reference = _cat([s.reference for s in scores], logp)
        if reference is not None and self._pulls():
            kl = kl_k3(logp, reference)
            loss = loss + c.kl_coef * (weight * kl).sum()
            sums.add(kl=kl)
        mismatch = before - batch.rollout_logp
        sums.add(
            loss=loss,
            entropy=entropy,
            clipped=clipped(logp, before, a, low, high),
            update_kl=before - logp,
            mismatch=-mismatch,
            mismatch_k3=torch.exp(mismatch) - mismatch - 1,
        )
        return loss

    def _micro_batches(self, answers: Answers, share: Sequence[int], wide: torch.dtype) -> Iterator[MicroBatch]:
        """Answers that go through the model together."""
        for part in plan([answers[i].length for i in share], self.config.learn.micro_tokens):
            yield pack(answers, [share[i] for i in part], self.model.device, wide)

    @staticmethod
    def _row(parts: dict[int, Tensor] | list[Tensor], batch: MicroBatch, like: Tensor) -> Tensor:
        return torch.cat([parts[i] for i in batch.answers]).to(like.device, like.dtype)

    def apply(self, lesson: UpdateBatch, update: int, sums: Sums) -> dict[str, float]:
        """Clip, step, and say what happened; gradients and `sums` are those of the whole update. One that is not finite
        is thrown away."""
        c = self.config.learn
        tokens = sum(lesson.answers[i].num_tokens for i in lesson.counted(update))
        rate = learning_rate(self.updates, self.total_updates, c.lr, c.warmup_steps, c.lr_scheduler, c.min_lr_ratio)
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
            "actor/tokens": float(sum(lesson.answers[i].length for i in lesson.updates[update] if lesson.teaches[i])),
            "actor/skipped": float(skipped),
            "rollout_corr/kl": sums.mean("mismatch", tokens),
            "rollout_corr/k3_kl": sums.mean("mismatch_k3", tokens),
        }
        if self._pulls():
            metrics["actor/kl_loss"] = sums.mean("kl", tokens)
        return metrics

    def state(self, names: Collection[str] | None = None, reference: bool = True) -> dict[str, Tensor]:
        """What a checkpoint needs: of all that is held, or of the parameters called `names`."""
        tensors = {f"optimizer.{k}": v for k, v in self.optimizer.state(names).items()}
        if self.reference is not None and reference:
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


def _cat(parts: Sequence[Tensor | None], like: Tensor) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.cat(known).to(like.device, like.dtype) if known else None


def mean_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(u[name] for u in updates) / len(updates) for name in updates[0]}
