"""What the engine has done: counted, and round by round for those who look closer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields, replace

from paceline.draft.strategy import Strategy

PARTS = ("prefill", "plain", "draft", "verify")  # that the time of a rollout is divided into


@dataclass(frozen=True)
class RoundRecord:
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
    drafted_texts: int = 0
    """Texts that were guessed for, summed over rounds."""
    drafted_tokens: int = 0
    """Tokens that those rounds wrote: guesses that held, and one per text that the policy wrote itself."""
    guessed: int = 0
    """Places that were guessed; a tree has several guesses for one."""
    held: Counter[int] = field(default_factory=Counter)
    """How often the guess for the 1st, 2nd, ... place held."""
    rounds: Counter[str] = field(default_factory=Counter)
    """How often each strategy ran."""

    @property
    def decode_s(self) -> float:
        return self.plain_s + self.draft_s + self.verify_s

    @property
    def accept_length(self) -> float:
        """Tokens per text and round, where there were guesses."""
        return self.drafted_tokens / self.drafted_texts if self.drafted_texts else 1.0

    @property
    def first_holds(self) -> float | None:
        """Share of first guesses that held; None where there were none."""
        return self.held[1] / self.drafted_texts if self.drafted_texts else None

    def count(self, strategy: Strategy, seconds: float, texts: int, tokens: int) -> None:
        """A round has been run."""
        self.decode_steps += 1
        self.decoded_tokens += tokens
        self.peak_batch = max(self.peak_batch, texts)
        self.rounds[str(strategy)] += 1
        if strategy.plain:
            self.plain_s += seconds

    def count_guesses(
        self, strategy: Strategy, seconds: float, draft_s: float, accepted: list[int], tokens: int
    ) -> None:
        """It was one with guesses: how long making them took, and how many of them held for each text."""
        self.draft_s += draft_s
        self.verify_s += seconds - draft_s
        self.drafted_texts += len(accepted)
        self.drafted_tokens += tokens
        self.guessed += strategy.depth * len(accepted)
        alive, ended = len(accepted), Counter(accepted)
        for place in range(1, strategy.depth + 1):
            alive -= ended[place - 1]
            self.held[place] += alive

    def snapshot(self) -> EngineStats:
        return replace(self, rounds=self.rounds.copy(), held=self.held.copy())

    def since(self, before: EngineStats) -> EngineStats:
        """What the engine did since a snapshot; peaks stay what they are."""
        return replace(self, **{name: getattr(self, name) - getattr(before, name) for name in ADDED})

    def __add__(self, other: EngineStats) -> EngineStats:
        """What two engines did."""
        added = {name: getattr(self, name) + getattr(other, name) for name in ADDED}
        peaks = {name: max(getattr(self, name), getattr(other, name)) for name in PEAKS}
        return replace(self, **added, **peaks)

    def metrics(self) -> dict[str, float]:
        texts, rounds = self.drafted_texts, self.rounds
        metrics = {
            "rollout/spec_accept_length": self.accept_length,
            "rollout/spec_rounds": float(rounds.total() - rounds["plain"]),
            "rollout/rounds": float(rounds.total()),
        }
        if texts:
            metrics["rollout/spec_accept_rate"] = self.held.total() / self.guessed
            metrics |= {f"rollout/spec_accept_at/{place}": n / texts for place, n in sorted(self.held.items()) if n}
        parts = {name: getattr(self, f"{name}_s") for name in PARTS}
        whole = sum(parts.values())
        metrics |= {f"rollout/share/{name}": seconds / whole for name, seconds in parts.items() if whole}
        metrics |= {f"rollout/rounds/{strategy}": float(n) for strategy, n in sorted(rounds.items()) if n}
        if self.graph_bytes:
            metrics["rollout/graph_gb"] = self.graph_bytes / 2**30
        return metrics


PEAKS = ("peak_batch", "peak_pages", "graph_bytes")
ADDED = tuple(f.name for f in fields(EngineStats) if f.name not in PEAKS)
