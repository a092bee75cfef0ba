"""Losses of parallel drafts, computed where the memory is: in chunks of rows, one pass over the vocabulary.

`head_loss` is cross-entropy and, optionally, the L1 distance to the target's distribution, with gradients in closed
form, so that logits of one chunk exist at a time and never outlive it (DFlash arXiv 2602.06036; the L1 mix and the
candidate losses as in DSpine, arXiv 2609.36173). Weights are expected to be divided by their global sum already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dspine_probe.errors import UsageError

_CHUNK = 256


@dataclass(frozen=True)
class HeadLoss:
    """Weighted loss, its cross-entropy part (detached), top-1 hits, top-K candidates and the target's mass on them."""

    loss: Float[Tensor, ""]
    cross_entropy: Float[Tensor, ""]
    correct: Bool[Tensor, "rows"]
    candidates: Int[Tensor, "rows k"]
    teacher_mass: Float[Tensor, "rows k"]


def head_loss(
    hidden: Float[Tensor, "rows d_model"],
    head: Float[Tensor, "draft_vocab d_model"],
    labels: Int[Tensor, "rows"],
    weight: Float[Tensor, "rows"],
    *,
    teacher: Float[Tensor, "rows d_model"] | None = None,
    ce_weight: float = 1.0,
    l1_weight: float = 0.0,
    top_k: int = 0,
) -> HeadLoss:
    """Σ w · (ce_weight · CE + l1_weight · ‖softmax U − p^t‖₁), differentiable in `hidden` only.

    Labels index the draft's vocabulary; −1 marks a token outside it, whose row must have weight 0. `teacher` holds the
    target's final states; p^t is its softmax over the same vocabulary.

    Raises:
        UsageError: an L1 distance is asked for without a teacher.
    """
    if teacher is None and l1_weight:
        raise UsageError("the L1 distance needs the target's states; give teacher, or l1_weight=0.")
    loss, ce, correct, candidates, mass = _ChunkedHead.apply(
        hidden, head, labels, weight, teacher, ce_weight, l1_weight, top_k
    )
    return HeadLoss(loss, ce, correct, candidates, mass)


def in_chunks(losses: Callable[..., tuple[Tensor, ...]], *rows: Tensor) -> tuple[Tensor, ...]:
    """What `losses` gives for every row of `rows`, whose scores never exist all at once.

    The scores of a chunk are made again for its gradient. For losses that `head_loss` has no closed form of.
    """
    found = [
        checkpoint(losses, *(part[at : at + _CHUNK] for part in rows), use_reentrant=False)
        for at in range(0, len(rows[0]), _CHUNK)
    ]
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def label_entropy(
    scores: Float[Tensor, "rows draft_vocab"], labels: Int[Tensor, "rows"]
) -> tuple[Float[Tensor, "rows"], Bool[Tensor, "rows"]]:
    """Cross-entropy of every row, and whether its best token is the label; a row labelled −1 must have weight 0."""
    return F.cross_entropy(scores, labels.clamp(min=0), reduction="none"), scores.argmax(dim=-1) == labels


@torch.no_grad()
def target_distribution(
    teacher: Float[Tensor, "rows d_model"], head: Float[Tensor, "draft_vocab d_model"]
) -> Float[Tensor, "rows draft_vocab"]:
    """The target's probabilities over the draft's vocabulary, from its final states."""
    return F.linear(teacher.to(head.dtype), head).float().softmax(dim=-1)


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, labels, weight, teacher, ce_weight, l1_weight, top_k):  # type: ignore[no-untyped-def]
        rows = len(hidden)
        gradient = torch.empty_like(hidden)
        loss = hidden.new_zeros((), dtype=torch.float32)
        entropy = loss.clone()
        correct = torch.empty(rows, dtype=torch.bool, device=hidden.device)
        candidates = torch.empty(rows, top_k, dtype=torch.long, device=hidden.device)
        mass = torch.zeros(rows, top_k, device=hidden.device)
        matrix = head.to(hidden.dtype)
        for start in range(0, rows, _CHUNK):
            part = slice(start, min(start + _CHUNK, rows))
            logits = hidden[part] @ matrix.T
            probability = logits.softmax(dim=-1, dtype=torch.float32)
            label, w = labels[part].clamp(min=0)[:, None], weight[part][:, None]
            # As the draft chooses: in bf16 several scores may share the maximum, and only one of them is proposed.
            correct[part] = logits.argmax(-1) == labels[part]
            if top_k:
                candidates[part] = logits.topk(top_k, dim=-1).indices
            ce = -(w * probability.gather(-1, label).clamp(min=1e-30).log()).sum()
            entropy += ce
            loss += ce_weight * ce
            if teacher is not None:
                target = (teacher[part].to(matrix.dtype) @ matrix.T).softmax(dim=-1, dtype=torch.float32)
                mass[part] = target.gather(-1, candidates[part])
            if l1_weight:
                difference = probability - target
                loss += l1_weight * (w * difference.abs().sum(-1, keepdim=True)).sum()
                sign = difference.sign_()
                inner = (probability * sign).sum(-1, keepdim=True)
                # d(ce·CE + l1·L1)/dU = p ⊙ (ce + l1·(s − ⟨p, s⟩)) − ce·onehot
                slope = probability.mul_(sign.sub_(inner).mul_(l1_weight).add_(ce_weight))
            else:
                slope = probability.mul_(ce_weight)
            slope.scatter_add_(-1, label, slope.new_full(label.shape, -ce_weight))
            gradient[part] = slope.mul_(w).to(matrix.dtype) @ matrix
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(entropy, correct, candidates, mass)
        return loss, entropy, correct, candidates, mass

    @staticmethod
    def backward(ctx, grad_loss, *_):  # type: ignore[no-untyped-def]
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss.to(gradient.dtype), None, None, None, None, None, None, None


def candidate_loss(
    scores: Float[Tensor, "rows k"],
    candidates: Int[Tensor, "rows k"],
    labels: Int[Tensor, "rows"],
    teacher_mass: Float[Tensor, "rows k"],
    weight: Float[Tensor, "rows"],
    *,
    ce_weight: float,
    l1_weight: float,
    mass_threshold: float,
) -> Float[Tensor, ""]:
    """K-way cross-entropy where the label is a candidate, and L1 to the target's renormalised candidate mass."""
    log_p = scores.float().log_softmax(dim=-1)
    hit = candidates == labels[:, None]
    # Where no candidate is the label the sum is empty, hence zero.
    ce = -(log_p * hit).sum(-1)
    total = teacher_mass.sum(-1, keepdim=True)
    l1 = (log_p.exp() - teacher_mass / total.clamp(min=1e-12)).abs().sum(-1) * (total[:, 0] > mass_threshold)
    return (weight * (ce_weight * ce + l1_weight * l1)).sum()


def alignment_loss(
    features: tuple[Float[Tensor, "block slot rank"], ...],
    codes: Float[Tensor, "block draft_slot rank"],
    weight: Float[Tensor, "block draft_slot"],
) -> Float[Tensor, ""]:
    """Σ over layers of Σ w · (1 − cos(f_l, e_label)), features read after each injection."""
    losses = [(weight * (1 - F.cosine_similarity(f[:, 1:].float(), codes, dim=-1))).sum() for f in features]
    return torch.stack(losses).sum()
