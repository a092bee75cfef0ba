"""How much of the machine a training step uses: trained slots a second, and its share of the GEMM rate.

Both are measured in one process, interleaved: the matrix products of a draft layer alone (bf16, forward and both
backward products, the row count of a real step) against whole optimiser steps of DFlash and DSpine at the geometry of
the embedded target. Operations are counted from the shapes. Data are random; the work does not depend on them.

    python benchmarks/train_step.py [--threads N] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from recording import RESULTS, made, save
from torch.nn import functional as F

from dspine_probe.config import DFLASH, DSPINE, DraftConfig
from dspine_probe.drafts import DFlash, Draft, DSpine
from dspine_probe.drafts.injection import DSpineConfig
from dspine_probe.training.anchors import Batch
from dspine_probe.training.objectives.base import Progress, objective_for
from dspine_probe.training.optimization import TrainConfig, make_optimizers

SEQUENCES, ANCHORS, CONTEXT, DRAFT_VOCAB = 8, 32, 300, 8192
GEOMETRY = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 5,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "block_size": 8,
    "mask_token_id": 16,
    "target_layer_ids": (1, 8, 15, 22, 27),
    "num_target_layers": 30,
    "draft_vocab_size": DRAFT_VOCAB,
}
GENERATOR = torch.Generator().manual_seed(0)


def make_draft(kind: str) -> Draft:
    head = (torch.randn(49152, 576, generator=GENERATOR) * 0.1).bfloat16()
    vocabulary = torch.arange(DRAFT_VOCAB)
    if kind == "dflash":
        return DFlash(DraftConfig(architecture=DFLASH, is_causal=False, **GEOMETRY), head, head, vocabulary=vocabulary)
    spine = DSpineConfig(transfer_rank=192, message_size=128)
    config = DraftConfig(architecture=DSPINE, is_causal=True, part=spine, **GEOMETRY)
    return DSpine(config, head, head, vocabulary=vocabulary)


def make_batch() -> Batch:
    blocks = SEQUENCES * ANCHORS
    anchors = torch.stack(
        [torch.randperm(CONTEXT - 60, generator=GENERATOR)[:ANCHORS].sort().values + 50 for _ in range(SEQUENCES)]
    )
    tokens = torch.randint(0, DRAFT_VOCAB, (blocks, 8), generator=GENERATOR)
    return Batch(
        taps=torch.randn(SEQUENCES, CONTEXT, 5 * 576, generator=GENERATOR).bfloat16(),
        anchors=anchors,
        anchor_tokens=tokens[:, 0].view(SEQUENCES, ANCHORS),
        tokens=tokens,
        weight=torch.full((blocks, 7), 1 / (7 * blocks)),
        teacher=torch.randn(blocks, 7, 576, generator=GENERATOR).bfloat16(),
        real=torch.ones(SEQUENCES, ANCHORS, dtype=torch.bool),
    )


def step_operations(draft: Draft) -> float:
    """Floating-point operations of the matrix products of one step (forward, and backward at twice that)."""
    block_rows, context_rows = SEQUENCES * ANCHORS * 8, SEQUENCES * CONTEXT
    layers = sum(p.numel() for block in draft.blocks for p in block.parameters() if p.ndim == 2)
    kv = sum(block.attn.k_proj.weight.numel() * 2 for block in draft.blocks)
    trained = block_rows * layers + context_rows * (draft.fc.weight.numel() + kv)
    trained += block_rows * (CONTEXT + 8) * 2 * 576 * len(draft.blocks)
    slots = SEQUENCES * ANCHORS * 7
    head = slots * DRAFT_VOCAB * 576
    frozen_head, teacher = 2 * head, head if isinstance(draft, DSpine) else 0
    if isinstance(draft, DSpine):
        per_layer = draft.injection.readouts[0].weight.numel() * 2 + draft.injection.writes[0].weight.numel()
        shared = sum(
            m.weight.numel()
            for m in (draft.injection.message, draft.injection.receiver_gate, draft.injection.predecessor_gate)
        )
        trained += slots * (per_layer + shared) * (len(draft.blocks) + 1)
    return 2.0 * (3 * trained + frozen_head + teacher)


def train_stepper(draft: Draft, batch: Batch) -> Callable[[], None]:
    objective = objective_for(draft)
    optimizers = make_optimizers(draft, TrainConfig(blocks=10**6))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            outcome = objective(batch, Progress(0, 100, GENERATOR))
        outcome.loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return step


def gemm_stepper() -> tuple[Callable[[], None], float]:
    """Forward and backward of one layer's largest matrix at the row count of a step."""
    rows = SEQUENCES * ANCHORS * 8
    x = torch.randn(rows, 576, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(1536, 576, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(rows, 1536, dtype=torch.bfloat16)

    def step() -> None:
        for _ in range(8):
            F.linear(x, w).backward(grad)
        x.grad = w.grad = None

    return step, 8 * 3 * 2.0 * rows * 576 * 1536


def seconds(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULTS / "train_step.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    gemm, gemm_operations = gemm_stepper()
    batch = make_batch()
    drafts = {kind: make_draft(kind) for kind in ("dflash", "dspine")}
    steps = {"gemm": gemm} | {kind: train_stepper(draft, batch) for kind, draft in drafts.items()}
    operations = {"gemm": gemm_operations} | {kind: step_operations(draft) for kind, draft in drafts.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.rounds + 2):
        for name, step in steps.items():
            took = seconds(step)
            if turn >= 2:
                times[name].append(took)
    slots = SEQUENCES * ANCHORS * 7
    rate = {name: operations[name] / median(took) / 1e9 for name, took in times.items()}
    result = {
        **made(),
        "gemm_gflops": round(rate["gemm"]),
        **{
            kind: {
                "slots_per_second": round(slots / median(times[kind])),
                "gflops": round(rate[kind]),
                "share_of_gemm": round(rate[kind] / rate["gemm"], 3),
            }
            for kind in drafts
        },
    }
    save(result, options.output)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
