"""Which tokens a drafter can propose.

Scoring a vocabulary is most of what a draft token costs: with 152,064 tokens and the geometry of a 7B, six of them take
0.66 of a decode step, with 32,768 tokens 0.35, with 8,192 0.28. Rare tokens are never proposed then, which ends the
accepted path where they come.
Completions of a task's prompts use few of a large vocabulary's tokens; how many are enough can be counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain, islice

import torch
from torch import Tensor

from paceline.model.decoder import Decoder

LARGE_VOCAB = 65536
DRAFT_VOCAB = 32768  # of a large one, unless completions show that fewer are enough
MIN_DRAFT_VOCAB = 8192
"""Of a 7B's drafter, the head with so few is a tenth of what it reads: fewer would save little."""
VOCAB_MULTIPLE = 1024
RARE = 0.005  # share of sampled tokens that need not be proposed: the smaller head saves more than these rounds cost
LAST = 2560  # tokenizers have their special tokens at the end, before what pads the matrix


def draft_vocab_size(vocab_size: int, wanted: int | None = None, written: Counter[int] | None = None) -> int:
    """How many tokens: as many as are wanted, by default all; of very many, as many as what was `written` shows to be
    enough."""
    if wanted or vocab_size <= LARGE_VOCAB:
        return min(vocab_size, wanted or vocab_size)
    return enough(written) if written else DRAFT_VOCAB


def enough(written: Counter[int]) -> int:
    """How many tokens make up all but a RARE few of what will be written. What has not been written yet will come as
    often as what was written once (Good and Turing); if that is too often, too little was written to tell."""
    budget = RARE * written.total() - sum(times == 1 for times in written.values())
    if budget < 0:
        return DRAFT_VOCAB
    count = len(written)
    for times in sorted(written.values()):
        budget -= times
        if budget < 0:
            break
        count -= 1
    return min(DRAFT_VOCAB, max(MIN_DRAFT_VOCAB, -(-count // VOCAB_MULTIPLE) * VOCAB_MULTIPLE))


def choose_tokens(policy: Decoder, wanted: int | None = None, written: Iterable[int] = ()) -> Tensor | None:
    """The tokens that occur most often in what was `written`; where that is not enough, those that end a completion,
    the special ones at the end of the vocabulary, and the first, which tokenizers learn from the most frequent strings.
    None for all."""
    size = policy.config.vocab_size
    if draft_vocab_size(size, wanted) == size:
        return None
    seen = Counter(written)
    count = draft_vocab_size(size, wanted, seen)
    frequent = (token for token, _ in seen.most_common())
    others = chain(policy.config.eos_ids, range(size - min(LAST, count // 4), size), range(size))
    chosen = islice(dict.fromkeys(chain(frequent, others)), count)
    return torch.tensor(sorted(chosen), device=policy.device)
