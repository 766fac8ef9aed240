"""Which tokens a drafter can guess.

Scoring a vocabulary is most of what a guess costs: with 152,064 tokens and the geometry of a 7B, six guesses take 0.66
of a decode step, with 32,768 of them 0.36. Rare tokens are never guessed then, which costs a check where they come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain, islice

import torch
from torch import Tensor

from paceline.model import Decoder

LARGE = 65536
GUESSABLE = 32768
LAST = 2560  # tokenizers have their special tokens at the end, before what pads the matrix


def guessable(vocab_size: int, wanted: int | None = None) -> int:
    """How many tokens: as many as are wanted, by default all unless there are very many."""
    return min(vocab_size, wanted or (GUESSABLE if vocab_size > LARGE else vocab_size))


def choose_tokens(policy: Decoder, wanted: int | None = None, written: Iterable[int] = ()) -> Tensor | None:
    """The tokens that occur most often in what was `written`; where that is not enough, those that end an answer, the
    special ones at the end of the vocabulary, and the first, which tokenizers learn from the most frequent texts. None
    for all."""
    size = policy.config.vocab_size
    count = guessable(size, wanted)
    if count == size:
        return None
    frequent = (token for token, _ in Counter(written).most_common())
    others = chain(policy.config.eos_ids, range(size - min(LAST, count // 4), size), range(size))
    chosen = islice(dict.fromkeys(chain(frequent, others)), count)
    return torch.tensor(sorted(chosen), device=policy.device)
