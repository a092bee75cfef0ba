"""The engines there are, by name: how each is started and what it cannot do. Commands read `--engine` with `engine`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import torch

from dspine_probe.decoding.engine import Engines
from dspine_probe.errors import UsageError

AUTO = "auto"


@dataclass(frozen=True)
class EngineKind:
    """One way to compute.

    starts: "module:class", imported when asked for. summary: what it is. limits: what it cannot do.
    packs: whether it packs weights in a dtype of its own, which can be chosen.
    """

    name: str
    starts: str
    summary: str
    limits: str
    packs: bool = False

    def start(self, dtype: torch.dtype | None = None) -> Engines:
        """Ready to open engines; may build kernels first. `dtype` is of packed weights, by default the fastest."""
        module, _, made = self.starts.partition(":")
        options = {"dtype": dtype} if self.packs and dtype is not None else {}
        started: Engines = getattr(import_module(module), made)(**options)
        return started


_PLAIN = "full-attention Llama and Qwen3 targets of plain build, DFlash and DSpine drafts, no hooks"
ENGINES = {
    kind.name: kind
    for kind in (
        EngineKind(
            "reference",
            "dspine_probe.decoding.reference:ReferenceEngines",
            "the models' own modules, on any device and dtype, with any hook",
            "no sliding windows; not fast",
        ),
        EngineKind(
            "cpu",
            "dspine_probe.decoding.fast_cpu:FastCpu",
            "C kernels in bfloat16; the reference engine where there is no C compiler",
            f"models on the CPU alone: {_PLAIN}, even sizes",
            packs=True,
        ),
        EngineKind(
            "gpu",
            "dspine_probe.decoding.fast_gpu:FastGpu",
            "Triton kernels and CUDA graphs, in the dtype of the models",
            f"fast on a CUDA device alone: {_PLAIN}",
        ),
    )
}


def engine(name: str = AUTO, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Engines:
    """The engine of that name.

    Args:
        name: one of `ENGINES`, or "auto": the fast one for the device.
        device: where target and drafts lie; for "auto".
        dtype: of packed weights, where the engine packs them; by default the fastest.

    Raises:
        UsageError: there is none of that name.
    """
    if name == AUTO:
        name = {"cpu": "cpu", "cuda": "gpu"}.get(torch.device(device).type, "reference")
    if name not in ENGINES:
        raise UsageError(f"engine {name!r} is unknown; use one of {', '.join((AUTO, *ENGINES))}")
    return ENGINES[name].start(dtype)
