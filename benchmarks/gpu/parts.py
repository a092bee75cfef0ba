"""What is timed: the parts of a round at one geometry and batch, each with the bytes it cannot do without.

Bytes are weights and table rows read once, and keys and values of the context; states of a few rows are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.gru import gru_tokens
from benchmarks.gpu.markov import markov_tokens
from benchmarks.gpu.models import Models
from dspine_probe.decoding.fast_gpu import FastGpu
from dspine_probe.decoding.gpu.draft import GpuDraft
from dspine_probe.decoding.gpu.target import GpuTarget
from dspine_probe.decoding.graphs import Capturing
from dspine_probe.decoding.kernels.candidates import top_candidates
from dspine_probe.decoding.kernels.injection import LayerReads, inject
from dspine_probe.decoding.kernels.last_write import Pairs, pair_parts
from dspine_probe.decoding.kernels.walk import unit_parts, walk
from dspine_probe.decoding.verify import verify_greedy


@dataclass(frozen=True)
class Part:
    """Something to time."""

    name: str
    run: Callable[[], tuple[Tensor, ...]]
    bytes: int


@dataclass(frozen=True)
class Bench:
    """Engines of one geometry at one batch, with a context read into them."""

    models: Models
    target: GpuTarget
    draft: GpuDraft
    plain: GpuDraft  # the same draft with its injections left out
    anchors: Tensor

    @property
    def batch(self) -> int:
        """Rows side by side."""
        return len(self.anchors)


@torch.inference_mode()
def open_bench(models: Models, engines: FastGpu, batch: int, context: int) -> Bench:
    """Engines for `batch` rows of `context` tokens each, and room for some rounds."""
    g = models.geometry
    sizes = {"rows": batch, "capacity": context + 16 * g.block, "width": g.block}
    target = engines.open_target(models.target, taps=models.draft.config.target_layer_ids, **sizes)
    draft = engines.open_draft(models.draft, **sizes)
    without = replace(draft.fused, injections=[], refiner=None)
    plain = GpuDraft(models.draft, without, **sizes, how=draft.how)
    ids = torch.randint(0, g.vocab - 1, (batch, context)).tolist()
    anchors = target.prefill(ids).max(dim=-1).indices
    for engine in (draft, plain):
        engine.extend(target.taps, [context] * batch)
    return Bench(models, target, draft, plain, anchors)


@torch.inference_mode()
def parts_of(bench: Bench) -> list[Part]:
    """All parts, in the order of a round."""
    return [*_trunk_parts(bench), *_head_parts(bench), *_target_parts(bench)]


def _trunk_parts(bench: Bench) -> list[Part]:
    g, draft = bench.models.geometry, bench.draft
    fused, starts, anchors = draft.fused, draft.ends, bench.anchors
    assert fused.refiner is not None
    taps = bench.target.taps[:, : g.block].contiguous()
    layers = sum(_bytes(_weights(layer)) for layer in fused.layers) + _cached(bench, len(fused.layers))
    injections = sum(_bytes((w.read, w.write)) for w in fused.injections)
    rows = torch.randn(bench.batch * g.block, g.d_model).to(anchors.device, fused.refiner.head.dtype)

    def injections_alone() -> tuple[Tensor, ...]:
        x = rows
        for weights in fused.injections:
            x, _ = inject(x, anchors, weights)
        return (x,)

    return [
        Part(
            "context rows", lambda: draft._context(taps, starts), _bytes((bench.models.draft.fc.weight, fused.context))
        ),
        Part("block, no injection", lambda: bench.plain._block(anchors, starts), layers),
        Part("block with injections", lambda: draft._block(anchors, starts), layers + injections),
        Part("injections alone", injections_alone, injections),
    ]


def _head_parts(bench: Bench) -> list[Part]:
    """From the block's last states on: DSpine's cache, and the heads of the other drafts."""
    models, draft = bench.models, bench.draft
    g, head = models.geometry, models.draft.head
    states, _, pre_write, *read = draft._block(bench.anchors, draft.ends)
    readings = LayerReads(*read)
    assert draft.fused.refiner is not None
    hidden = states[:, 1:].contiguous()
    unary = models.draft.logits(hidden)
    index = top_candidates(unary, g.k)
    pairs, refiner = Pairs(index, index, bench.anchors), draft.fused.refiner
    scored = pair_parts(pre_write, readings, pairs, refiner)
    noise = torch.rand(index.shape[:2], device=index.device)
    slots, size = g.block - 1, head.element_size()
    cells = bench.batch * slots * g.k

    def cache_and_walk() -> tuple[Tensor, ...]:
        found = top_candidates(unary, g.k)
        parts = pair_parts(pre_write, readings, Pairs(found, found, bench.anchors), refiner)
        return (walk(parts, found).tokens,)

    def selector() -> tuple[Tensor, ...]:
        found, values = top_candidates(unary, g.k), models.selector
        before = torch.cat([bench.anchors[:, None, None].expand(-1, 1, g.k), found[:, :-1]], dim=1)
        gated = F.embedding(before, values.before) * F.linear(hidden, values.hidden)[:, :, None]
        scores = gated @ F.embedding(found, values.after).transpose(-1, -2)
        scores = scores + unary.gather(-1, found)[:, :, None]
        return (walk(unit_parts(scores.float()), found).tokens,)

    read_unary = unary.numel() * size
    pair_bytes = _bytes((refiner.weights.write,)) + cells * size * (g.d_model + 2 * g.message)
    recurrent = _bytes((models.gru.recurrent, models.gru.of_state))
    return [
        Part("scores of the vocabulary", lambda: (models.draft.logits(hidden),), _bytes((head,))),
        Part("likeliest tokens", lambda: (unary.max(dim=-1).indices,), read_unary),
        Part("candidates", lambda: (top_candidates(unary, g.k),), read_unary),
        Part("pair scores", lambda: (pair_parts(pre_write, readings, pairs, refiner).products,), pair_bytes),
        Part("walk, greedy", lambda: (walk(scored, index).tokens,), _bytes((scored.products,))),
        Part("walk, sampled", lambda: (walk(scored, index, noise=noise).tokens,), _bytes((scored.products,))),
        Part("DSpine: candidates, cache, walk", cache_and_walk, read_unary + pair_bytes),
        Part(
            "DSpark: Markov head",
            lambda: (markov_tokens(unary, bench.anchors, models.markov),),
            read_unary + slots * _bytes((models.markov.second,)),
        ),
        Part(
            "Domino: GRU head",
            lambda: (gru_tokens(unary, hidden, bench.anchors, models.gru),),
            read_unary + slots * recurrent + (slots - 1) * _bytes((models.gru.out,)),
        ),
        Part("DFlash2: selector", selector, read_unary + 2 * cells * g.selector_rank * size),
    ]


def _target_parts(bench: Bench) -> list[Part]:
    g, target = bench.models.geometry, bench.target
    layers = sum(_bytes(_weights(layer)) for layer in target.layers)
    needed = layers + _bytes((bench.models.target.head,)) + _cached(bench, len(target.layers))
    block = bench.anchors[:, None].expand(-1, g.block).contiguous()
    one = bench.anchors[:, None].contiguous()
    return [
        Part("verify", lambda: target._verify(block, target.ends), needed),
        Part("plain step", lambda: target._verify(one, target.ends), needed),
    ]


def round_of(bench: Bench, draft: GpuDraft) -> Callable[[], object]:
    """A whole round as `generate` runs it, its one wait included; keeps a token a row, so that many rounds fit."""
    held = {"anchors": bench.anchors}
    kept = [1] * bench.batch

    @torch.inference_mode()
    def run() -> list[list[int]]:
        _make_room(bench, draft)
        proposal = draft.propose(held["anchors"])
        block = torch.cat([held["anchors"][:, None], proposal.tokens], dim=1)
        verdict = verify_greedy(proposal.tokens, bench.target.greedy(block))
        fetched = [proposal.tokens, verdict.accepted[:, None], verdict.bonus_token[:, None]]
        result = torch.cat(fetched, dim=1).tolist()
        held["anchors"] = verdict.bonus_token
        bench.target.commit(kept)
        draft.extend(bench.target.taps, kept)
        return result

    return run


def plain_step_of(bench: Bench) -> Callable[[], object]:
    """One step of plain decoding, its wait included."""
    held = {"anchors": bench.anchors}

    @torch.inference_mode()
    def run() -> list[int]:
        held["anchors"] = bench.target.greedy(held["anchors"][:, None])[:, 0].clone()
        return held["anchors"].tolist()

    return run


def run_eagerly(bench: Bench) -> None:
    """From here on the engines capture nothing."""
    for engine in (bench.target, bench.draft, bench.plain):
        engine.how = Capturing(None, "run eagerly, to compare")
        engine.steps.clear()


def _make_room(bench: Bench, draft: GpuDraft) -> None:
    """Forget the rounds so far when the caches are nearly full."""
    block = bench.models.geometry.block
    if max(bench.target.lengths) + 2 * block > bench.target.capacity:
        for engine in (bench.target, draft):
            engine.commit([-8 * block] * bench.batch)


def _cached(bench: Bench, layers: int) -> int:
    """Bytes of keys and values of the context in so many layers."""
    keys = bench.target.keys
    positions = sum(bench.target.lengths)
    return 2 * layers * positions * keys.shape[2] * keys.shape[4] * keys.element_size()


def _weights(layer: object) -> list[Tensor]:
    return [value for value in vars(layer).values() if isinstance(value, Tensor)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
