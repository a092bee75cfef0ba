"""Engines that decode on a CPU as fast as its memory delivers the weights, for `generate` and `generate_batch`.

    generate(target, draft, prompt_ids, max_new_tokens=256, engines=FastCpu())

Weights are packed once, in bfloat16 where that is fast, and read once per pass whatever its width up to a block, so
verifying a block costs about as much as reading one token. The work is done by C kernels built at first use (some
seconds); where there is no compiler, the same steps run in torch. `FastCpu(torch.float32)` is the exact choice: its
tokens are those of the reference engines. See `cpu/` for the parts and `divergence` for what bfloat16 changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from dspine_probe.decoding.cpu.build import NotBuilt
from dspine_probe.decoding.cpu.compute import Compute
from dspine_probe.decoding.cpu.draft import CpuDraft, PackedDraft
from dspine_probe.decoding.cpu.native import NativeCompute
from dspine_probe.decoding.cpu.target import CpuTarget, PackedTarget
from dspine_probe.decoding.cpu.torch_compute import TorchCompute, multiplies_bfloat16
from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError
from dspine_probe.target import Target

DTYPES = (torch.bfloat16, torch.float32)


class FastCpu:
    """Opens fast CPU engines.

    Packed weights are kept as long as their model lives: a model that is changed later needs a new `FastCpu`.

    Args:
        dtype: of weights, caches and operands; by default bfloat16, or float32 where bfloat16 products are slow.
        native: whether to use the C kernels; by default where they can be built.

    Raises:
        UsageError: another dtype, or the kernels are asked for and cannot be built.
    """

    def __init__(self, dtype: torch.dtype | None = None, *, native: bool | None = None) -> None:
        if dtype not in (None, *DTYPES):
            raise UsageError(f"fast CPU decoding was asked for {dtype}; it computes in bfloat16 or float32")
        self.why_not_native: str | None = None
        self.compute = self._choose(dtype, native)
        self._targets: weakref.WeakKeyDictionary[Target, PackedTarget] = weakref.WeakKeyDictionary()
        self._drafts: weakref.WeakKeyDictionary[Draft, PackedDraft] = weakref.WeakKeyDictionary()

    def _choose(self, dtype: torch.dtype | None, native: bool | None) -> Compute:
        if native is not False:
            try:
                return NativeCompute(dtype or torch.bfloat16)
            except NotBuilt as fault:
                if native:
                    raise UsageError(f"{fault}; leave native out to decode with torch instead") from fault
                self.why_not_native = str(fault)
        fastest = torch.bfloat16 if multiplies_bfloat16() else torch.float32
        return TorchCompute(dtype or fastest)

    @property
    def about(self) -> dict[str, Any]:
        """What computes, for the record of a measurement."""
        return {**self.compute.about, "why not C": self.why_not_native}

    def open_target(
        self, target: Target, *, taps: Sequence[int], rows: int, capacity: int, width: int
    ) -> CpuTarget:
        """See `Engines.open_target`; Llama and Qwen3 without biases, on the CPU."""
        packed = self._targets.get(target)
        if packed is None:
            packed = self._targets[target] = PackedTarget.pack(target, self.compute)
        return CpuTarget(target, packed, taps, rows, capacity)

    def open_draft(self, draft: Draft, *, rows: int, capacity: int, width: int) -> CpuDraft:
        """See `Engines.open_draft`; any draft on the CPU without hooks."""
        packed = self._drafts.get(draft)
        if packed is None:
            packed = self._drafts[draft] = PackedDraft.pack(draft, self.compute)
        return CpuDraft(draft, packed, rows, capacity, width)
