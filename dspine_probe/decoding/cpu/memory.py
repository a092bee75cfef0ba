"""Memory for weights, in huge pages where the system has them.

Weights are read from end to end for every token; with pages of 2 MiB instead of 4 KiB the processor looks up fewer
addresses and fetches further ahead, which was worth about a tenth of the bandwidth where it was measured.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

HUGE = 2 << 20
CHUNK = 16 * HUGE
LINE = 64


class Memory:
    """Tensors packed end to end in large pieces of memory that live as long as any tensor in them."""

    def __init__(self) -> None:
        self.free = torch.empty(0, dtype=torch.uint8, device="cpu")

    def copy(self, source: Tensor) -> Tensor:
        """A contiguous copy of `source`, whose layout may be any."""
        size = math.prod(source.shape) * source.element_size()
        needed = -(-size // LINE) * LINE
        if needed > len(self.free):
            self.free = _huge_pages(max(needed, CHUNK))
        taken, self.free = self.free[:size], self.free[needed:]
        return taken.view(source.dtype).view(source.shape).copy_(source)


def _huge_pages(size: int) -> Tensor:
    """Bytes that start on a huge page; ordinary memory where none can be asked for."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    region = mmap.mmap(-1, size + HUGE)
    try:
        region.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without huge pages
    whole = torch.frombuffer(region, dtype=torch.uint8)
    skip = -whole.data_ptr() % HUGE
    return whole[skip : skip + size]
