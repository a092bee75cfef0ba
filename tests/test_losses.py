"""Chunked losses against plain autograd over the whole vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from toy import seeded

from dspine_probe.errors import UsageError
from dspine_probe.training import losses
from dspine_probe.training.losses import alignment_loss, candidate_loss, head_loss

ROWS, D, V = 11, 6, 13


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_CHUNK", 4)


def data() -> tuple[torch.Tensor, ...]:
    g = seeded()
    hidden = torch.randn(ROWS, D, generator=g, requires_grad=True)
    head, teacher = torch.randn(V, D, generator=g), torch.randn(ROWS, D, generator=g)
    labels, weight = torch.randint(0, V, (ROWS,), generator=g), torch.rand(ROWS, generator=g)
    labels[3], weight[3] = -1, 0.0
    return hidden, head, teacher, labels, weight


@pytest.mark.parametrize(("ce", "l1"), [(1.0, 0.0), (0.1, 0.9), (0.0, 1.0)])
def test_value_and_gradient_equal_the_whole_computation(ce: float, l1: float) -> None:
    hidden, head, teacher, labels, weight = data()
    result = head_loss(
        hidden, head, labels, weight, teacher=teacher if l1 else None, ce_weight=ce, l1_weight=l1, top_k=3
    )
    (3 * result.loss).backward()
    got, hidden.grad = hidden.grad, None
    logits = hidden @ head.T
    target = (teacher @ head.T).softmax(-1)
    entropy = (weight * F.cross_entropy(logits, labels.clamp(min=0), reduction="none")).sum()
    distance = (weight * (logits.softmax(-1) - target).abs().sum(-1)).sum()
    want = ce * entropy + l1 * distance
    (3 * want).backward()
    torch.testing.assert_close(result.loss, want)
    torch.testing.assert_close(result.cross_entropy, entropy)
    torch.testing.assert_close(got, hidden.grad)
    assert torch.equal(result.candidates, logits.topk(3).indices)
    assert torch.equal(result.correct, logits.argmax(-1) == labels)
    if l1:
        torch.testing.assert_close(result.teacher_mass, target.gather(-1, result.candidates))


def test_candidate_loss_by_hand() -> None:
    scores = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 1.0]])
    candidates, labels = torch.tensor([[4, 5], [6, 7], [8, 9]]), torch.tensor([5, 1, 8])
    mass, weight = torch.tensor([[0.3, 0.1], [0.2, 0.2], [0.0, 0.0]]), torch.tensor([1.0, 0.5, 0.25])
    got = candidate_loss(scores, candidates, labels, mass, weight, ce_weight=0.1, l1_weight=0.9, mass_threshold=1e-4)
    p = scores.softmax(-1)
    ce = torch.stack([-p[0, 1].log(), torch.tensor(0.0), -p[2, 0].log()])
    l1 = torch.stack([(p[0] - torch.tensor([0.75, 0.25])).abs().sum(), (p[1] - 0.5).abs().sum(), torch.tensor(0.0)])
    torch.testing.assert_close(got, (weight * (0.1 * ce + 0.9 * l1)).sum())


def test_alignment_is_zero_on_the_codes_and_two_on_their_negatives() -> None:
    codes = F.normalize(torch.randn(2, 3, 5, generator=seeded()), dim=-1)
    padded = torch.cat([torch.zeros(2, 1, 5), codes], dim=1)
    weight = torch.full((2, 3), 1 / 6)
    assert alignment_loss((padded, padded * 4), codes, weight).abs() < 1e-6
    torch.testing.assert_close(alignment_loss((-padded,), codes, weight), torch.tensor(2.0))


def test_a_tie_is_a_hit_only_where_the_draft_would_propose_the_label() -> None:
    """In bf16 the scores of several tokens often share the maximum."""
    head = torch.eye(4, dtype=torch.bfloat16)
    hidden = torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 2, dtype=torch.bfloat16)
    result = head_loss(hidden, head, torch.tensor([0, 1]), torch.ones(2))
    proposed = (hidden @ head.T).argmax(-1)
    assert result.correct.tolist() == (proposed == torch.tensor([0, 1])).tolist()
    assert result.correct.sum() == 1


def test_l1_without_a_teacher_is_refused() -> None:
    with pytest.raises(UsageError, match="needs the target's states"):
        head_loss(torch.ones(1, 4), torch.eye(4), torch.tensor([0]), torch.ones(1), l1_weight=0.5)
