"""How exactly numbers are multiplied: in bf16 where the machine is faster at it, in fp32 elsewhere.

Not every processor that knows bf16 gains by it: without AMX, many an Intel core multiplies bf16 at half the rate of
fp32. So the choice is measured, once a process, with one small product.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

_ROWS, _WIDTH, _REPEATS = 256, 768, 5


def default_device() -> str:
    """A GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@cache
def fast_dtype(device_type: str) -> torch.dtype:
    """bf16 on a GPU, and on a CPU that multiplies it faster than fp32; else fp32."""
    if device_type != "cpu" or _seconds(torch.bfloat16) < _seconds(torch.float32):
        return torch.bfloat16
    return torch.float32


def mixed_precision() -> str:
    """Accelerate's word for training in `fast_dtype` on the default device: bf16 or no."""
    return "bf16" if fast_dtype(default_device()) == torch.bfloat16 else "no"


def fast_autocast(device_type: str) -> torch.autocast:
    """Autocast to `fast_dtype`; where that is fp32, a context that changes nothing."""
    return torch.autocast(device_type, torch.bfloat16, enabled=fast_dtype(device_type) == torch.bfloat16)


@contextmanager
def fast_matmul() -> Iterator[None]:
    """Let fp32 products use bf16 or TF32 units where the machine gains by them; sums and results stay fp32."""
    before = torch.get_float32_matmul_precision()
    gains = torch.cuda.is_available() or fast_dtype("cpu") == torch.bfloat16
    torch.set_float32_matmul_precision("medium" if gains else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _seconds(dtype: torch.dtype) -> float:
    """The quickest of a few products on the CPU, after one that warms up."""
    a, b = torch.ones(_ROWS, _WIDTH, dtype=dtype), torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    seconds = []
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
