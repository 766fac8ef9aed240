"""Causal attention over packed sequences, for learning and prefill.

Sequences are concatenated to one row of N tokens, and each token sees itself and the earlier ones of its own sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class PackedAttention:
    def __init__(self, lengths: list[int], device: torch.device):
        self.lengths = lengths
        self.longest = max(lengths)
        starts = torch.tensor([0, *lengths]).cumsum(0)
        self.starts = starts.to(device=device, dtype=torch.int32)  # [sequences + 1]

    def positions(self) -> Tensor:
        """The position of each token in its sequence, int64 [N]."""
        return torch.cat([torch.arange(n) for n in self.lengths]).to(self.starts.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            from torch.nn.attention.varlen import varlen_attn  # imports the compiler, so only where it is used

            longest = self.longest
            starts = self.starts
            mixed = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0))
            assert isinstance(mixed, torch.Tensor)  # a pair only if the log-sum-exp is asked for
            return mixed.flatten(1)
        # Flash attention on CUDA has no float32; a CPU has no variable-length kernel. One sequence at a time.
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, N, d]
        parts = [x.split(self.lengths, 2) for x in (q, k, v)]
        out = [F.scaled_dot_product_attention(a, b, c, is_causal=True) for a, b, c in zip(*parts, strict=True)]
        return torch.cat(out, 2)[0].transpose(0, 1).flatten(1)
