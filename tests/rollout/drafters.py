"""Drafters for tests: one that is always right, one that is always wrong, one that is anything."""

from __future__ import annotations

import random

from paceline.core import Completion
from paceline.draft.base import BaseDrafter, Draft
from paceline.draft.eagle.drafter import EagleDrafter
from paceline.draft.eagle.model import DrafterShape, EagleModel
from paceline.draft.strategy import Strategy


class Scripted(BaseDrafter):
    """Knows what plain decoding has written, and uses it: to be right, or to be wrong on purpose."""

    def __init__(self, name: str, answers: dict[int, Completion], vocab: int, right: bool):
        self.name, self.answers, self.vocab, self.right = name, answers, vocab, right

    def propose(self, sequences, strategy):
        draft = Draft.empty(len(sequences), strategy.nodes)
        for row, sequence in enumerate(sequences):
            written = len(sequence.tokens) - len(sequence.request.prompt)
            ahead = self.answers[sequence.request.id].tokens[written : written + strategy.depth]
            for i, token in enumerate(ahead):
                draft.tokens[row, i] = token if self.right else (token + 1 + i) % self.vocab
        return draft


class Chaos(BaseDrafter):
    """Random trees of random tokens, with the right token somewhere now and then, and sometimes fewer of them."""

    name = "chaos"

    def __init__(self, answers: dict[int, Completion], vocab: int, seed: int = 0):
        self.answers, self.vocab, self.random = answers, vocab, random.Random(seed)

    def propose(self, sequences, strategy):
        draft, r = Draft.empty(len(sequences), strategy.nodes), self.random
        for row, sequence in enumerate(sequences):
            written = len(sequence.tokens) - len(sequence.request.prompt)
            answer = self.answers[sequence.request.id].tokens[written:]
            depths, children = [0], {0: set()}
            for i in range(r.randint(0, strategy.nodes)):
                parent = r.choice([p for p in range(len(depths)) if depths[p] < strategy.depth])
                depth = depths[parent] + 1
                right = answer[depth - 1] if depth <= len(answer) else 0
                token = right if r.random() < 0.7 else r.randrange(self.vocab)
                if token in children[parent]:
                    continue_with = [t for t in range(self.vocab) if t not in children[parent]]
                    token = r.choice(continue_with)
                children[parent].add(token)
                children[i + 1] = set()
                depths.append(depth)
                draft.tokens[row, i], draft.parents[row, i] = token, parent
            draft.parents[row, len(depths) - 1 :] = 0
        return draft


def random_neural(model, seed: int = 0, window: int = 24, vocab=None) -> EagleDrafter:
    return EagleDrafter(EagleModel(model, DrafterShape(64, window), vocab).init_weights(seed, std=0.2))


STRATEGIES = [
    Strategy.parse(text)
    for text in (
        "plain", "suffix:1", "suffix:3", "suffix:8", "suffix:6x3/12", "suffix:4x2",
        "neural:1", "neural:3", "neural:6", "neural:4x3/8", "neural:3x4~", "neural:5x2/7", "neural:5@2", "neural:6@3~",
        "right:4", "right:9", "wrong:3", "wrong:7", "chaos:4x3", "chaos:6x4/20", "chaos:2x5",
    )
]  # fmt: skip
