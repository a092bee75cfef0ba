"""How exactly numbers are multiplied: in fp32, or in bf16 where the machine is faster at it.

A command resolves `--precision auto|fp32|bf16` once, passes the `Precision` to everything that computes, and records
`Precision.record()` beside what it made. Not every processor that knows bf16 gains by it: without AMX, many an Intel
core multiplies bf16 at half the rate of fp32. So `auto` measures one small product; a run that is resumed uses what is
written instead of measuring again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from dspine_probe.errors import UsageError

AUTO, FP32, BF16 = "auto", "fp32", "bf16"
_DTYPES = {FP32: torch.float32, BF16: torch.bfloat16}
_ROWS, _WIDTH, _REPEATS = 256, 768, 5


def default_device() -> str:
    """A GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Precision:
    """What was asked for (auto, fp32 or bf16) and what is used (fp32 or bf16); make one with `resolve`."""

    asked: str
    used: str

    @classmethod
    def resolve(
        cls, asked: str = AUTO, device: str | torch.device | None = None, *, written: str | None = None
    ) -> Precision:
        """Decide once what a run uses.

        Args:
            asked: "auto" takes bf16 on a GPU and on a CPU that multiplies it faster than fp32, else fp32.
            device: where the products are formed; by default a GPU where there is one.
            written: what the run that is being resumed used ("fp32" or "bf16"): "auto" takes it.

        Raises:
            UsageError: another word, or not the precision that the run was begun with.
        """
        if asked not in (AUTO, *_DTYPES):
            raise UsageError(f"precision {asked!r} is unknown; use auto, fp32 or bf16")
        if written is not None and asked not in (AUTO, written):
            raise UsageError(
                f"precision {asked} was asked for and the run was begun in {written}; leave --precision out to go on "
                "with it, or choose another output folder"
            )
        if asked != AUTO:
            return cls(asked, asked)
        kind = torch.device(default_device() if device is None else device).type
        faster = kind != "cpu" or _seconds(torch.bfloat16) < _seconds(torch.float32)
        return cls(asked, written or (BF16 if faster else FP32))

    @property
    def dtype(self) -> torch.dtype:
        """torch's name for what is used."""
        return _DTYPES[self.used]

    @property
    def accelerate(self) -> str:
        """Accelerate's word for mixed precision: "bf16" or "no"."""
        return "bf16" if self.used == BF16 else "no"

    def record(self) -> dict[str, str]:
        """What results, checkpoints and features write down."""
        return {"precision": self.used, "precision_asked": self.asked}

    def autocast(self, device: str | torch.device) -> torch.autocast:
        """Autocast to bf16; in fp32 a context that changes nothing."""
        return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=self.used == BF16)

    @contextmanager
    def matmul(self) -> Iterator[None]:
        """Let products of fp32 tensors use bf16 or TF32 units; sums and results stay fp32. In fp32 nothing changes."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium" if self.used == BF16 else before)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


EXACT = Precision(FP32, FP32)
"""fp32, for what is counted rather than trained: `auto` of the commands that evaluate."""


def name_of(dtype: torch.dtype) -> str:
    """How a dtype is written down: "fp32", "bf16", or torch's own word for another."""
    return next((name for name, known in _DTYPES.items() if known == dtype), str(dtype).removeprefix("torch."))


def recorded(path: Path) -> str | None:
    """The precision that a JSON record says a run uses; None where there is no record, or an old one without it."""
    return json.loads(path.read_text(encoding="utf-8")).get("precision") if path.is_file() else None


def _seconds(dtype: torch.dtype) -> float:
    """The quickest of a few products on the CPU, after one that warms up."""
    a, b = torch.ones(_ROWS, _WIDTH, dtype=dtype), torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    seconds = []
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
