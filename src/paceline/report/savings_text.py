"""The answer to "was it worth it?" in words, for the report page and the terminal."""

from __future__ import annotations

from paceline.report.savings import Savings

MIN_PLAIN_ROUNDS = 30  # with fewer, one slow or fast plain round can change the answer


def short_answer(s: Savings) -> str:
    if not s.speculative_s:
        return "Speculation was not used in this run, so it saved nothing."
    if not s.compared_s:
        return "This run alone cannot tell: it has no plain rounds to compare with."
    without = s.rollout_s * s.workers + s.net_s
    share = s.net_s / without if without > 0 else 0.0
    few = s.plain_rounds < MIN_PLAIN_ROUNDS
    basis = f", judging by only {_count(s.plain_rounds, 'plain round')}" if few else ""
    if s.net_s > 0:
        saved = f"about {duration(s.net_s)}{_each(s)} saved"
        return f"Yes{basis}: {saved}, {share:.0%} of what rollout would have taken without."
    return f"No{basis}: about {duration(-s.net_s)}{_each(s)} more than without."


def full_answer(s: Savings) -> list[str]:
    """One sentence or two for each part of the answer."""
    return [
        f"{_count(s.steps, 'step')} took {duration(s.total_s)}, "
        f"of which rollout was {duration(s.rollout_s)} ({_share(s.rollout_s, s.total_s)}).",
        _lost(s),
        *_saved(s),
        _training(s),
        "For an exact answer roll out the same prompts with and without speculation: `paceline compare`.",
    ]


def _lost(s: Savings) -> str:
    tail = "with fewer than a quarter of the largest batch decoding"
    if s.workers == 1 and not s.idle_s:
        return f"Lost to the tail: {duration(s.lost_s)} {tail}."
    parts = f"{duration(s.idle_s)} idle with nothing to decode, {duration(s.tail_s)} {tail}"
    return f"Lost to the tail: {duration(s.lost_s)}{_each(s)}, {parts}."


def _saved(s: Savings) -> list[str]:
    if not s.speculative_s:
        return ["Saved by speculation: nothing, because no round was speculative."]
    out = []
    if s.compared_s:
        saved = duration(s.saved_s) if s.saved_s >= 0 else f"nothing, it cost {duration(-s.saved_s)}"
        out.append(
            f"Saved by speculation: about {saved}. Speculative rounds took {duration(s.compared_s)}; plain rounds for "
            f"the same tokens, each as long as the {s.plain_rounds:,} measured in this run, would have taken "
            f"{duration(s.plain_s)}."
        )
    missing = s.speculative_s - s.compared_s
    if missing > 0.005 * s.speculative_s:
        out.append(
            f"Another {duration(missing)} of speculative rounds ran at batch sizes near which no plain round was "
            "measured; they have no comparison and are left out."
        )
    return out


def _training(s: Savings) -> str:
    if not s.training_s:
        return "The drafter was not trained in this run, so that cost nothing."
    used = f", {_share(s.training_idle_s, s.idle_s)} of all idle time" if s.training_idle_s else ""
    invested = (
        f" {duration(s.invested_s)} of the run were invested in it, because a better drafter was expected to save more "
        "in the steps that were left."
        if s.invested_s
        else ""
    )
    return (
        f"Training the drafter took {duration(s.training_s)}{_each(s)}, of which {duration(s.training_idle_s)} "
        f"would have been idle anyway{used}. It cost {duration(s.cost_s)}{_each(s)}: training while nobody "
        f"decoded, and merging new versions.{invested}"
    )


def _each(s: Savings) -> str:
    return " of worker time" if s.workers > 1 else ""


def duration(seconds: float) -> str:
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    if whole >= 120:
        return f"{whole // 60} min {whole % 60} s"
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s"


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"
