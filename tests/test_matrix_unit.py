"""Products on Intel's matrix unit, where there is one: right, and the same bits whatever is multiplied beside a row."""

import pytest
import torch
from test_fast_cpu import kernels_or_skip

from dspine_probe.decoding.cpu import build


@pytest.mark.parametrize("inputs", [32, 40, 96, 576])
def test_a_row_has_the_same_bits_alone_and_beside_others(inputs: int):
    compute, generator = kernels_or_skip(torch.bfloat16), torch.Generator().manual_seed(0)
    weight = (torch.randn(75, inputs, generator=generator) / inputs**0.5).bfloat16()
    x = torch.randn(70, inputs, generator=generator).bfloat16().float()
    matrix = compute.matrix(weight)
    whole = compute.product(x, matrix)
    torch.testing.assert_close(whole, x @ weight.float().T, rtol=0, atol=1e-5)
    for rows in (1, 7, 16, 17, 32, 33, 70):
        assert torch.equal(compute.product(x[:rows].contiguous(), matrix), whole[:rows])


def test_kernels_without_the_matrix_unit_are_loaded_where_the_system_forbids_it(monkeypatch: pytest.MonkeyPatch):
    kernels_or_skip(torch.bfloat16)
    asked: list[bool] = []

    class Library:
        def __init__(self, unit: bool) -> None:
            self.unit = unit

        def allowed(self) -> bool:
            return not self.unit

    monkeypatch.setattr(build, "_load", lambda half, pairs, unit: asked.append(unit) or Library(unit))
    assert build.load(half=True).unit is False
    assert asked == [True, False]
