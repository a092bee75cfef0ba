"""The structures and functions of the C kernels, as ctypes sees them; a mirror of `product.h`, `layer.c` and `spine.c`.

Structures hold addresses, so whatever owns one keeps the tensors behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_long, c_void_p

import torch
from torch import Tensor

from dspine_probe.errors import UsageError


class MatrixC(Structure):
    """A packed matrix."""

    _fields_ = [("cells", c_void_p), ("inputs", c_long), ("outputs", c_long)]


class GeometryC(Structure):
    """Sizes, rotary tables and threads of a stack."""

    _fields_ = [
        *((name, c_long) for name in ("width", "inner", "heads", "kv_heads", "head_dim", "capacity")),
        ("eps", c_float),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("causal", c_int),
        ("threads", c_int),
    ]


class LayerC(Structure):
    """Matrices, gains and caches of a layer."""

    _fields_ = [
        *((name, MatrixC) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("norm_in", "norm_mlp", "norm_q", "norm_k", "keys", "values")),
    ]


class PassC(Structure):
    """Where the rows of a pass belong: `width` tokens for each of some cache slots, from position `starts[i]` on."""

    _fields_ = [("sequences", c_long), ("width", c_long), ("slots", POINTER(c_int64)), ("starts", POINTER(c_int64))]

    @classmethod
    def of(cls, slots: Sequence[int], starts: Sequence[int], width: int) -> PassC:
        """From lists."""
        numbers = c_int64 * len(slots)
        return cls(len(slots), width, numbers(*slots), numbers(*starts))


class InjectionC(Structure):
    """One layer's injection."""

    _fields_ = [
        *((name, c_long) for name in ("width", "rank", "message")),
        *((name, MatrixC) for name in ("readout", "mix", "write")),
        ("bias", c_void_p),
        ("threads", c_int),
    ]


class LastWriteC(Structure):
    """The last injection and what its repetition needs."""

    _fields_ = [
        ("last", POINTER(InjectionC)),
        ("gain", c_void_p),
        ("eps", c_float),
        ("sent", c_void_p),
        ("head", c_void_p),
    ]


ARGUMENTS = {
    "product": (c_void_p, c_long, c_void_p, c_void_p, c_float, c_void_p, c_int),
    "best": (c_void_p, c_long, c_void_p, c_void_p, c_float, c_long, c_void_p, c_int),
    "layer": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    "inject": (c_void_p, c_long, c_long, c_void_p, c_void_p, c_void_p),
    "transitions": (c_void_p, c_long, c_long, c_long, c_void_p, c_void_p, c_void_p, c_void_p),
    "walk": (c_long, c_long, c_long, c_void_p, c_void_p, c_void_p),
}


def at(tensor: Tensor, dtype: torch.dtype, *sizes: int) -> int:
    """Where a tensor lies that C reads or writes as `dtype`[sizes].

    Raises:
        UsageError: it is not that: C would read other numbers, or past the end.
    """
    fits = tensor.dtype == dtype and tensor.shape == sizes and tensor.device.type == "cpu"
    if not fits or not tensor.is_contiguous():
        raise UsageError(
            f"a C kernel takes contiguous {dtype} of {sizes} on the CPU and was given {tensor.dtype} of "
            f"{tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; convert it first"
        )
    return tensor.data_ptr()
