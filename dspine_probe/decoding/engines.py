"""The engines there are, by name; `engine` starts one. Commands read `--engine` with it."""

from __future__ import annotations

from importlib import import_module

import torch

from dspine_probe.decoding.engine import Engines
from dspine_probe.errors import UsageError

AUTO = "auto"
ENGINES = {
    # The models' own modules, on any device and dtype, with any hook; no sliding windows; not fast.
    "reference": "dspine_probe.decoding.reference:ReferenceEngines",
    # Of these two: full-attention Llama and Qwen3 targets of plain build, DFlash and DSpine drafts, no hooks.
    # C kernels for models on the CPU, of even sizes; the reference engine where there is no C compiler.
    "cpu": "dspine_probe.decoding.fast_cpu:FastCpu",
    # Triton kernels and CUDA graphs, in the dtype of the models; fast on a CUDA device alone.
    "gpu": "dspine_probe.decoding.fast_gpu:FastGpu",
}
"""Where the class of each engine is, imported when asked for."""


def engine(name: str = AUTO, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Engines:
    """An engine ready to be opened; may build kernels first.

    Args:
        name: one of `ENGINES`, or "auto": the fast one for the device.
        device: where target and drafts lie; for "auto".
        dtype: of the weights that the CPU engine packs; by default the fastest.

    Raises:
        UsageError: there is none of that name.
    """
    if name == AUTO:
        name = {"cpu": "cpu", "cuda": "gpu"}.get(torch.device(device).type, "reference")
    if name not in ENGINES:
        raise UsageError(f"engine {name!r} is unknown; use one of {', '.join((AUTO, *ENGINES))}")
    module, _, made = ENGINES[name].partition(":")
    started: Engines = getattr(import_module(module), made)(**{"dtype": dtype} if name == "cpu" and dtype else {})
    return started
