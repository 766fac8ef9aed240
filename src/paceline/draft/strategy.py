"""A strategy is data: which drafter, how deep, how wide, how many guesses to check. Plain decoding is one."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from paceline.errors import UserError
from paceline.files.reading import shorten

TREE_ROWS = 512  # most tokens of all texts that are checked as trees: beyond, computing is what costs, and chains win
MAX_NODES = 63  # a tree's visibility is a 64-bit mask, whose first bit is the token that was written last
_FORM = re.compile(
    r"(?P<drafter>[a-z_]{1,40}):(?P<depth>[0-9]{1,4})(x(?P<width>[0-9]{1,4}))?(/(?P<nodes>[0-9]{1,4}))?(?P<calm>~)?"
)


@dataclass(frozen=True)
class Strategy:
    """`nodes` guesses are checked at once, in a tree of `depth` levels with `width` guesses each."""

    drafter: str = "plain"
    depth: int = 0
    width: int = 1
    nodes: int = 0
    noise: bool = True
    """Whether guesses race with the noise of their position, or are simply the most likely tokens."""

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """`plain`, `suffix:8`, `neural:5`, `neural:4x3` (three guesses per level), `neural:4x3/8` (the best eight of
        them), `neural:4x3/8~` (guessing without noise)."""
        if text == "plain":
            return PLAIN
        match = _FORM.fullmatch(text)
        if not match:
            raise UserError(
                f"'{shorten(text)}' is not a strategy: write plain, or drafter:depth, for example neural:5 or suffix:8"
            )
        depth, width = int(match["depth"]), int(match["width"] or 1)
        nodes = int(match["nodes"] or depth * width)
        if depth < 1 or width < 1 or not depth <= nodes <= min(depth * width, MAX_NODES):
            raise UserError(
                f"strategy '{text}' does not work: depth and width must be at least 1, "
                f"and the checked guesses between depth and depth x width, at most {MAX_NODES}"
            )
        return cls(match["drafter"], depth, width, nodes, not match["calm"])

    @property
    def plain(self) -> bool:
        return self.drafter == "plain"

    @property
    def chain(self) -> bool:
        return self.width == 1

    @property
    def places(self) -> int:
        """Places behind the context that checking writes to, the last token's included."""
        return 1 + self.nodes

    def fits(self, batch: int) -> bool:
        """Whether it may pay for so many texts."""
        return self.chain or batch * self.places <= TREE_ROWS

    def most_rows(self, batch: int) -> int:
        """Tokens that a pass checks at most, where so many texts run at most."""
        return batch * self.places if self.chain else min(batch, TREE_ROWS // self.places) * self.places

    @functools.cached_property
    def family(self) -> str:
        """Strategies of a family differ only in depth, so what is learned about one tells about the others."""
        per_level = f"x{self.width}/{self.nodes / self.depth:.3g}" if not self.chain else ""
        return f"{self.drafter}{per_level}{'' if self.noise else '~'}"

    def __str__(self) -> str:
        if self.plain:
            return "plain"
        wide = f"x{self.width}" if self.width > 1 else ""
        some = f"/{self.nodes}" if self.nodes != self.depth * self.width else ""
        return f"{self.drafter}:{self.depth}{wide}{some}{'' if self.noise else '~'}"


PLAIN = Strategy()
NEURAL = "neural"  # the drafter that lives on the device
DEFAULTS = {
    "suffix": ("suffix:3", "suffix:8", "suffix:6x3/12"),
    "neural": ("neural:2", "neural:3", "neural:5", "neural:7", "neural:10",
               "neural:4x3/8", "neural:6x4/16", "neural:8x4/24"),
}  # fmt: skip


def default_strategies(drafters: list[str]) -> list[Strategy]:
    """Plain decoding, and for each drafter a few that pay at different batch sizes."""
    return [PLAIN, *(Strategy.parse(text) for name in drafters for text in DEFAULTS.get(name, ()))]
