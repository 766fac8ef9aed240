"""The metrics of a step as lines of text, for the live view and for logs."""

from __future__ import annotations

import math

PARTS = (
    "gen",
    "reward",
    "end_rollout",
    "update_actor",
    "train_drafter",
    "merge_drafter",
    "testing",
    "save_checkpoint",
)
"""Of a step, named as in the metrics: `timing_s/PART`."""
LEARNING_METRICS = (
    ("groups/mixed", "mixed", ".0%"),
    ("response_length/clip_ratio", "cut", ".0%"),
    ("acting/turns/mean", "turns", ".1f"),
    ("actor/entropy", "entropy", ".2f"),
    ("actor/kl_loss", "KL", ".4f"),
    ("actor/pg_clipfrac", "clip", ".1%"),
    ("actor/grad_norm", "grad", ".2f"),
)
SPARKS = " ▁▂▃▄▅▆▇█"
BAR_WIDTH = 40
MIN_SHOWN_S = 0.05  # seconds: a part that took less is left out of a step's line


def line_of(step: int, steps: int, m: dict[str, float]) -> str:
    seconds = {part: m.get(f"timing_s/{part}", 0.0) for part in PARTS}
    split = " + ".join(f"{part} {s:.1f}" for part, s in seconds.items() if s >= MIN_SHOWN_S)
    workers = describe_workers(m)
    return (
        f"step {step:>{len(str(steps))}}/{steps}  reward {m['critic/rewards/mean']:.3f}  "
        f"length {m['response_length/mean']:.0f} (p99 {m['response_length/p99']:.0f})  "
        f"{m['rollout/tok_s']:,.0f} tokens/s  {m['timing_s/step']:.1f} s"
        + (f" = {split}" if split else "")
        + (f"  {workers}" if workers else "")
        + (f"  {invested}" if (invested := describe_investment(m)) else "")
        + (f"  {learning}" if (learning := describe_learning(m)) else "")
    )


def fitted_line(step: int, steps: int, m: dict[str, float], width: int) -> str:
    """As much of a step's line as fits into a terminal; what matters least is left out first."""
    seconds = {part: m.get(f"timing_s/{part}", 0.0) for part in PARTS}
    shown = sorted((part for part in PARTS if seconds[part] >= MIN_SHOWN_S), key=lambda part: -seconds[part])
    parts: list[tuple[int, str]] = [  # how soon it is left out, 0 never
        (0, f"step {step:>{len(str(steps))}}/{steps}"),
        (0, f"reward {m['critic/rewards/mean']:.3f}"),
        (2, f"length {m['response_length/mean']:.0f}"),
        (5, f"(p99 {m['response_length/p99']:.0f})"),
        (3, f"{m['rollout/tok_s']:,.0f} tokens/s"),
        (1, f"{m['timing_s/step']:.1f} s"),
    ]
    parts += [(8 + i, f"{part} {seconds[part]:.1f}") for i, part in enumerate(shown)]
    rank = {"mixed": 4, "cut": 6, "KL": 7}
    known = [(label, f"{label} {m[name]:{form}}") for name, label, form in LEARNING_METRICS if name in m]
    parts += [(rank.get(label, 20), words) for label, words in known]
    if workers := describe_workers(m):
        parts.append((30, workers))
    if invested := describe_investment(m):
        parts.append((29, invested))
    kept: set[int] = set()
    used = -2
    for i in sorted(range(len(parts)), key=lambda i: (parts[i][0], i)):
        if parts[i][0] and used + 2 + len(parts[i][1]) > width:
            break
        kept.add(i)
        used += 2 + len(parts[i][1])
    return "  ".join(words for i, (_, words) in enumerate(parts) if i in kept)


def describe_learning(m: dict[str, float]) -> str:
    """What a step learned from and how, as far as it is known: groups of unequal rewards, answers cut at max_tokens,
    and of the update entropy, KL divergence, clipped tokens and gradient norm."""
    return " ".join(f"{label} {m[name]:{form}}" for name, label, form in LEARNING_METRICS if name in m)


def describe_workers(m: dict[str, float]) -> str:
    """How many workers took part in a step, and what they did with their idle time; nothing if there is only one."""
    if "cluster/workers" not in m:
        return ""
    count = f"{m['cluster/workers']:.0f}"
    lost = m.get("cluster/lost", 0.0)
    words = [f"{count} worker{'s' if count != '1' else ''}"]
    if lost >= 1:
        words.append(f"{lost:.0f} lost")
    if m.get("cluster/training_s", 0.0) >= MIN_SHOWN_S:
        words.append(f"{m['cluster/training_s']:.1f} s of drafter training in idle time")
    if m.get("cluster/ahead_s", 0.0) >= MIN_SHOWN_S:
        words.append(f"{m['cluster/ahead_s']:.1f} s of writing ahead")
    return ", ".join(words)


def describe_investment(m: dict[str, float]) -> str:
    """What was invested in the drafter after a step's update, and what was expected of it; nothing if nothing was."""
    seconds = m.get("drafter/invested_s", 0.0)
    if seconds < MIN_SHOWN_S:
        return ""
    plan = f"{m['drafter/invest_plan_s']:.1f} s planned, expected to save {m['drafter/invest_saves_s']:.0f} s"
    after = m.get("drafter/expected_accept_after")
    reached = f", accept length {after:.2f} expected now" if after is not None else ""
    return f"{seconds:.1f} s invested in the drafter ({plan}{reached})"


def describe_speculation(m: dict[str, float]) -> str:
    """Acceptance in a step, where the time of the rollout went, and which strategies ran most rounds."""
    shares = ", ".join(f"{name} {m[f'rollout/share/{name}']:.0%}" for name in ("plain", "draft", "verify"))
    prefix = "rollout/rounds/"
    runs = sorted(((n, name.removeprefix(prefix)) for name, n in m.items() if name.startswith(prefix)), reverse=True)
    most = ", ".join(f"{name} {n:.0f}" for n, name in runs[:3])
    return (
        f"spec   accept length {m['rollout/spec_accept_length']:.2f}, accept rate {m['rollout/spec_accept_rate']:.0%}; "
        f"time {shares}\nrounds {most}"
    )


def rough_duration(seconds: float) -> str:
    """In one or two units."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 60} min {whole % 60} s" if whole >= 120 else f"{whole} s"


def sparkline(values: list[float], width: int = BAR_WIDTH) -> str:
    """Values that are not finite are blanks."""
    values = values[-width:]
    finite = [v for v in values if math.isfinite(v)]
    low = min(finite, default=0.0)
    high = max(finite, default=0.0)
    scale = (len(SPARKS) - 2) / (high - low) if high > low else 0.0
    return "".join(SPARKS[1 + round((v - low) * scale)] if math.isfinite(v) else SPARKS[0] for v in values)
