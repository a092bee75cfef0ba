"""Engines for a GPU, for `generate` and `generate_batch`: fused weights, Triton kernels, captured steps.

    generate(target, draft, prompt_ids, max_new_tokens=256, engines=FastGpu())

Target and draft must be on one CUDA device for speed; elsewhere the same code runs with torch and without graphs, which
is how it is tested, and `FastGpu.why_eager` says so. In fp32 the tokens are those of the reference engines. See `gpu/`
for the parts, `kernels/` for the kernels and `graphs` for what is captured.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from dspine_probe.decoding.gpu.draft import FusedDraft, GpuDraft
from dspine_probe.decoding.gpu.target import FusedTarget, GpuTarget
from dspine_probe.decoding.graphs import Capturing, capturing
from dspine_probe.drafts import Draft
from dspine_probe.target import Target


class FastGpu:
    """Opens GPU engines.

    Fused weights are kept as long as their model lives: a model that is changed later needs a new `FastGpu`.

    Args:
        capture: how steps are captured; by default as CUDA graphs on a CUDA device, and not at all elsewhere.
    """

    def __init__(self, capture: Capturing | None = None) -> None:
        self.capture = capture
        self._targets: weakref.WeakKeyDictionary[Target, FusedTarget] = weakref.WeakKeyDictionary()
        self._drafts: weakref.WeakKeyDictionary[Draft, FusedDraft] = weakref.WeakKeyDictionary()

    def why_eager(self, device: torch.device) -> str | None:
        """Why steps on this device would not be captured; None if they would be."""
        return self._how(device).reason

    def open_target(
        self, target: Target, *, taps: Sequence[int], rows: int, capacity: int, width: int
    ) -> GpuTarget:
        """See `Engines.open_target`; Llama and Qwen3 without biases and hooks."""
        fused = self._targets.get(target) or FusedTarget.fuse(target)
        self._targets[target] = fused
        return GpuTarget(target, fused, taps, rows=rows, capacity=capacity, how=self._how(target.device))

    def open_draft(self, draft: Draft, *, rows: int, capacity: int, width: int) -> GpuDraft:
        """See `Engines.open_draft`; any draft without hooks. While the engine lives, hooking the draft is refused."""
        fused = self._drafts.get(draft) or FusedDraft.fuse(draft)
        self._drafts[draft] = fused
        how = self._how(draft.fc.weight.device)
        return GpuDraft(draft, fused, rows=rows, capacity=capacity, width=width, how=how)

    def _how(self, device: torch.device) -> Capturing:
        return self.capture or capturing(device)
