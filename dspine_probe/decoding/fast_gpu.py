"""The engine for a GPU, for `generate` and `generate_batch`: fused weights, Triton kernels, captured steps.

    generate(target, draft, prompt_ids, max_new_tokens=256, engines=FastGpu())

Target and draft must be on one CUDA device for speed; elsewhere the same code runs with torch and without graphs, which
is how it is tested, and `about` says so. In fp32 the tokens are those of the reference engine. See `gpu/` for the
parts, `kernels/` for the kernels and `graphs` for what is captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dspine_probe.decoding.gpu.draft import FusedDraft, GpuDraft
from dspine_probe.decoding.gpu.target import FusedTarget, GpuTarget
from dspine_probe.decoding.graphs import Capturing, capturing
from dspine_probe.decoding.kernels.launch import interpreting, triton
from dspine_probe.decoding.prepared import Prepared
from dspine_probe.drafts import Draft
from dspine_probe.target import Target


class FastGpu:
    """Opens GPU engines.

    Fused weights are kept as long as their model lives, and fused again when the model has changed.

    Args:
        capture: how steps are captured; by default as CUDA graphs on a CUDA device, and not at all elsewhere.
    """

    def __init__(self, capture: Capturing | None = None) -> None:
        self.capture = capture
        self._targets, self._drafts = Prepared(FusedTarget.fuse), Prepared(FusedDraft.fuse)

    @property
    def about(self) -> dict[str, Any]:
        """What computes, for the record of a measurement; "why not graphs" is None where steps are captured."""
        cuda = torch.cuda.is_available()
        triton_runs = triton is not None and (cuda or interpreting())
        return {
            "compute": "Triton kernels" if triton_runs else "torch in place of Triton kernels",
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "why not graphs": (self.capture or capturing(torch.device("cuda" if cuda else "cpu"))).reason,
        }

    def open_target(self, target: Target, *, taps: Sequence[int], rows: int, capacity: int, width: int) -> GpuTarget:
        """See `Engines.open_target`; Llama and Qwen3 of plain build and without hooks."""
        how = self.capture or capturing(target.device)
        return GpuTarget(target, self._targets.of(target), taps, rows=rows, capacity=capacity, how=how)

    def open_draft(self, draft: Draft, *, rows: int, capacity: int, width: int) -> GpuDraft:
        """See `Engines.open_draft`; any draft without hooks. While the engine lives, hooking the draft is refused."""
        how = self.capture or capturing(draft.fc.weight.device)
        return GpuDraft(draft, self._drafts.of(draft), rows=rows, capacity=capacity, width=width, how=how)
