"""What the engine has done: counted, and round by round for those who look closer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Round:
    """One step of the engine, for those who look at how a rollout went."""

    at: float  # seconds since the engine was made
    seconds: float
    batch: int
    strategy: str  # "prefill" where requests were admitted
    tokens: int


@dataclass
class EngineStats:
    """Counted since the engine was made; the loop takes differences."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    prefill_tokens: int = 0
    decoded_tokens: int = 0
    decode_steps: int = 0
    paused: int = 0
    peak_batch: int = 0
    peak_pages: int = 0
    drafted_texts: int = 0
    """Texts that were guessed for, summed over rounds."""
    drafted_tokens: int = 0
    """Tokens that those rounds wrote: guesses that held, and one per text that the policy wrote itself."""
    rounds: dict[str, int] = field(default_factory=dict)
    """How often each strategy ran."""

    @property
    def accept_length(self) -> float:
        """Tokens per text and round, where there were guesses."""
        return self.drafted_tokens / self.drafted_texts if self.drafted_texts else 1.0

    def count(self, strategy: str, seconds: float, texts: int, tokens: int) -> None:
        """A round has been run."""
        self.decode_s += seconds
        self.decode_steps += 1
        self.decoded_tokens += tokens
        self.peak_batch = max(self.peak_batch, texts)
        self.rounds[strategy] = self.rounds.get(strategy, 0) + 1
        if strategy != "plain":
            self.drafted_texts += texts
            self.drafted_tokens += tokens

    def snapshot(self) -> EngineStats:
        return replace(self, rounds=dict(self.rounds))

    def since(self, before: EngineStats) -> dict[str, float]:
        """What speculation did since a snapshot, as metrics."""
        texts, steps = self.drafted_texts - before.drafted_texts, self.decode_steps - before.decode_steps
        plain = self.rounds.get("plain", 0) - before.rounds.get("plain", 0)
        return {
            "rollout/spec_accept_length": (self.drafted_tokens - before.drafted_tokens) / texts if texts else 1.0,
            "rollout/spec_rounds": float(steps - plain),
            "rollout/rounds": float(steps),
        }
