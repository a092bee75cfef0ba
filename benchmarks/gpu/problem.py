"""Inputs of every kernel at the sizes of a model, for checking, compiling and timing: one place that knows shapes.

`Sizes` names the geometries; `Problem.make` fills one with random numbers, or with nothing on the meta device.
`Problem.launches` are all launches that the decoding path makes at these sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from benchmarks.gpu.gru import GRUHead, plan_gru
from benchmarks.gpu.markov import MarkovHead, plan_markov
from dspine_probe.decoding.kernels.block_attention import PIECE, plan_attention
from dspine_probe.decoding.kernels.candidates import plan_top
from dspine_probe.decoding.kernels.injection import LayerInjection, plan_read, plan_write
from dspine_probe.decoding.kernels.last_write import Pairs, Refiner, plan_pairs
from dspine_probe.decoding.kernels.launch import Launch
from dspine_probe.decoding.kernels.layer_ops import HalfRotary, Heads, LayerCache, plan_rotate, plan_silu_mul
from dspine_probe.decoding.kernels.walk import plan_walk


@dataclass(frozen=True)
class Sizes:
    """A model's geometry, the block (`slots`, the anchor's included), and how many blocks run side by side."""

    d_model: int
    rank: int
    message: int
    k: int
    slots: int
    vocab: int
    heads: int
    kv_heads: int
    d_head: int
    inner: int
    serial_rank: int
    serial_state: int
    capacity: int = 2048
    batch: int = 1


QWEN3_8B = Sizes(4096, 1024, 512, 16, 16, 151_936, 32, 8, 128, 12_288, 256, 1024)
QWEN3_4B = Sizes(2560, 1024, 512, 16, 16, 151_936, 32, 8, 128, 9_728, 256, 1024)
EMBEDDED = Sizes(576, 192, 128, 16, 8, 8_192, 9, 3, 64, 1_536, 64, 128, capacity=512)
# Nothing here is a power of two, and no block is full.
ODD = Sizes(52, 20, 12, 5, 5, 333, 6, 2, 10, 37, 11, 19, capacity=290, batch=3)


@dataclass(frozen=True)
class Problem:
    """Inputs in the shapes that the entry functions take."""

    sizes: Sizes
    h: Float[Tensor, "row d_model"]
    anchors: Int[Tensor, "batch"]
    refiner: Refiner
    logits: Float[Tensor, "batch draft_slot vocab"]
    pairs: Pairs
    noise: Float[Tensor, "batch draft_slot"]
    qkv: Float[Tensor, "row fused"]
    heads: Heads
    rotary: HalfRotary
    starts: Int[Tensor, "batch"]
    cache: LayerCache
    gate_up: Float[Tensor, "row two_inner"]
    hidden: Float[Tensor, "batch draft_slot d_model"]
    markov: MarkovHead
    gru: GRUHead

    @classmethod
    def make(
        cls, sizes: Sizes, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator | None = None
    ) -> Problem:
        """Random inputs; with `generator` of the same device the same every time."""
        fill = _Fill(dtype, torch.device(device), generator)
        s, rows, draft_slots = sizes, sizes.batch * sizes.slots, sizes.slots - 1
        weights = LayerInjection(
            fill(s.rank + 3 * s.message, s.d_model, scale=s.d_model**-0.5),
            fill(s.d_model, s.message, scale=s.message**-0.5),
            fill(s.message),
            fill(s.vocab, s.message),
            fill(s.vocab, s.message),
        )
        head = fill(s.vocab, s.d_model, scale=s.d_model**-0.5)
        candidates = fill.ints(s.vocab, s.batch, draft_slots, s.k)
        anchors = fill.ints(s.vocab, s.batch)
        norms = fill(2, s.d_head)
        angle = torch.rand(s.capacity, s.d_head // 2, device=device, generator=generator) * 6
        state = s.serial_state
        return cls(
            sizes=s,
            h=fill(rows, s.d_model, scale=3.0),
            anchors=anchors,
            refiner=Refiner(weights, fill(s.d_model), 1e-6, head),
            logits=fill(s.batch, draft_slots, s.vocab),
            pairs=Pairs(candidates, candidates, anchors),
            noise=torch.rand(s.batch, draft_slots, device=device, generator=generator),
            qkv=fill(rows, (s.heads + 2 * s.kv_heads) * s.d_head),
            heads=Heads(s.heads, s.kv_heads, s.d_head, 1e-6, norms[0], norms[1]),
            rotary=HalfRotary(angle.cos(), angle.sin()),
            starts=fill.ints(s.capacity - s.slots, s.batch),
            cache=LayerCache(*fill(2, s.batch, s.kv_heads, s.capacity, s.d_head)),
            gate_up=fill(rows, 2 * s.inner),
            hidden=fill(s.batch, draft_slots, s.d_model),
            markov=MarkovHead(fill(s.vocab, s.serial_rank), fill(s.vocab, s.serial_rank)),
            gru=GRUHead(
                fill(s.vocab, 3 * state),
                fill(3 * state, state, scale=state**-0.5),
                fill(s.serial_rank, s.d_model, scale=s.d_model**-0.5),
                fill(s.serial_rank, state),
                fill(s.vocab, s.serial_rank),
            ),
        )

    def launches(self) -> list[Launch]:
        """Every launch of the decoding path at these sizes, heads it is compared with included."""
        weights, batch = self.refiner.weights, self.sizes.batch
        read, readings = plan_read(self.h, weights)
        write, _ = plan_write(self.h, readings, self.anchors, weights)
        pair, parts = plan_pairs(self.h, readings, self.pairs, self.refiner)
        walks = [plan_walk(parts, self.pairs.candidates, 1.0, noise)[0][0] for noise in (None, self.noise)]
        top, _ = plan_top(self.logits.flatten(0, 1), self.sizes.k)
        markov, _ = plan_markov(self.logits, self.anchors, self.markov)
        of_hidden = self.hidden.new_empty(batch, self.sizes.slots - 1, self.sizes.serial_rank)
        gru, _ = plan_gru(self.logits, of_hidden, self.anchors, self.gru)
        layers = [launch for width in self.widths for launch in self.layer_launches(width)]
        # The serial heads' slots after the third repeat the launches of the third.
        return [*read, *write, *pair, *walks, *top, *layers, *markov[:3], *gru[:8]]

    @property
    def widths(self) -> tuple[int, ...]:
        """Tokens a row that a layer meets: a block, a plain step, a piece of a prompt."""
        return self.sizes.slots, 1, PIECE

    def layer_launches(self, width: int) -> list[Launch]:
        """What a layer launches on `width` tokens of every row, context rows included."""
        rows, s = self.sizes.batch * width, self.sizes
        qkv = self.qkv.new_empty(rows, self.qkv.shape[1])
        rotate, queries = plan_rotate(qkv, self.heads, self.rotary, self.starts, self.cache)
        attention, _ = plan_attention(queries, self.cache, self.starts, causal=True)
        silu, _ = plan_silu_mul(self.gate_up.new_empty(rows, 2 * s.inner))
        kv, alone = qkv.new_empty(rows, 2 * s.kv_heads * s.d_head), replace(self.heads, queries=0)
        context, _ = plan_rotate(kv, alone, self.rotary, self.starts, self.cache)
        return [*rotate, *attention, *silu, *context]


@dataclass(frozen=True)
class _Fill:
    """Makes tensors of one type in one place."""

    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator | None

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        made = torch.randn(shape, device=self.device, generator=self.generator)
        return (made * scale).to(self.dtype)

    def ints(self, below: int, *shape: int) -> Tensor:
        return torch.randint(0, below, shape, device=self.device, generator=self.generator)
