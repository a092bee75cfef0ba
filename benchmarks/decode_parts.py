"""What decoding on a CPU is made of: memory bandwidth, and the seconds of every part of a round, measured interleaved.

A turn runs one plain step and then, for each draft, what a round runs in its order: context rows, block, head, and the
target on the block. So each part finds the caches as a round leaves them. Used by `decode_cpu`; no command of its own.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from dspine_probe.decoding.fast_cpu import FastCpu
from dspine_probe.drafts import Draft
from dspine_probe.target import Target

WARM_UP = 3
GROWTH = 2  # context rows a round, as many as it commits tokens on average
READ_BYTES = 512 << 20
Laps = dict[str, list[float]]


@dataclass(frozen=True)
class DraftParts:
    """Median seconds: context rows; block to proposed tokens; of these its head's part; the target on the block."""

    context: float
    propose: float
    head: float
    verify: float

    @property
    def round(self) -> float:
        """Seconds of a round without bookkeeping."""
        return self.context + self.propose + self.verify


@dataclass(frozen=True)
class Parts:
    """Median seconds with `context` tokens cached.

    bandwidth: bytes a second of reading; bytes_per_step: weights, and the keys and values of the context.
    step: one token of plain decoding. drafts: by name.
    """

    bandwidth: float
    bytes_per_step: int
    context: int
    step: float
    drafts: dict[str, DraftParts]

    @property
    def limit(self) -> float:
        """Seconds that memory needs for a step."""
        return self.bytes_per_step / self.bandwidth


@torch.inference_mode()
def measure_parts(target: Target, drafts: Mapping[str, Draft], engines: FastCpu, *, context: int, turns: int) -> Parts:
    """Measure with random tokens; times do not depend on them."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(target.vocab_size, (context,), generator=generator).tolist()
    capacity = context + (turns + WARM_UP) * GROWTH + 16
    laps: Laps = {}
    readable = torch.ones(READ_BYTES // 4)
    plain = engines.open_target(target, taps=(), rows=1, capacity=capacity, width=1)
    anchor = plain.prefill([prompt]).argmax(dim=-1)
    rounds = {name: _Round(target, draft, engines, prompt, capacity, anchor) for name, draft in drafts.items()}
    for _ in range(turns + WARM_UP):
        _lap(laps, "read", readable.sum)
        _lap(laps, "step", lambda: plain.greedy(anchor[:, None]).tolist())
        plain.commit([0])
        for name, one in rounds.items():
            one.run(laps, name)
    medians = {name: statistics.median(found[WARM_UP:]) for name, found in laps.items()}
    return Parts(
        bandwidth=READ_BYTES / medians["read"],
        bytes_per_step=_bytes_per_step(target, engines, context),
        context=context,
        step=medians["step"],
        drafts={
            name: DraftParts(*(medians[f"{name} {part}"] for part in ("context", "propose", "head", "verify")))
            for name in drafts
        },
    )


class _Round:
    """The engines of one draft and what they do in a round."""

    def __init__(
        self, target: Target, draft: Draft, engines: FastCpu, prompt: list[int], capacity: int, anchor: torch.Tensor
    ) -> None:
        width, self.anchor = draft.config.block_size, anchor
        taps = draft.config.target_layer_ids
        self.target = engines.open_target(target, taps=taps, rows=1, capacity=capacity, width=width)
        self.draft = engines.open_draft(draft, rows=1, capacity=capacity, width=width)
        self.target.prefill([prompt])
        self.draft.extend(self.target.taps, [len(prompt)])
        self.target.greedy(anchor[:, None].expand(1, width))

    def run(self, laps: Laps, name: str) -> None:
        """One round; of the target's rows nothing is kept, so that all rounds read equally much."""
        trunk_ended: list[float] = []
        _lap(laps, f"{name} context", lambda: self.draft.extend(self.target.taps, [GROWTH]))
        start = time.perf_counter()
        proposal = self.draft.propose(self.anchor, on_trunk=lambda: trunk_ended.append(time.perf_counter()))
        end = time.perf_counter()
        laps.setdefault(f"{name} propose", []).append(end - start)
        laps.setdefault(f"{name} head", []).append(end - trunk_ended[0])
        block = torch.cat([self.anchor[:, None], proposal.tokens], dim=1)
        _lap(laps, f"{name} verify", lambda: self.target.greedy(block).tolist())
        self.target.commit([0])


def huge_pages() -> int | None:
    """Bytes of this process that lie in huge pages, where Linux says so; weights in them are read faster."""
    rollup = Path("/proc/self/smaps_rollup")
    found = re.search(r"AnonHugePages:\s+(\d+) kB", rollup.read_text()) if rollup.is_file() else None
    return None if found is None else int(found.group(1)) * 1024


def _lap(laps: Laps, name: str, work: Callable[[], object]) -> None:
    start = time.perf_counter()
    work()
    laps.setdefault(name, []).append(time.perf_counter() - start)


def _bytes_per_step(target: Target, engines: FastCpu, context: int) -> int:
    """Every matrix once, a tied embedding as the head; keys and values of the context."""
    layers = sum(weight.numel() for weight in target.model.base_model.layers.parameters())
    cache = 2 * target.num_layers * target.num_kv_heads * target.head_dim * context
    return (layers + target.head.numel() + cache) * engines.kernels.dtype.itemsize
