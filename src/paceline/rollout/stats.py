"""What the engine has done: counts and seconds, and a record of every round."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields, replace

from paceline.draft.strategy import Strategy

PARTS = ("prefill", "plain", "draft", "verify")  # that the seconds of a rollout are divided into


@dataclass(frozen=True)
class RoundRecord:
    """One step of the engine."""

    at: float  # seconds since the engine was made
    seconds: float
    batch: int
    strategy: str  # "prefill" where requests were admitted
    tokens: int


@dataclass
class EngineStats:
    """Counted since the engine was made; the loop takes differences."""

    prefill_s: float = 0.0
    plain_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    prefill_tokens: int = 0
    decoded_tokens: int = 0
    decode_steps: int = 0
    paused: int = 0
    peak_batch: int = 0
    peak_pages: int = 0
    graph_bytes: int = 0
    ahead_tokens: int = 0
    """Tokens that had been written ahead and were verified."""
    ahead_accepted: int = 0
    """Those of them that were accepted."""
    ahead_flips: int = 0
    """Sequences of which not all were."""
    drafted_sequences: int = 0
    """Sequences that had a draft, summed over rounds."""
    drafted_tokens: int = 0
    """Tokens of those rounds: accepted draft tokens, and a bonus token for each sequence."""
    draft_positions: int = 0
    """Positions that were drafted for; a tree has several draft tokens for one."""
    accepted: Counter[int] = field(default_factory=Counter)
    """How often a draft token for the 1st, 2nd, ... position was accepted."""
    rounds: Counter[str] = field(default_factory=Counter)
    """How often each strategy ran."""

    @property
    def decode_s(self) -> float:
        return self.plain_s + self.draft_s + self.verify_s

    @property
    def accept_length(self) -> float:
        """Tokens per sequence and round with a draft, the bonus token counted."""
        return self.drafted_tokens / self.drafted_sequences if self.drafted_sequences else 1.0

    @property
    def first_accept_rate(self) -> float | None:
        """Accepted share of the draft tokens for the first position; None without any."""
        return self.accepted[1] / self.drafted_sequences if self.drafted_sequences else None

    def count(self, strategy: Strategy, seconds: float, sequences: int, tokens: int) -> None:
        """A round has been run."""
        self.decode_steps += 1
        self.decoded_tokens += tokens
        self.peak_batch = max(self.peak_batch, sequences)
        self.rounds[str(strategy)] += 1
        if strategy.plain:
            self.plain_s += seconds

    def count_draft(self, strategy: Strategy, seconds: float, draft_s: float, accepted: list[int], tokens: int) -> None:
        """It was one with a draft, which took `draft_s`, and of which so many tokens were accepted for each
        sequence."""
        self.draft_s += draft_s
        self.verify_s += seconds - draft_s
        self.drafted_sequences += len(accepted)
        self.drafted_tokens += tokens
        self.draft_positions += (strategy.shared or strategy.depth) * len(accepted)
        alive = len(accepted)
        ended = Counter(accepted)
        for position in range(1, strategy.depth + 1):
            alive -= ended[position - 1]
            self.accepted[position] += alive

    def snapshot(self) -> EngineStats:
        return replace(self, rounds=self.rounds.copy(), accepted=self.accepted.copy())

    def since(self, before: EngineStats) -> EngineStats:
        """What the engine did since a snapshot; peaks stay what they are."""
        return replace(self, **{name: getattr(self, name) - getattr(before, name) for name in ADDED})

    def __add__(self, other: EngineStats) -> EngineStats:
        """What two engines did."""
        added = {name: getattr(self, name) + getattr(other, name) for name in ADDED}
        peaks = {name: max(getattr(self, name), getattr(other, name)) for name in PEAKS}
        return replace(self, **added, **peaks)

    def metrics(self) -> dict[str, float]:
        sequences, rounds = self.drafted_sequences, self.rounds
        metrics = {
            "rollout/spec_accept_length": self.accept_length,
            "rollout/spec_rounds": float(rounds.total() - rounds["plain"]),
            "rollout/rounds": float(rounds.total()),
        }
        if sequences:
            metrics["rollout/spec_accept_rate"] = self.accepted.total() / self.draft_positions
            at = sorted(self.accepted.items())
            metrics |= {f"rollout/spec_accept_at/{position}": n / sequences for position, n in at if n}
        if self.ahead_tokens:
            metrics["ahead/verified_tokens"] = float(self.ahead_tokens)
            metrics["ahead/accepted_share"] = self.ahead_accepted / self.ahead_tokens
            metrics["ahead/tokens_per_flip"] = self.ahead_accepted / max(1, self.ahead_flips)
        parts = {name: getattr(self, f"{name}_s") for name in PARTS}
        whole = sum(parts.values())
        metrics |= {f"rollout/share/{name}": seconds / whole for name, seconds in parts.items() if whole}
        metrics |= {f"rollout/rounds/{strategy}": float(n) for strategy, n in sorted(rounds.items()) if n}
        if self.graph_bytes:
            metrics["rollout/graph_gb"] = self.graph_bytes / 2**30
        return metrics


PEAKS = ("peak_batch", "peak_pages", "graph_bytes")
ADDED = tuple(f.name for f in fields(EngineStats) if f.name not in PEAKS)
