"""On a CUDA device: FastGpu with its kernels and captured graphs, against the reference engines."""

from pathlib import Path

import pytest
import torch
from tiny import prompts, tiny_draft, tiny_target

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.decoding.fast_gpu import FastGpu
from dspine_probe.decoding.generate import generate_batch
from dspine_probe.drafts import Draft
from dspine_probe.drafts.checkpoint import load_draft, save_draft
from dspine_probe.target import Target

pytestmark = pytest.mark.gpu


DEVICE = "cuda"


def on_device(kind: str, architecture: str, folder: Path, dtype: torch.dtype) -> tuple[Target, Draft]:
    cpu = tiny_target(kind)
    save_draft(tiny_draft(cpu, architecture), folder / "draft", dtype=torch.float32)
    target = Target.from_model(cpu.model.to(DEVICE, dtype), name=cpu.name, stop_ids=(2,))
    return target, load_draft(folder / "draft", target, dtype=dtype)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("architecture", [DFLASH, DSPINE])
@pytest.mark.parametrize("rows", [1, 4])
def test_the_engine_decodes_what_the_reference_decodes(kind: str, architecture: str, rows: int, tmp_path: Path) -> None:
    target, draft = on_device(kind, architecture, tmp_path, torch.float32)
    asked, engines = prompts(rows), FastGpu()
    assert DEVICE == "cpu" or engines.about["why not graphs"] is None, "steps are captured as CUDA graphs"
    expected = generate_batch(target, draft, asked, max_new_tokens=24)
    found = generate_batch(target, draft, asked, max_new_tokens=24, engines=engines)
    assert [one.tokens for one in found] == [one.tokens for one in expected]


def test_bf16_decodes_on_the_device(tmp_path: Path) -> None:
    target, draft = on_device("qwen3", DSPINE, tmp_path, torch.bfloat16)
    (found,) = generate_batch(target, draft, prompts(1), max_new_tokens=24, engines=FastGpu())
    target.check_ids(found.tokens)
    assert found.finish == "stop" or len(found.tokens) == 24
