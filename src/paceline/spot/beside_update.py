"""With one worker nobody is idle, but the learner runs the policy over every answer anyway: what the policy thought of
each token comes for free, and a set share of the step's time goes into the drafter after the update."""

from __future__ import annotations

import time

from torch import Tensor

from paceline.config import SpotConfig
from paceline.draft.neural import NeuralDrafter
from paceline.draft.training import TrainSettings, suitable_rate
from paceline.spot.buffer import Sample, SpotBuffer
from paceline.spot.trainer import SpotSettings, SpotTrainer


class BesideUpdate:
    def __init__(self, drafter: NeuralDrafter, config: SpotConfig, seed: int, version: int = 0):
        self.config = config
        self.buffer = SpotBuffer(int(config.buffer_mb * 2**20))
        rate = config.drafter_lr or suitable_rate(drafter.policy)
        self.trainer = SpotTrainer(
            drafter,
            self.buffer,
            TrainSettings(lr=rate, loss=config.loss),
            SpotSettings(step_s=config.step_ms / 1e3),
            seed,
        )
        self.trainer.version = version
        self._prompts: list[int] = []

    def begin(self, prompts: list[int]) -> None:
        """An update on answers to prompts of these lengths is about to be made."""
        self._prompts = prompts
        self.buffer.next_step()

    def watch(self, answer: int, tokens: Tensor, features: Tensor, hidden: Tensor) -> None:
        """The learner has run the policy over one of them."""
        self.buffer.put(Sample(tokens.int(), self._prompts[answer], features, hidden))

    def train(self, step_s: float) -> dict[str, float]:
        """Train for the set share of a step that has taken so long, and publish -> what happened, as metrics."""
        end = time.perf_counter() + self.config.share * step_s
        spell = self.trainer.train(lambda: time.perf_counter() < end)
        verdict = self.trainer.publish()
        metrics = {
            "drafter/version": float(self.trainer.version),
            "drafter/published": float(verdict is not None and verdict.better),
            "drafter/steps": float(spell.steps),
            "drafter/thrown_away": float(spell.thrown_away),
        }
        if spell.steps:
            metrics |= {"drafter/loss": spell.loss, "drafter/tok_s": spell.tokens / spell.seconds}
        if verdict is not None:
            metrics |= {
                "drafter/expected_accept_before": verdict.before,
                "drafter/expected_accept_after": verdict.after,
            }
        return metrics
