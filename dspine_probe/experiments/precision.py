"""How exactly experiments multiply."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def fast_matmul() -> Iterator[None]:
    """Let fp32 products use bf16 or TF32 units where the machine has them; sums and results stay fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
