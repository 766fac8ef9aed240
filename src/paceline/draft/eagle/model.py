"""The drafter's network, in EAGLE-3's shape: one decoder layer over the policy's features, with the policy's own
embeddings and head, so that it follows the policy for free.

Its entry for position p of a sequence is made of token p and of the policy's features of token p-1: the three tapped
hidden states, fused to one. From there the layer's output stands for the features, draft token after draft token. Its
cache is a window of its latest entries (`eagle.cache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.kernels.fused import fuses
from paceline.kernels.positions import rotations
from paceline.model.decoder import Attention, Decoder, Layer, last_active_layer, rms_norm

NEW_WINDOW = 128  # entries that a draft token of an untrained drafter looks back on


@dataclass(frozen=True)
class DrafterShape:
    intermediate_size: int
    window: int = 512
    """Entries that a draft token attends to."""
    own_head: bool = False
    """Whether it brings a head of its own, as drafters from elsewhere do, instead of the policy's."""
    block: int = 0
    """Draft tokens that one pass makes, behind learned masks; 0 makes them one after the other."""
    mask_token: int = 0
    """The token of the policy that stands for draft tokens that are not known yet, in a block."""
    sequential: bool = False
    """Whether a block's draft tokens are told the one before them, by a small network in front of the head."""


class EagleModel(nn.Module):
    vocab: Tensor | None

    def __init__(self, policy: Decoder, shape: DrafterShape | None = None, vocab: Tensor | None = None):
        """`vocab` lists the tokens that it can propose; by default all."""
        super().__init__()
        c = policy.config
        self.shape = shape or DrafterShape(c.intermediate_size, min(DrafterShape.window, c.max_positions))
        self.tap_layers = c.tap_layers
        own = replace(
            c,
            intermediate_size=self.shape.intermediate_size,
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            qk_norm=False,
        )
        self._policy = (policy,)  # in a tuple, so that its parameters are not this module's
        h = c.hidden_size
        self.fc = nn.Parameter(torch.empty(h, 3 * h))
        self.embed_norm = nn.Parameter(torch.empty(h))
        self.layer = Layer(own, c.layers, concat_size=h)
        self.norm = nn.Parameter(torch.empty(h))
        vocab_size = c.vocab_size if vocab is None else len(vocab)
        self.own_head = nn.Parameter(torch.empty(vocab_size, h)) if self.shape.own_head else None
        self.mask_hidden = nn.Parameter(torch.empty(1, 3 * h)) if self.shape.block else None
        self.mix_in = nn.Parameter(torch.empty(h, 2 * h)) if self.shape.sequential else None
        self.mix_out = nn.Parameter(torch.empty(h, h)) if self.shape.sequential else None
        self.register_buffer("vocab", vocab, persistent=False)
        self.to(device=policy.device, dtype=policy.dtype)
        self._head: Tensor | None = None
        self.requires_grad_(False)

    @property
    def policy(self) -> Decoder:
        return self._policy[0]

    @torch.no_grad()
    def init_weights(self, seed: int = 0, std: float = 0.02) -> EagleModel:
        generator = torch.Generator("cpu").manual_seed(seed)
        for param in self.parameters():
            if param.dim() < 2:
                param.fill_(1.0)
            else:
                param.copy_(torch.empty(param.shape).normal_(0, std, generator=generator))
        if self.mix_out is not None:
            self.mix_out.zero_()
        return self

    def fuse(self, features: Tensor) -> Tensor:
        """The policy's tapped states [N, 3 * hidden] -> [N, hidden]"""
        return torch.mm(features, self.fc.t())

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Entries of tokens [N] with what is known of the token before each, [N, hidden] -> [N, hidden]."""
        return self.run(tokens, hidden, self.rotations(positions, hidden.dtype), attention)

    def rotations(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return rotations(positions, self.policy.inv_freq, self.policy.rope_signs, dtype)

    def run(self, tokens: Tensor, hidden: Tensor, turned: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        """`forward` where the rotations are known."""
        return self.step(tokens, hidden, turned, attention)[0]

    def step(
        self, tokens: Tensor, hidden: Tensor, turned: tuple[Tensor, Tensor], attention: Attention
    ) -> tuple[Tensor, Tensor | None]:
        """`run`, and where it comes with that, what the head reads: its output normed."""
        table = self.policy.embed.weight
        layer = self.layer
        if fuses(hidden):
            from paceline.kernels.hopper.epilogue import concat_norm
            from paceline.model import fast  # a GPU's kernels, which nobody else loads

            if fast.applies(hidden, attention):
                normed = concat_norm(tokens, table, self.embed_norm, hidden, layer.input_norm, layer.eps)
                return fast.run_layer(layer, hidden, normed, *turned, attention, self.norm)
        embedded = F.embedding(tokens, table).to(hidden.dtype)
        return layer.forward(hidden, *turned, attention, rms_norm(embedded, self.embed_norm, layer.eps)), None

    def masks(self, count: int) -> tuple[Tensor, Tensor]:
        """Inputs of draft tokens that are not known yet: tokens [count] and hidden [count, hidden]."""
        assert self.mask_hidden is not None, "only a block has masks"
        tokens = torch.full((count,), self.shape.mask_token, device=self.fc.device)
        return tokens, self.fuse(self.mask_hidden).expand(count, -1).contiguous()

    def condition(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """What the head scores, [N, hidden], from the layer's output and the tokens [N] right before those to come."""
        if self.mix_in is None or self.mix_out is None:
            return hidden
        eps = self.layer.eps
        embedded = rms_norm(F.embedding(tokens, self.policy.embed.weight).to(hidden.dtype), self.embed_norm, eps)
        mixed = torch.mm(torch.cat((rms_norm(hidden, self.norm, eps), embedded), -1), self.mix_in.t())
        return hidden + torch.mm(F.silu(mixed), self.mix_out.t())

    def logits(self, hidden: Tensor, normed: Tensor | None = None) -> Tensor:
        """[N, hidden] -> scores of the next token [N, draft vocabulary]; quicker where it is known normed."""
        if normed is None:
            normed = rms_norm(hidden, self.norm, self.layer.eps)
        normed = normed.to(self.policy.dtype)
        if self.own_head is not None:
            return torch.mm(normed, self.own_head.t())
        return self.policy.logits(normed) if self.vocab is None else torch.mm(normed, self.head().t())

    def head(self) -> Tensor:
        """The rows of the policy's head that belong to the draft vocabulary; a copy, so `refresh` it."""
        if self._head is None:
            assert self.vocab is not None
            with torch.inference_mode(False):  # or it could not be written to outside of it
                self._head = self.policy.head.weight.detach()[self.vocab]
        return self._head

    def refresh(self) -> None:
        """The policy has changed: bring the copied rows of its head up to date, in place."""
        if self._head is not None and self.vocab is not None:
            torch.index_select(self.policy.head.weight.detach(), 0, self.vocab, out=self._head)


