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
from functools import partial
from typing import Any, cast

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
        self.kernels: Kernels | None = None
        self.why_not_c: str | None = None
        try:
            self.kernels = Kernels(dtype)
        except NotBuilt as fault:
            self.why_not_c = str(fault)
            warnings.warn(
                f"the fast CPU engine has no C kernels here ({fault}), so the slower reference engine decodes instead; "
                "install gcc or clang for speed",
                stacklevel=2,
            )
        kernels = cast(Kernels, self.kernels)  # nothing is packed without them
        self._targets = Prepared(partial(PackedTarget.pack, kernels=kernels))
        self._drafts = Prepared(partial(PackedDraft.pack, kernels=kernels))

    @property
    def about(self) -> dict[str, Any]:
        """See `Engines.about`."""
        return {**(self.kernels or REFERENCE).about, "why not C": self.why_not_c}

    def open_target(self, target: Target, *, taps: Sequence[int], rows: int, capacity: int, width: int) -> TargetEngine:
        """See `Engines.open_target`; Llama and Qwen3 of plain build and without hooks, on the CPU."""
        if self.kernels is None:
            return REFERENCE.open_target(target, taps=taps, rows=rows, capacity=capacity, width=width)
        return CpuTarget(target, self._targets.of(target), taps, rows, capacity)

    def open_draft(self, draft: Draft, *, rows: int, capacity: int, width: int) -> DraftEngine:
        """See `Engines.open_draft`; any draft on the CPU without hooks."""
        if self.kernels is None:
            return REFERENCE.open_draft(draft, rows=rows, capacity=capacity, width=width)
        return CpuDraft(draft, self._drafts.of(draft), rows, capacity, width)
