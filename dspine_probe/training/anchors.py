"""From sequences to training batches: anchors, labels, weights, and the order in which sequences are visited.

Every batch is a pure function of (seed, step), so a resumed run sees exactly what the killed one would have seen.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dspine_probe.training.features import Sequence


@dataclass(frozen=True)
class Batch:
    """Blocks of several sequences. Slot k of a block at anchor a is labelled with token a + k.

    `weight` is 0 for slots past the sequence, past the first unsupervised slot, and in dummy blocks; otherwise
    exp(−(k − 1)/γ). `teacher` is the target's final state one position before each label. `visible` holds the tokens
    that slots show in place of the mask (−1: the mask); None where all slots show the mask. `following` are the tokens
    after the context rows.
    """

    taps: Float[Tensor, "batch ctx taps_d_model"]
    anchors: Int[Tensor, "batch anchor"]
    anchor_tokens: Int[Tensor, "batch anchor"]
    tokens: Int[Tensor, "block slot"]
    weight: Float[Tensor, "block draft_slot"]
    teacher: Float[Tensor, "block draft_slot d_model"]
    real: Bool[Tensor, "batch anchor"]
    visible: Int[Tensor, "block draft_slot"] | None = None
    following: Int[Tensor, "batch ctx"] | None = None

    def to(self, device: torch.device, states: torch.dtype | None = None) -> Batch:
        """The same batch on another device, the target's states in another dtype if one is given."""
        moved = {name: t.to(device, non_blocking=True) for name, t in vars(self).items() if t is not None}
        if states is not None:
            moved |= {name: moved[name].to(states) for name in ("taps", "teacher")}
        return replace(self, **moved)


def valid_anchors(sequence: Sequence) -> Int[Tensor, "valid"]:
    """Response positions whose next token is in the response too."""
    return torch.arange(sequence.prompt_length, len(sequence) - 1)


def sample_anchors(sequence: Sequence, count: int, generator: torch.Generator) -> Int[Tensor, "anchor"]:
    """Up to `count` distinct valid anchors, drawn uniformly, in ascending order."""
    valid = valid_anchors(sequence)
    return valid[torch.randperm(len(valid), generator=generator)[:count]].sort().values


def slot_weights(slots: int, gamma: float) -> Float[Tensor, "draft_slot"]:
    """exp(−(k − 1)/γ) for slots k = 1…T."""
    return torch.exp(-torch.arange(slots) / gamma)


def make_batch(
    sequences: Seq[Sequence],
    anchors: Seq[Int[Tensor, "anchor"]],
    *,
    block_size: int,
    gamma: float,
    anchors_per_sequence: int,
) -> Batch:
    """Assemble blocks; sequences with fewer anchors are filled up with dummy blocks at position 0 and weight 0."""
    ctx = max(len(s) for s in sequences)
    # Context rows at or after the last anchor are never seen.
    ctx = min(ctx, max(int(a.max()) for a in anchors) + 1) if all(len(a) for a in anchors) else ctx
    slots = torch.arange(block_size)
    taps = torch.zeros(len(sequences), ctx, sequences[0].taps.shape[1], dtype=sequences[0].taps.dtype)
    following = torch.zeros(len(sequences), ctx, dtype=torch.long)
    placed = torch.zeros(len(sequences), anchors_per_sequence, dtype=torch.long)
    tokens, weights, teachers = [], [], []
    for row, (sequence, chosen) in enumerate(zip(sequences, anchors, strict=True)):
        rows = min(ctx, len(sequence))
        taps[row, :rows] = sequence.taps[:rows]
        after = sequence.tokens[1 : rows + 1]
        following[row, : len(after)] = after
        placed[row, : len(chosen)] = chosen
        position = placed[row][:, None] + slots
        inside = (position < len(sequence)) & (torch.arange(anchors_per_sequence) < len(chosen))[:, None]
        position = position.clamp(max=len(sequence) - 1)
        tokens.append(sequence.tokens[position])
        weights.append(inside[:, 1:] * slot_weights(block_size - 1, gamma))
        teachers.append(sequence.final[position[:, :-1]])
    block_tokens = torch.cat(tokens)
    real = torch.stack([torch.arange(anchors_per_sequence) < len(a) for a in anchors])
    return Batch(
        taps,
        placed,
        block_tokens[:, 0].view_as(placed),
        block_tokens,
        torch.cat(weights),
        torch.cat(teachers),
        real,
        following=following,
    )


def show_prefixes(batch: Batch, share: float, generator: torch.Generator) -> Batch:
    """The batch with a random prefix shown in a `share` of its blocks: m is uniform in 0…T − 1.

    Slots 1…m show their own label and carry no weight; the others keep the weight they had.
    """
    blocks, slots = batch.weight.shape
    length = torch.randint(0, slots, (blocks, 1), generator=generator)
    shown = (length > torch.arange(slots)) & (torch.rand(blocks, 1, generator=generator) < share)
    visible = torch.where(shown, batch.tokens[:, 1:], -1)
    return replace(batch, visible=visible, weight=batch.weight * ~shown)


def visiting_order(lengths: Seq[int], group: int, seed: int, epoch: int) -> list[list[int]]:
    """Sequence indices of every batch of one epoch: shuffled, but with similar lengths together.

    Sorting within pools of 32 batches keeps padding low without tying neighbours together for good.
    """
    generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    pool = group * 32
    batches = []
    for start in range(0, len(order), pool):
        nearby = sorted(order[start : start + pool], key=lambda i: lengths[i])
        batches += [nearby[i : i + group] for i in range(0, len(nearby) - group + 1, group)]
    shuffle = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[i] for i in shuffle]
