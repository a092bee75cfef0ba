"""Others that decode the embedded target greedily: transformers, llama.cpp and the package dflash.

Each way answers one prompt and says how long the tokens after its first output took, so that reading the prompt is not
counted. llama.cpp (package xllamacpp) and dflash are used where they can be imported; `absent` says which are missing.
They are not dependencies of the project:

    pip install --no-deps --target PEERS xllamacpp dflash && PYTHONPATH=PEERS python benchmarks/decode_cpu.py

Used by `decode_cpu`; no command of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gguf_files import gguf_file
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from dspine_probe.drafts.checkpoint import shipped_checkpoints
from dspine_probe.target import Target

DRAFTED = 7  # tokens a round, as our drafts propose
EARLY_EXIT = 15  # layers of the target that draft for it; there is no smaller model of its kind
LLAMA_KINDS = ("F16", "Q8_0", "Q4_1")
CONTEXT = 2048


@dataclass(frozen=True)
class Timed:
    """Tokens after the first output, the seconds they took, and the rounds if there are any."""

    tokens: int
    seconds: float
    rounds: int | None = None
    bookkeeping: float | None = None


Way = Callable[[list[int]], Timed]


def transformers_ways(target: Target, limit: int) -> dict[str, Way]:
    """Plain, prompt lookup, and assisted by the target's own first layers."""
    options: dict[str, dict[str, Any]] = {
        "transformers plain": {},
        "transformers prompt lookup": {"prompt_lookup_num_tokens": DRAFTED},
        "transformers assisted (early exit)": {"assistant_early_exit": EARLY_EXIT},
    }
    return {name: partial(_generate, target, limit, chosen) for name, chosen in options.items()}


def _generate(target: Target, limit: int, options: dict[str, Any], ids: list[int]) -> Timed:
    watch = _Watch()
    target.model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=limit,
        eos_token_id=list(target.stop_ids),
        pad_token_id=target.stop_ids[0],
        streamer=watch,
        **options,
    )
    return watch.timed()


class _Watch(BaseStreamer):
    """Notes when tokens come out of `generate`; the prompt comes first."""

    def __init__(self) -> None:
        self.outputs: list[tuple[float, int]] = []
        self.prompt_seen = False

    def put(self, value: Tensor) -> None:
        if self.prompt_seen:
            self.outputs.append((time.perf_counter(), value.numel()))
        self.prompt_seen = True

    def end(self) -> None:
        pass

    def timed(self) -> Timed:
        (start, _), *rest = self.outputs
        return Timed(sum(count for _, count in rest), self.outputs[-1][0] - start, len(rest))


def llama_ways(threads: int, limit: int) -> Iterator[dict[str, Way]]:
    """llama.cpp with the target in one number format after the other; none where xllamacpp cannot be imported."""
    try:
        import xllamacpp
    except ImportError:
        return
    for kind in LLAMA_KINDS:
        yield {f"llama.cpp {kind}": partial(_complete, _server(xllamacpp, kind, threads), limit)}


def _server(xllamacpp: Any, kind: str, threads: int) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = str(gguf_file(kind))
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.verbosity = CONTEXT, 1, 0, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(params)


def _complete(server: Any, limit: int, ids: list[int]) -> Timed:
    request = {"prompt": ids, "n_predict": limit, "temperature": 0.0, "top_k": 1, "cache_prompt": False}
    timings = server.handle_completions(request)["timings"]
    return Timed(timings["predicted_n"] - 1, timings["predicted_ms"] / 1000)


def dflash_ways(target: Target, limit: int) -> dict[str, Way]:
    """The package dflash with our own DFlash; empty where it cannot be imported."""
    try:
        from dflash import model as package
    except ImportError:
        return {}
    folder = shipped_checkpoints()["dflash"]
    draft = package.DFlashDraftModel.from_pretrained(folder, dtype=target.dtype).eval()
    return {"dflash package": partial(_dflash, package, draft, target, limit)}


def _dflash(package: Any, draft: Any, target: Target, limit: int, ids: list[int]) -> Timed:
    package._cuda_time = time.perf_counter  # it asks CUDA for the time, which is not here
    stops = list(target.stop_ids)
    found = package.dflash_generate(draft, target.model, torch.tensor([ids]), limit, stops, return_stats=True)
    seconds = found.time_per_output_token * found.num_output_tokens
    return Timed(found.num_output_tokens - 1, seconds, len(found.acceptance_lengths))


def absent() -> list[str]:
    """Packages that are measured if installed and are not."""
    missing = []
    for name in ("xllamacpp", "dflash"):
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    return missing
