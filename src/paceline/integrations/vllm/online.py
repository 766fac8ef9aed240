"""A drafter that learns from a serving engine's finished answers, wherever it does so: in the engine's process or in
one of its own. It knows neither vLLM nor processes: answers go in, versions come out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.config.training import SpotConfig
from paceline.draft.eagle.files import load_drafter
from paceline.draft.eagle.model import EagleModel
from paceline.errors import RunError, UserError
from paceline.integrations.vllm.drafter_folder import DrafterFolder
from paceline.integrations.vllm.features import FollowedPolicy
from paceline.integrations.vllm.messages import NewVersion
from paceline.spot.evaluation import Evaluation
from paceline.spot.learning import MIN_EVAL_TOKENS, DrafterLearning
from paceline.spot.trainer import TrainingStats
from paceline.spot.versions import Versions

RETRY_WRITE_S = 5.0  # between two attempts to write a version, while the disk is full
ROUND_ANSWERS = 512  # after which the answers before count as those of an earlier round, of which the longest stay


class OnlineDrafter:
    def __init__(
        self,
        policy: FollowedPolicy,
        drafter: EagleModel,
        folder: Path,
        config: SpotConfig,
        seed: int = 0,
        warm: bool = False,
        version: int = 0,
        keep: Path | None = None,
    ):
        """`config` says how it is trained; when, is for whoever calls `step`. `keep` is a version that stays on disk:
        the one that the engine was started with."""
        self.policy = policy
        self.drafter = drafter
        self.place = DrafterFolder(folder, keep)
        self.learning = DrafterLearning(drafter, config.model_copy(update={"when": "tail"}), seed, 1, warm, policy.read)
        self.versions = Versions(config, version)
        self.learning.trainer.version = version
        self.updates = 0
        """Of the policy."""
        self._answers = 0  # since the round began
        self._trained = TrainingStats()  # since a version was last evaluated
        self._unwritten = False  # what is published here is not on disk yet
        self._retry_at = 0.0  # when writing is tried again, after it failed
        self._unrecorded = False  # the record could not be written either

    def finished(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """An answer is there."""
        if self._answers >= ROUND_ANSWERS:
            self.learning.begin_rollout(new_step=True)
            self._answers = 0
        self._answers += 1
        self.learning.finished(prompt, tokens)

    def step(self) -> bool:
        """Read some answers or train once, for some ten milliseconds -> whether there was anything to do."""
        return self.learning.step()

    def publish(self) -> NewVersion | None:
        """Make a version of what was trained, if it is time to -> one that is not worse, written; None if there is
        none. A write that failed is tried again every so often."""
        stats = self.learning.stats
        self.learning.stats = TrainingStats()
        self._trained += stats
        metrics = self.versions.make(self.learning.trainer.publish, stats, None)
        self._unwritten |= bool(metrics["drafter/published"])
        new = self._write()
        if "drafter/expected_accept_after" in metrics:
            trained = self._trained
            self._trained = TrainingStats()
            self._record(bool(metrics["drafter/published"]), metrics, trained)
        return new

    def _record(self, published: bool, metrics: Mapping[str, float], stats: TrainingStats) -> None:
        row: dict[str, Any] = {
            "version": self.versions.version,
            "published": published,
            "policy_updates": self.updates,
            "expected_accept_before": round(metrics["drafter/expected_accept_before"], 4),
            "expected_accept_after": round(metrics["drafter/expected_accept_after"], 4),
            "steps": stats.steps,
            "tokens": stats.tokens,
            "seconds": round(stats.seconds, 3),
        }
        failed_before = self._unrecorded or self._retry_at > 0
        self._unrecorded = True
        try:
            self.place.record(row)
        except RunError:
            if failed_before:  # it was told
                return
            raise
        self._unrecorded = False

    def _write(self, wanted: bool = False) -> NewVersion | None:
        """What is not on disk yet. Of several failures in a row the first is raised, and one of what was `wanted`."""
        if not self._unwritten or (time.monotonic() < self._retry_at and not wanted):
            return None
        failed_before = self._retry_at > 0
        try:
            written = self.place.write(self.versions.version, self.drafter)
        except RunError:
            self._retry_at = time.monotonic() + RETRY_WRITE_S
            if failed_before and not wanted:
                return None
            raise
        self._unwritten = False
        self._retry_at = 0.0
        return NewVersion(self.versions.version, str(written))

    def policy_updated(self, weights: Mapping[str, Tensor]) -> NewVersion | None:
        """From now on answers are read by the new policy -> the drafter again, if it brings rows of the policy's head
        that are others now."""
        self.policy.update(weights)
        self.updates += 1
        self.drafter.refresh()
        self.learning.begin_rollout(new_step=True)
        self._answers = 0
        if self.drafter.vocab is not None and not self.drafter.shape.own_head:
            self._unwritten = True
        return self._write()

    def offer(self, folder: Path) -> NewVersion:
        """A drafter from elsewhere takes the place of this one if it is not worse; a UserError says why not."""
        other = load_drafter(folder, self.policy.decoder)
        mine = self.drafter
        same_vocab = (other.vocab is None) == (mine.vocab is None) and (
            other.vocab is None or mine.vocab is None or other.vocab.equal(mine.vocab)
        )
        if other.shape != mine.shape or not same_vocab:
            raise UserError(
                f"the drafter at {folder} has another shape or draft vocabulary than the one in training "
                f"({other.shape} against {mine.shape}); start the engine with it instead"
            )
        evaluation = self.evaluate(list(other.parameters()))
        while evaluation.tokens < MIN_EVAL_TOKENS and self.learning.read_some():
            evaluation = self.evaluate(list(other.parameters()))
        if not evaluation.better:
            raise UserError(_worse(folder, evaluation, self.versions.version))
        self.learning.trainer.adopt(list(other.parameters()))
        self.versions.version += 1
        self._unwritten = True
        new = self._write(wanted=True)
        assert new is not None
        self.place.record({
            "version": self.versions.version,
            "published": True,
            "from": str(folder),
            "expected_accept_before": round(evaluation.before, 4),
            "expected_accept_after": round(evaluation.after, 4),
        })  # fmt: skip
        return new

    def evaluate(self, candidate: list[Tensor]) -> Evaluation:
        """On the held-out answers that were read so far."""
        return self.learning.trainer.evaluate(candidate)


def _worse(folder: Path, evaluation: Evaluation, version: int) -> str:
    if not evaluation.tokens:
        return (
            f"the drafter at {folder} cannot be compared with version {version} yet: no held-out answer was read; "
            "answer some requests first"
        )
    return (
        f"the drafter at {folder} is worse than version {version}: expected accept length {evaluation.after:.2f} "
        f"against {evaluation.before:.2f} on {evaluation.tokens} held-out tokens; the engine keeps version {version}"
    )
