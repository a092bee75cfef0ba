"""Adjacent causal injection in two launches a layer (drafts: `DSpine.inject`; arXiv 2609.36173).

A layer's readout R is only ever used through its norm and through three matrices: the gates G_r and G_p and the message
M. Those products are folded once (`fold`), so that all a layer reads from h is one matrix, and what a true predecessor
token sends is two rows of a table.

The first launch (`plan_read`) is the product of h with the folded matrix, and sums of squares: a norm is one number a
row and is divided out later. The second (`plan_write`) gates, takes the message and adds W (g ⊙ m), scaled to the
receiver's RMS. Slot 1's predecessor is the anchor's true code. Rows are the slots of all blocks, block by block.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dspine_probe.decoding.kernels.launch import Launch, block, cdiv, dot, jit, pow2, run, tl, usable, widened
from dspine_probe.drafts.injection import Injection


@dataclass(frozen=True)
class LayerInjection:
    """One layer's injection, folded.

    read: [R; G_r R; M R; G_p R], with R of `rank` rows and the other three of `message` rows each.
    write: W. bias: that of the gate. message_table, gate_table: M √r e_v and G_p √r e_v of every token v.
    """

    read: Float[Tensor, "read_rows d_model"]
    write: Float[Tensor, "d_model message"]
    bias: Float[Tensor, "message"]
    message_table: Float[Tensor, "vocab message"]
    gate_table: Float[Tensor, "vocab message"]

    @property
    def rank(self) -> int:
        """Rows of the readout."""
        return len(self.read) - 3 * len(self.bias)


@torch.no_grad()
def fold(injection: Injection, codes: Float[Tensor, "vocab rank"]) -> list[LayerInjection]:
    """The folded weights of all layers, multiplied in fp32 and rounded once; `codes` are unit vectors."""
    bias, scaled_codes = injection.bias.detach(), codes.float() * codes.shape[1] ** 0.5
    matrices = [m.weight.float() for m in (injection.receiver_gate, injection.message, injection.predecessor_gate)]
    tables = [F.linear(scaled_codes, matrix).to(bias.dtype) for matrix in matrices[1:]]
    folded = []
    lists = [[cast(nn.Linear, m).weight.detach() for m in part] for part in (injection.readouts, injection.writes)]
    for readout, write in zip(*lists, strict=True):
        wide = readout.float()
        read = torch.cat([wide, *(matrix @ wide for matrix in matrices)]).to(readout.dtype)
        folded.append(LayerInjection(read, write, bias, *tables))
    return folded


@dataclass(frozen=True)
class LayerReads:
    """What one layer reads from h, norms not yet divided out.

    projected: [G_r R h; M R h; G_p R h] in fp32.
    read_squares: parts of ‖R h‖², to be summed over the first axis. receiver_squares: ‖h‖².
    """

    projected: Float[Tensor, "row three_message"]
    read_squares: Float[Tensor, "part row"]
    receiver_squares: Float[Tensor, "row"]

    def scaled(self, rank: int) -> Float[Tensor, "row three_message"]:
        """The projections of the unit-RMS feature f = √r R h / ‖R h‖."""
        norm = self.read_squares.sum(0).sqrt().clamp(min=1e-12)  # as torch.nn.functional.normalize
        return self.projected * (rank**0.5 / norm)[:, None]


def read(h: Float[Tensor, "row d_model"], weights: LayerInjection) -> LayerReads:
    """The first launch; in torch, in the precision of h but at least fp32."""
    if usable(h):
        return run(*plan_read(h, weights))
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    every = wide @ weights.read.to(wide.dtype).T
    norms = every[:, : weights.rank].square().sum(-1)
    return LayerReads(every[:, weights.rank :], norms[None], wide.square().sum(-1))


def inject(
    h: Float[Tensor, "row d_model"], anchor_tokens: Int[Tensor, "block"], weights: LayerInjection
) -> tuple[Float[Tensor, "row d_model"], LayerReads]:
    """h after the layer's injection, every predecessor read as it stood before, and the readings it came from."""
    readings = read(h, weights)
    if usable(h, anchor_tokens):
        return run(*plan_write(h, readings, anchor_tokens, weights)), readings
    receiver, message, gate = readings.scaled(weights.rank).unflatten(0, (len(anchor_tokens), -1)).chunk(3, dim=-1)
    first = [F.embedding(anchor_tokens, t)[:, None].to(gate.dtype) for t in (weights.message_table, weights.gate_table)]
    message, gate = (torch.cat([f, own[:, 1:-1]], 1) for f, own in zip(first, (message, gate), strict=True))
    gated = torch.sigmoid(receiver[:, 1:] + gate + weights.bias) * message
    written = F.pad(F.linear(gated, weights.write.to(gated.dtype)), (0, 0, 1, 0)).flatten(0, 1)
    rms = (readings.receiver_squares / h.shape[1]).sqrt()[:, None]
    return (h + rms * written).to(h.dtype), readings


