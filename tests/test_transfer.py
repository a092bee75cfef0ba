"""The transfer space: what whitening promises, and rows that could break it."""

from __future__ import annotations

import pytest
import torch
from toy import seeded

from dspine_probe.errors import UsageError
from dspine_probe.transfer import TransferSpace


def random_head(vocab: int = 400, d_model: int = 12) -> torch.Tensor:
    mix = torch.randn(d_model, d_model, generator=seeded(1))
    return torch.randn(vocab, d_model, generator=seeded()) @ mix + 0.5


def test_codes_are_whitened_unit_directions() -> None:
    head = random_head()
    space = TransferSpace.fit(head, 6)
    rows = torch.nn.functional.normalize(head, dim=-1) - space.mean
    raw = rows @ space.projection
    torch.testing.assert_close(raw.mean(0), torch.zeros(6), atol=1e-5, rtol=0)
    torch.testing.assert_close(raw.T @ raw, torch.eye(6), atol=1e-4, rtol=1e-4)
    codes = space.codes(head)
    torch.testing.assert_close(codes.norm(dim=-1), torch.ones(len(head)))
    assert (space.eigenvalues.diff() <= 0).all()


def test_duplicate_and_zero_rows_stay_finite() -> None:
    head = random_head()
    head[5], head[6] = head[4], 0.0
    codes = TransferSpace.fit(head, 6).codes(head)
    assert torch.isfinite(codes).all()
    torch.testing.assert_close(codes[4], codes[5])


def test_signs_are_fixed() -> None:
    space = TransferSpace.fit(random_head(), 6)
    peaks = space.basis.gather(0, space.basis.abs().argmax(0, keepdim=True))
    assert (peaks > 0).all()


def test_a_code_is_nearest_to_its_own_token() -> None:
    head = random_head()
    codes = TransferSpace.fit(head, 12).codes(head)
    assert torch.equal((codes[:50] @ codes.T).argmax(dim=-1), torch.arange(50))


def test_an_impossible_rank_is_refused() -> None:
    with pytest.raises(UsageError, match="rank 13 does not fit"):
        TransferSpace.fit(random_head(), 13)
    with pytest.raises(UsageError, match="independent directions"):
        TransferSpace.fit(torch.ones(50, 12), 3)
