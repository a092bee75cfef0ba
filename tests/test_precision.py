"""bf16 is used where it is faster, and only there."""

import pytest
import torch

from dspine_probe import precision
from dspine_probe.precision import fast_autocast, fast_dtype, fast_matmul, mixed_precision

FASTER = {True: {torch.bfloat16: 1.0, torch.float32: 2.0}, False: {torch.bfloat16: 2.0, torch.float32: 1.0}}


@pytest.fixture(params=[True, False], ids=["bf16 faster", "fp32 faster"])
def faster(request, monkeypatch):
    """Whether the processor gains by bf16, as far as anyone can see."""
    monkeypatch.setattr(precision, "_seconds", FASTER[request.param].__getitem__)
    monkeypatch.setattr(precision, "default_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fast_dtype.cache_clear()
    yield request.param
    fast_dtype.cache_clear()


def test_the_faster_dtype_is_chosen(faster):
    assert fast_dtype("cpu") is (torch.bfloat16 if faster else torch.float32)
    assert fast_dtype("cuda") is torch.bfloat16
    assert mixed_precision() == ("bf16" if faster else "no")


def test_autocast_changes_products_only_where_it_pays(faster):
    with fast_autocast("cpu"):
        found = torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3))
    assert found.dtype is fast_dtype("cpu")


def test_matmul_precision_is_lowered_only_where_it_pays_and_given_back(faster):
    before = torch.get_float32_matmul_precision()
    with pytest.raises(ZeroDivisionError), fast_matmul():
        assert torch.get_float32_matmul_precision() == ("medium" if faster else before)
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == before


def test_a_processor_can_be_measured():
    assert precision._seconds(torch.float32) > 0
