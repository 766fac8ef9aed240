"""KV pages: fixed-size blocks of keys and values that sequences own or share, and the count of who does."""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from paceline.errors import UserError
from paceline.kernels.fused import fuses
from paceline.model.config import DecoderConfig
from paceline.setup.machine import machine_memory

CPU_KV_BYTES = 2 * 10**9
GPU_KV_SHARE = 0.5


class PagePool:
    """All pages of an engine. Page 0 is scratch: rows that pad a graph write there, and nobody reads it."""

    def __init__(self, config: DecoderConfig, pages: int, page_size: int, dtype: torch.dtype, device: torch.device):
        assert pages >= 2, "a pool needs the scratch page and one more"
        self.page_size = page_size
        self.pages = pages
        shape = (config.layers, pages, config.kv_heads, page_size, config.head_dim)
        # Zeros, because masked slots still enter a sum on the CPU path, where anything but a number would spoil it.
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        # A layer's pool, and the same as one row of d numbers per page, head and slot.
        self.k_layers, self.v_layers = self.k.unbind(0), self.v.unbind(0)
        self._k_rows = [k.view(-1, config.head_dim) for k in self.k_layers]
        self._v_rows = [v.view(-1, config.head_dim) for v in self.v_layers]
        # Lowest page first: keeps the used part of the pool dense, so that a CPU can read it where it lies.
        self._free = list(range(1, pages))
        self._users = [0] * pages

    @property
    def usable(self) -> int:
        return self.pages - 1

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        assert count <= self.free, "the scheduler admits by pages, so it never asks for more than there are"
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def share(self, pages: list[int]) -> list[int]:
        for page in pages:
            assert self._users[page] > 0, "only a page in use can be shared"
            self._users[page] += 1
        return list(pages)

    def release(self, pages: list[int]) -> None:
        for page in pages:
            self._users[page] -= 1
            assert self._users[page] >= 0, "a page was released twice"
            if self._users[page] == 0:
                heapq.heappush(self._free, page)

    def copy(self, source: int, targets: list[int], tokens: int) -> None:
        """Copy the first `tokens` slots of a page to others, all layers at once."""
        for pool in (self.k, self.v):
            pool[:, targets, :, :tokens] = pool[:, source, None, :, :tokens]

    def compact(self) -> dict[int, int] | None:
        """Move used pages together at the low end, if they lie so thinly that a CPU would read mostly holes.
        Returns where each moved page went; whoever holds a page has to follow."""
        used = [page for page in range(1, self.pages) if self._users[page]]
        if not used or used[-1] <= 1.5 * len(used):
            return None
        free = [page for page in range(1, len(used) + 1) if not self._users[page]]
        moves = dict(zip(used[len(used) - len(free) :], free, strict=True))
        source, target = list(moves), list(moves.values())
        for pool in (self.k, self.v):
            pool[:, target] = pool[:, source]
        for a, b in moves.items():
            self._users[b], self._users[a] = self._users[a], 0
        self._free = [page for page in range(1, self.pages) if not self._users[page]]
        return moves

    def slots(self, pages: Tensor, offsets: Tensor) -> Tensor:
        """Row numbers [N * kv_heads] of tokens, for `write`."""
        kv_heads = self.k.shape[2]
        heads = torch.arange(kv_heads, device=pages.device)
        return ((pages.long()[:, None] * kv_heads + heads) * self.page_size + offsets.long()[:, None]).view(-1)

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer, a row for every slot."""
        return self._k_rows[layer], self._v_rows[layer]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put keys and values [N, kv_heads, d] of one layer into their slots."""
        if fuses(k):
            from paceline.kernels.fused_triton import write

            write(k, v, self._k_rows[layer], self._v_rows[layer], slots)
            return
        d = k.shape[-1]
        self._k_rows[layer].index_copy_(0, slots, k.reshape(-1, d))
        self._v_rows[layer].index_copy_(0, slots, v.reshape(-1, d))


def page_bytes(config: DecoderConfig, page_size: int, dtype: torch.dtype) -> int:
    return 2 * config.layers * config.kv_heads * config.head_dim * page_size * dtype.itemsize


def pages_for_batch(batch: int, length: int, page_size: int) -> int:
    """Pages of a pool in which `batch` requests can grow to `length` tokens: for each one more than its tokens fill,
    for tokens that a round writes ahead, and the scratch page."""
    return batch * (-(-length // page_size) + 1) + 1


def default_page_size(device: torch.device, max_batch: int) -> int:
    """A GPU wastes less with small pages. A CPU looks at whole pages, as far into them as the longest request needs:
    one large page is best for a single request, but in a batch short ones would pay for long ones."""
    if device.type == "cuda":
        return 64
    return 256 if max_batch > 2 else 1024


def affordable_pages(wanted: int, size: int, limit: int | None, device: torch.device) -> int:
    """As many pages of `size` bytes as are wanted, within `limit` bytes or what the machine can spare."""
    if limit is not None:
        available = limit
    elif device.type == "cuda":
        available = int(torch.cuda.mem_get_info(device)[0] * GPU_KV_SHARE)
    else:
        available = CPU_KV_BYTES
    pages = min(wanted, available // size)
    memory = machine_memory()
    if device.type == "cpu" and pages * size > memory:
        raise UserError(
            f"KV pages would take {pages * size / 1e9:.3g} GB, but this machine has {memory / 1e9:.3g} GB; "
            "lower rollout.kv_memory_gb"
        )
    if pages < 2:
        raise UserError(
            f"{available / 1e9:.3g} GB for KV pages is less than two pages of {size / 1e6:.1f} MB each; "
            "raise rollout.kv_memory_gb"
        )
    return pages
