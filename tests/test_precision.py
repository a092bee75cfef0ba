"""Precision is asked for, decided once, and written down; bf16 is used where it is faster, and only there."""

import pytest
import torch

from dspine_probe import precision
from dspine_probe.errors import UsageError
from dspine_probe.precision import EXACT, Precision

FASTER = {True: {torch.bfloat16: 1.0, torch.float32: 2.0}, False: {torch.bfloat16: 2.0, torch.float32: 1.0}}


@pytest.fixture(params=[True, False], ids=["bf16 faster", "fp32 faster"])
def faster(request, monkeypatch):
    """Whether the processor gains by bf16, as far as anyone can see."""
    monkeypatch.setattr(precision, "_seconds", FASTER[request.param].__getitem__)
    return request.param


def test_auto_takes_the_faster_and_says_what_it_took(faster):
    chosen = Precision.resolve("auto", "cpu")
    used = "bf16" if faster else "fp32"
    assert chosen.dtype is (torch.bfloat16 if faster else torch.float32)
    assert chosen.record() == {"precision": used, "precision_asked": "auto"}
    assert chosen.accelerate == ("bf16" if faster else "no")
    assert Precision.resolve("auto", "cuda").used == "bf16"


@pytest.mark.parametrize("asked", ["fp32", "bf16"])
def test_what_is_asked_for_is_used_whatever_is_faster(faster, asked):
    assert Precision.resolve(asked, "cpu") == Precision(asked, asked)


@pytest.mark.parametrize("written", ["fp32", "bf16"])
def test_a_resumed_run_uses_what_is_written(faster, written):
    assert Precision.resolve("auto", "cpu", written=written).used == written
    assert Precision.resolve(written, "cpu", written=written).used == written
    other = {"fp32": "bf16", "bf16": "fp32"}[written]
    with pytest.raises(UsageError, match=f"{other} was asked for and the run was begun in {written}"):
        Precision.resolve(other, "cpu", written=written)


def test_another_word_is_refused():
    with pytest.raises(UsageError, match="'fp16' is unknown; use auto, fp32 or bf16"):
        Precision.resolve("fp16")


@pytest.mark.parametrize("used", ["fp32", "bf16"])
def test_autocast_changes_products_in_bf16_only(used):
    with Precision(used, used).autocast("cpu"):
        found = torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3))
    assert found.dtype is Precision(used, used).dtype


@pytest.mark.parametrize(("chosen", "inside"), [(EXACT, "highest"), (Precision("bf16", "bf16"), "medium")])
def test_matmul_precision_is_lowered_in_bf16_only_and_given_back(chosen, inside):
    before = torch.get_float32_matmul_precision()
    with pytest.raises(ZeroDivisionError), chosen.matmul():
        assert torch.get_float32_matmul_precision() == inside
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == before == "highest"


def test_a_processor_can_be_measured():
    assert precision._seconds(torch.float32) > 0
