"""How good a screening is: which outages break a limit, and how badly.

The set part is F1 of the outages that were named, 1 if there are none and none was named. The severity part is the
mean, over the outages that do break a limit, of max(0, 1 - |said - true| / CLOSE), 0 for one that was not named.
The reward is 0.7 of the one and 0.3 of the other; where nothing breaks, the first alone. What is no screening gets
`WORST`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline.tasks.answers import final_answer

CLOSE = 30.0  # percent of the limit
SET_SHARE = 0.7
WORST = -0.2
ENTRY = re.compile(r"(\d+-\d+)\s*[:=]\s*(\d+(?:\.\d+)?)\s*%?")
NONE = re.compile(r"\bnone\b", re.IGNORECASE)


def parse_screening(text: str) -> dict[str, float] | None:
    """Severity by outage, in the final answer or else the last line; empty for `none`, None if it is neither."""
    answer = final_answer(text)
    lines = text.strip().splitlines()
    said = answer if answer is not None else lines[-1] if lines else ""
    entries = ENTRY.findall(said)
    if not entries:
        return {} if NONE.search(said) else None
    names = [name for name, _ in entries]
    if len(set(names)) < len(names):
        return None  # an outage with two severities has none
    return {name: float(value) for name, value in entries}


def score(said: Mapping[str, float] | None, truth: Mapping[str, float]) -> float:
    """From the severities of all candidates, as the power flow has them."""
    if said is None or any(name not in truth for name in said):
        return WORST
    breaking = {name for name, severity in truth.items() if severity > 100.0}
    if not breaking:
        return 0.0 if said else 1.0
    found = len(breaking & said.keys())
    f1 = 2 * found / (len(breaking) + len(said))
    close = [max(0.0, 1 - abs(said[name] - truth[name]) / CLOSE) if name in said else 0.0 for name in breaking]
    return SET_SHARE * f1 + (1 - SET_SHARE) * sum(close) / len(close)