def plan_read(h: Float[Tensor, "row d_model"], weights: LayerInjection) -> tuple[list[Launch], LayerReads]:
    """The first launch and the buffers it fills."""
    (rows, d_model), (columns, _) = h.shape, weights.read.shape
    size = 16 if rows <= 64 else 64  # narrow tiles at small batch, so that every multiprocessor reads weights
    readings = LayerReads(
        h.new_empty(rows, columns - weights.rank, dtype=torch.float32),
        h.new_empty(cdiv(weights.rank, size), rows, dtype=torch.float32),
        h.new_empty(rows, dtype=torch.float32),
    )
    tile = block(rows, 64)
    sizes = {"rows": rows, "d_model": d_model, "rank": weights.rank, "columns": columns}
    launch = Launch(
        _read_kernel,
        (cdiv(columns, size), cdiv(rows, tile)),
        {"h": h, "read": weights.read, **vars(readings), **sizes},
        {"ROWS": tile, "COLUMNS": size, "DEPTH": block(d_model, 256 if tile == 16 else 64), "WIDEN": widened(h.dtype)},
        stages=4,
    )
    return [launch], readings


def plan_write(
    h: Float[Tensor, "row d_model"], readings: LayerReads, anchor_tokens: Int[Tensor, "block"], weights: LayerInjection
) -> tuple[list[Launch], Float[Tensor, "row d_model"]]:
    """The second launch and the buffer it fills."""
    (rows, d_model), out = h.shape, torch.empty_like(h)
    tile, size = block(rows, 64), 32 if rows <= 64 else 64
    sizes = {"rows": rows, "slots": rows // len(anchor_tokens), "d_model": d_model}
    depths = {"DEPTH": block(len(weights.bias), 64), "PARTS": pow2(len(readings.read_squares))}
    launch = Launch(
        _write_kernel,
        (cdiv(d_model, size), cdiv(rows, tile)),
        {"h": h, **shared_arguments(readings, weights), "anchors": anchor_tokens, "out": out, **sizes},
        {"ROWS": tile, "COLUMNS": size, **depths, "WIDEN": widened(h.dtype)},
        warps=4 if tile == 16 else 8,
        stages=3 if tile == 16 else 2,
    )
    return [launch], out


def shared_arguments(readings: LayerReads, weights: LayerInjection) -> dict[str, Any]:
    """Arguments of every kernel that gates and writes."""
    used = {name: value for name, value in vars(weights).items() if name != "read"}
    sizes = {"root": weights.rank**0.5, "message": len(weights.bias), "parts": len(readings.read_squares)}
    return vars(readings) | used | sizes


@jit
def _read_kernel(
    h, read, projected, read_squares, receiver_squares, rows, d_model, rank, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    here = row < rows
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in range(0, d_model, DEPTH):
        at = start + tl.arange(0, DEPTH)
        x = tl.load(h + row[:, None] * d_model + at, here[:, None] & (at < d_model), 0.0)
        w = tl.load(read + column * d_model + at[:, None], (column < columns) & (at[:, None] < d_model), 0.0)
        product = dot(x, w, product, WIDEN)
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
    norms = tl.sum(tl.where(column < rank, product * product, 0.0), 1)
    tl.store(read_squares + part * rows + row, norms, here & (part * COLUMNS < rank))
    target = projected + row[:, None] * (columns - rank) + (column - rank)
    tl.store(target, product, here[:, None] & (column >= rank) & (column < columns))
    tl.store(receiver_squares + row, squares, here & (part == 0))


@jit
def feature_scale(read_squares, row, here, rows, root, parts, PARTS: tl.constexpr):
    """√r / ‖R h‖ of the given rows; root = √r."""
    part = tl.arange(0, PARTS)[:, None]
    squares = tl.load(read_squares + part * rows + row, here & (part < parts), 0.0)
    return root / tl.maximum(tl.sqrt(tl.sum(squares, 0)), 1e-12)


@jit
def _write_kernel(
    h, projected, read_squares, receiver_squares, write, bias, message_table, gate_table, anchors, out,
    rows, slots, d_model, root, message, parts,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    slot = row % slots
    first, later = here & (slot == 1), here & (slot > 1)
    own = feature_scale(read_squares, row, here, rows, root, parts, PARTS)
    earlier = feature_scale(read_squares, row - 1, later, rows, root, parts, PARTS)
    anchor = tl.load(anchors + row // slots, first, 0)
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, message, DEPTH):
        at = start + tl.arange(0, DEPTH)
        exists = at < message
        from_code, from_feature = first[:, None] & exists, later[:, None] & exists
        receiver = projected + row[:, None] * (3 * message) + at
        predecessor = receiver - 3 * message
        code = anchor[:, None] * message + at
        gate = tl.load(receiver, here[:, None] & exists, 0.0) * own[:, None]
        gate += tl.load(bias + at, exists, 0.0).to(tl.float32)
        gate += tl.load(predecessor + 2 * message, from_feature, 0.0) * earlier[:, None]
        gate += tl.load(gate_table + code, from_code, 0.0).to(tl.float32)
        sent = tl.load(predecessor + message, from_feature, 0.0) * earlier[:, None]
        sent += tl.load(message_table + code, from_code, 0.0).to(tl.float32)
        w = tl.load(write + column * message + at[:, None], (column < d_model) & exists[:, None], 0.0)
        product = dot((tl.sigmoid(gate) * sent).to(w.dtype), w, product, WIDEN)
    rms = tl.sqrt(tl.load(receiver_squares + row, here, 0.0) / d_model)
    place = row[:, None] * d_model + column
    inside = here[:, None] & (column < d_model)
    x = tl.load(h + place, inside, 0.0).to(tl.float32)
    tl.store(out + place, (x + rms[:, None] * product).to(out.dtype.element_ty), inside)
