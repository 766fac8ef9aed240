"""A strategy is data: which drafter, how deep, how wide, how many draft tokens to verify. Plain decoding is one."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from paceline.errors import UserError
from paceline.files.reading import shorten

TREE_ROWS = 512  # most rows of a pass that verifies trees: beyond, a pass is bound by compute, and chains win
MAX_TREE_NODES = 63  # a tree's visibility is a 64-bit mask, whose first bit is the last token of the sequence
_FORM = re.compile(
    r"(?P<drafter>[a-z_]{1,40}):(?P<depth>[0-9]{1,4})(x(?P<width>[0-9]{1,4}))?(/(?P<nodes>[0-9]{1,4}))?"
    r"(@(?P<shared>[0-9]{1,4}))?(?P<calm>~)?"
)


@dataclass(frozen=True)
class Strategy:
    """`nodes` draft tokens are verified at once, in a tree of `depth` levels with `width` draft tokens each."""

    drafter: str = "plain"
    depth: int = 0
    width: int = 1
    nodes: int = 0
    noise: bool = True
    """Whether draft tokens are sampled with the noise of their position, or are simply the most likely tokens."""
    shared: int = 0
    """Draft tokens that are verified per request, where requests share them by confidence; 0: each has all of its
    own."""

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """`plain`, `suffix:8`, `neural:5`, `neural:4x3` (three draft tokens per level), `neural:4x3/8` (the best
        eight of them), `neural:10@4` (of chains of ten, four per request on average), `neural:4x3/8~` (drafting
        without noise)."""
        if text == "plain":
            return PLAIN
        match = _FORM.fullmatch(text)
        if not match:
            raise UserError(
                f"'{shorten(text)}' is not a strategy: write plain, or drafter:depth, for example neural:5 or suffix:8"
            )
        depth, width = int(match["depth"]), int(match["width"] or 1)
        nodes = int(match["nodes"] or depth * width)
        if depth < 1 or width < 1 or not depth <= nodes <= min(depth * width, MAX_TREE_NODES):
            raise UserError(
                f"strategy '{text}' does not work: depth and width must be at least 1, "
                f"and the verified draft tokens between depth and depth x width, at most {MAX_TREE_NODES}"
            )
        shared = int(match["shared"] or 0)
        if match["shared"] and (width > 1 or nodes != depth or not 1 <= shared < depth):
            raise UserError(
                f"strategy '{text}' does not work: requests share the draft tokens of chains, at least 1 of each "
                "request's and fewer than its depth"
            )
        return cls(match["drafter"], depth, width, nodes, not match["calm"], shared)

    @property
    def plain(self) -> bool:
        return self.drafter == "plain"

    @property
    def chain(self) -> bool:
        return self.width == 1

    @property
    def num_verified(self) -> int:
        """Tokens of a sequence that a pass verifies: its last token and the draft tokens. The KV cache needs a slot for
        each."""
        return 1 + self.nodes

    def pass_rows(self, batch: int) -> int:
        """Tokens that a pass verifies for so many sequences."""
        return batch * (1 + self.shared if self.shared else self.num_verified)

    def fits(self, batch: int) -> bool:
        """Whether it may pay for so many sequences."""
        if self.shared:
            return batch > 1
        return self.chain or batch * self.num_verified <= TREE_ROWS

    def most_rows(self, batch: int) -> int:
        """Rows of its passes at most, with up to `batch` sequences."""
        return self.pass_rows(batch) if self.chain else min(batch, TREE_ROWS // self.num_verified) * self.num_verified

    @functools.cached_property
    def family(self) -> str:
        """Strategies of a family differ only in depth, so acceptance by depth is known for all of them together."""
        if self.shared:  # how deep each chain is verified depends on both
            return str(self)
        per_level = f"x{self.width}/{self.nodes / self.depth:.3g}" if not self.chain else ""
        return f"{self.drafter}{per_level}{'' if self.noise else '~'}"

    def __str__(self) -> str:
        if self.plain:
            return "plain"
        wide = f"x{self.width}" if self.width > 1 else ""
        some = f"/{self.nodes}" if self.nodes != self.depth * self.width else ""
        budget = f"@{self.shared}" if self.shared else ""
        return f"{self.drafter}:{self.depth}{wide}{some}{budget}{'' if self.noise else '~'}"


PLAIN = Strategy()
