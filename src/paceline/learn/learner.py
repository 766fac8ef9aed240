"""The learner: turns the trajectories of a step into an update of the policy, in place. Its verbs, in their order:

    score        log-probabilities that must be known before the policy changes
    make_batch   the step's `UpdateBatch`: advantages, and which trajectories each update takes
    gradients    of one update, left in the parameters
    apply        clip them and step

Several learners can share the work. The `UpdateBatch` is the same for all; each makes the gradients of its share of the
trajectories, somebody sums them, and then each applies the sum to the parameters that its optimizer holds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from paceline.config import Config
from paceline.core import Trajectories, Trajectory
from paceline.learn.algorithms import ALGORITHMS
from paceline.learn.logprobs import OnHidden, Policy, hidden_states, token_logprobs
from paceline.learn.losses import clipped, importance_weights, kl_k3, policy_loss, token_weights
from paceline.learn.optimizer import AdamW
from paceline.learn.packing import MicroBatch, pack, plan
from paceline.learn.schedule import learning_rate
from paceline.learn.token_sums import TokenSums
from paceline.learn.update_batch import Score, UpdateBatch, has_kl_loss, make_update_batch
from paceline.lora.adapters import Lora

T = TypeVar("T")


class Learner:
    def __init__(self, model: Policy, config: Config, names: Iterable[str] | None = None, lora: Lora | None = None):
        """`names` are the parameters that this learner's optimizer holds; all, unless others share the work. With
        `lora` they are adapters of the model, and its own weights only show them."""
        self.model = model
        self.config = config
        self.lora = lora
        self.parameters = dict(model.named_parameters()) if lora is None else lora.parameters
        """What is learned, by name."""
        c = config.learn
        self.optimizer = AdamW(
            self.parameters.items(),
            betas=c.betas,
            eps=c.eps,
            weight_decay=c.weight_decay,
            state_dtype=torch.bfloat16 if c.optimizer_dtype == "bfloat16" else torch.float32,
            master_weights=c.master_weights,
            names=names,
        )
        # Adapters have the base to compare with; all weights need a copy.
        self.reference = copy.deepcopy(model).requires_grad_(False) if c.kl_coef and lora is None else None
        self.on_hidden: OnHidden | None = None
        """Is given the hidden states of each trajectory, the first time it is learned from."""
        self.wants_hidden: Callable[[int], bool] = lambda index: True
        """Whether `on_hidden` will use those of a trajectory: one without a signal runs for its sake alone."""
        self.on_batch: Callable[[], None] = lambda: None
        """Called after every micro-batch."""
        self.updates = 0
        self.total_updates = config.steps * c.epochs * c.minibatches
        self.temperature = config.rollout.temperature or 1.0

    def score(self, trajectories: Trajectories, share: Sequence[int]) -> list[Score]:
        """What has to be known of a share of the trajectories before the policy changes."""
        c = self.config.learn
        # Old log-probabilities are the present ones, unless more than one update is made of the same trajectories.
        several = c.epochs * c.minibatches > 1
        for_reward = c.kl_coef > 0 and ALGORITHMS[c.algorithm].kl_in_reward
        mine = [trajectories[i] for i in share]
        nothing: list[Tensor | None] = [None] * len(mine)
        old = self._logprobs(self.model, mine) if several or for_reward else nothing
        reference = self._reference_logprobs(mine) if c.kl_coef else nothing
        return [Score(*pair) for pair in zip(old, reference, strict=True)]

    def make_batch(self, trajectories: Trajectories, step: int, scores: list[Score]) -> UpdateBatch:
        """What the step is learned from; trajectories come group by group, `rollout.samples` each."""
        return make_update_batch(trajectories, step, scores, self.config)

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """Of all answers under the policy as it is, a tensor [tokens] per answer."""
        return self._logprobs(self.model, trajectories)

    def _reference_logprobs(self, trajectories: Trajectories) -> list[Tensor | None]:
        if self.lora is None:
            assert self.reference is not None, "there is a KL term"
            return [*self._logprobs(self.reference, trajectories)]
        with self.lora.reference() as reference:
            return [*self._logprobs(reference, trajectories)]

    @torch.no_grad()
    def _logprobs(self, model: Policy, trajectories: Trajectories) -> list[Tensor]:
        """Log-probabilities of all answers under a model, a tensor [tokens] per answer."""
        out: list[Tensor] = [torch.empty(0)] * len(trajectories)
        for micro in self._micro_batches(trajectories, range(len(trajectories)), torch.float32):
            logp, _ = token_logprobs(model, micro, self.temperature)
            parts = logp.split([trajectories[i].num_tokens for i in micro.indices])
            for i, part in zip(micro.indices, parts, strict=True):
                out[i] = part
        return out

    def gradients(self, batch: UpdateBatch, update: int, share: Sequence[int]) -> TokenSums:
        """Leave the gradients of a share of an update's trajectories in the parameters -> its sums over tokens. It is
        cut into micro-batches only for memory's sake. Trajectories without a signal go forward only, and only if their
        hidden states are wanted."""
        wide = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        weights = self._token_weights(batch, update)
        on_hidden = self.on_hidden if update < batch.first_epoch else None
        counted = set(batch.counted(update))
        has_signal = any(batch.has_signal[i] for i in counted)
        sums = TokenSums()
        self.optimizer.zero_grad()
        self._require_gradients(True)
        for micro in self._micro_batches(batch.trajectories, [i for i in share if i in counted], wide):
            wanted = on_hidden if any(map(self.wants_hidden, micro.indices)) else None
            with torch.set_grad_enabled(has_signal):
                loss = self._loss(micro, batch, weights, wanted, sums)
            if has_signal:
                loss.backward()
            self.on_batch()
        self._require_gradients(False)
        if on_hidden is not None:
            others = [i for i in share if i not in counted and self.wants_hidden(i)]
            for micro in self._micro_batches(batch.trajectories, others, wide):
                hidden_states(self.model, micro, on_hidden=on_hidden)
                self.on_batch()
        for param in self.parameters.values():
            if param.grad is None:  # nothing in this share has a signal
                param.grad = torch.zeros_like(param)
        return sums

    def _require_gradients(self, whether: bool) -> None:
        for param in self.parameters.values():
            param.requires_grad_(whether)

    def _token_weights(self, batch: UpdateBatch, update: int) -> dict[int, Tensor]:
        """Weight of each token in the loss of an update, by trajectory."""
        indices = batch.updates[update]
        num_tokens = [batch.num_tokens[i] for i in indices]
        c = self.config
        weights = token_weights(torch.tensor(num_tokens), _known(c.learn.aggregate), c.rollout.max_tokens)
        return dict(zip(indices, weights.split(num_tokens), strict=True))

    def _loss(
        self,
        micro: MicroBatch,
        batch: UpdateBatch,
        weights: Mapping[int, Tensor],
        on_hidden: OnHidden | None,
        sums: TokenSums,
    ) -> Tensor:
        """What a micro-batch adds to the loss of its update, and to its sums."""
        c = self.config.learn
        low, high = _known(c.clip_low), _known(c.clip_high)
        logp, entropy = token_logprobs(self.model, micro, self.temperature, c.activation_checkpointing, on_hidden)
        weight = _row([weights[i] for i in micro.indices], logp)
        advantage = _row([batch.advantages[i] for i in micro.indices], logp)
        scores = [batch.scores[i] for i in micro.indices]
        before = _known_row([s.old for s in scores], logp)
        before = logp.detach() if before is None else before
        token_loss = policy_loss(logp, before, advantage, low, high)
        if c.importance_sampling_cap is not None:
            token_loss = token_loss * importance_weights(before, micro.rollout_logp, c.importance_sampling_cap)
        loss = (weight * token_loss).sum()
        reference = _known_row([s.reference for s in scores], logp)
        if reference is not None and has_kl_loss(c):
            kl = kl_k3(logp, reference)
            loss = loss + c.kl_coef * (weight * kl).sum()
            sums.add(kl=kl)
        mismatch = before - micro.rollout_logp
        sums.add(
            loss=loss,
            entropy=entropy,
            clipped=clipped(logp, before, advantage, low, high),
            update_kl=before - logp,
            mismatch=-mismatch,
            mismatch_k3=torch.exp(mismatch) - mismatch - 1,
        )
        return loss

    def _micro_batches(
        self, trajectories: Trajectories, share: Sequence[int], wide: torch.dtype
    ) -> Iterator[MicroBatch]:
        """Trajectories that go through the model together."""
        for part in plan([trajectories[i].length for i in share], self.config.learn.micro_tokens):
            yield pack(trajectories, [share[i] for i in part], self.model.device, wide)

    def apply(self, batch: UpdateBatch, update: int, sums: TokenSums) -> dict[str, float]:
        """Clip, step, and say what happened; gradients and `sums` are those of the whole update. One that is not finite
        is discarded."""
        c = self.config.learn
        tokens = sum(batch.num_tokens[i] for i in batch.counted(update))
        rate = learning_rate(self.updates, self.total_updates, c.lr, c.warmup_steps, c.lr_scheduler, c.min_lr_ratio)
        grads = [p for p in self.parameters.values() if p.grad is not None]
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
            "actor/tokens": float(sum(batch.lengths[i] for i in batch.updates[update] if batch.has_signal[i])),
            "actor/skipped": float(skipped),
            "rollout_corr/kl": sums.mean("mismatch", tokens),
            "rollout_corr/k3_kl": sums.mean("mismatch_k3", tokens),
        }
        if has_kl_loss(c):
            metrics["actor/kl_loss"] = sums.mean("kl", tokens)
        return metrics

    def publish(self) -> None:
        """All learners have the same parameters: have the model's weights be what was learned."""
        if self.lora is not None:
            self.lora.merge()

    def state(self, names: Collection[str] | None = None, reference: bool = True) -> dict[str, Tensor]:
        """What a checkpoint needs: of all that is held, or of the parameters called `names`."""
        tensors = {f"optimizer.{k}": v for k, v in self.optimizer.state(names).items()}
        if self.reference is not None and reference:
            # Parameters, unlike a state dict, name the one tensor of tied embeddings once.
            tensors |= {f"reference.{k}": p.detach() for k, p in self.reference.named_parameters()}
        if self.lora is not None and reference:
            tensors |= {f"reference.{k}": v for k, v in self.lora.start.items()}
        return tensors | {"updates": torch.tensor(self.updates)}

    def load(self, state: dict[str, Tensor]) -> None:
        part = lambda name: {k.removeprefix(name): v for k, v in state.items() if k.startswith(name)}  # noqa: E731
        self.optimizer.load(part("optimizer."))
        self.updates = int(state["updates"])
        if self.reference is not None:
            kept = part("reference.")
            with torch.no_grad():
                for name, param in self.reference.named_parameters():
                    param.copy_(kept[name])
        if self.lora is not None and self.lora.start:
            self.lora.start = part("reference.")


def _known(value: T | None) -> T:
    """A setting that `algorithms.resolve` has filled in."""
    assert value is not None, "the config was not resolved"
    return value


def _row(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """One value per answer token of a micro-batch [R]."""
    return torch.cat(list(parts)).to(like.device, like.dtype)


def _known_row(parts: Sequence[Tensor | None], like: Tensor) -> Tensor | None:
    """The same where it was computed at all."""
    known = [part for part in parts if part is not None]
    return _row(known, like) if known else None