def new_drafter(
    policy: Decoder, window: int, seed: int, vocab: Tensor | None = None, block: int = 0, sequential: bool = False
) -> EagleModel:
    """An untrained one, as wide as a layer of its policy; with `block`, one that makes so many draft tokens in a pass,
    whose mask is the last token of the vocabulary. It begins with what it can take over from the last layer that
    does something: after as much training its accept length is higher by a tenth."""
    c = policy.config
    mask = c.vocab_size - 1 if block else 0
    shape = DrafterShape(c.intermediate_size, min(window, c.max_positions), False, block, mask, sequential)
    drafter = EagleModel(policy, shape, vocab).init_weights(seed)
    theirs = dict(last_active_layer(policy).named_parameters())
    with torch.no_grad():
        for name, mine in drafter.layer.named_parameters():
            if mine.shape == theirs[name].shape:  # all but qkv, which reads embeddings as well
                mine.copy_(theirs[name])
    return drafter


@torch.no_grad()
def copy_of(drafter: EagleModel, weights: Sequence[Tensor] | None = None) -> EagleModel:
    """Another drafter of the same policy, with the same weights or with these."""
    copy = EagleModel(drafter.policy, drafter.shape, drafter.vocab)
    for own, weight in zip(copy.parameters(), weights or list(drafter.parameters()), strict=True):
        own.copy_(weight)
    return copy
