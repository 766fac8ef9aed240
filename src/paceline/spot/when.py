"""When the drafter is trained, and how fast it learns: what settings that are left open mean for a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.config import Config

WARM_RATE = 0.1  # of the learning rate, for a drafter that was trained before: the rate that its training ended with


def when_to_train(config: Config, has_drafter: bool) -> str:
    """What `spot.when` means for a run."""
    when = config.spot.when
    if when != "auto":
        return when
    if not has_drafter:
        return "off"
    if config.cluster.workers > 1:
        return "tail"
    # Nobody is idle, so it costs time, which a drafter that is good already has hardly won back where it was measured.
    return "update" if config.speculation.drafter == "new" else "off"
