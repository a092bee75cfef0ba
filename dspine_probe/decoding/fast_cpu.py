"""The engine that decodes on a CPU as fast as its memory delivers the weights, for `generate` and `generate_batch`.

    generate(target, draft, prompt_ids, max_new_tokens=256, engines=FastCpu())

Weights are packed once, in bfloat16, and read once per pass whatever its width up to a block, so verifying a block
costs about as much as reading one token. The work is done by C kernels built at first use (some seconds); where there
is no C compiler, the reference engine decodes instead, and a warning and `about` say so. `FastCpu(torch.float32)` is
the exact choice: its tokens are those of the reference engine. See `cpu/` for the parts.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from dspine_probe.decoding.cpu.build import NotBuilt
from dspine_probe.decoding.cpu.draft import CpuDraft, PackedDraft
from dspine_probe.decoding.cpu.kernels import Kernels
from dspine_probe.decoding.cpu.target import CpuTarget, PackedTarget
from dspine_probe.decoding.engine import DraftEngine, TargetEngine
from dspine_probe.decoding.prepared import Prepared
from dspine_probe.decoding.reference import REFERENCE
from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError
from dspine_probe.target import Target

DTYPES = (torch.bfloat16, torch.float32)


class FastCpu:
    """Opens fast CPU engines.

    Packed weights are kept as long as their model lives, and packed again when the model has changed.

    Args:
        dtype: of weights, caches and operands.

    Attributes:
        kernels: the C kernels; None where there are none on this machine, for the reason in `about`.

    Raises:
        UsageError: another dtype.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        if dtype not in DTYPES:
            raise UsageError(f"fast CPU decoding was asked for {dtype}; it computes in bfloat16 or float32")
        self.why_not_c: str | None = None
        try:
            self.kernels: Kernels | None = Kernels(dtype)
        except NotBuilt as fault:
            self.kernels, self.why_not_c = None, str(fault)
            warnings.warn(
                f"the fast CPU engine has no C kernels here ({fault}), so the slower reference engine decodes instead; "
                "install gcc or clang for speed",
                stacklevel=2,
            )
        self._targets: Prepared[Target, PackedTarget] = Prepared()
        self._drafts: Prepared[Draft, PackedDraft] = Prepared()

    @property
    def about(self) -> dict[str, Any]:
        """What computes, for the record of a measurement."""
        if self.kernels is None:
            return {**REFERENCE.about, "why not C": self.why_not_c}
        return {**self.kernels.about, "why not C": None}

    def open_target(self, target: Target, *, taps: Sequence[int], rows: int, capacity: int, width: int) -> TargetEngine:
        """See `Engines.open_target`; Llama and Qwen3 of plain build and without hooks, on the CPU."""
        kernels, name = self.kernels, f"target '{target.name}'"
        if kernels is None:
            return REFERENCE.open_target(target, taps=taps, rows=rows, capacity=capacity, width=width)
        packed = self._targets.of(target, target.model, name, lambda: PackedTarget.pack(target, kernels))
        return CpuTarget(target, packed, taps, rows, capacity)

    def open_draft(self, draft: Draft, *, rows: int, capacity: int, width: int) -> DraftEngine:
        """See `Engines.open_draft`; any draft on the CPU without hooks."""
        kernels, name = self.kernels, f"the {type(draft).__name__}"
        if kernels is None:
            return REFERENCE.open_draft(draft, rows=rows, capacity=capacity, width=width)
        packed = self._drafts.of(draft, draft, name, lambda: PackedDraft.pack(draft, kernels))
        return CpuDraft(draft, packed, rows, capacity, width)
