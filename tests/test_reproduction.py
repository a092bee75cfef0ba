"""The main job end to end on tiny models: one set of answers, three results, files that open alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny_draft, tiny_target

from dspine_probe import report
from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.experiments.acceptance import AcceptanceResult
from dspine_probe.experiments.emergence.result import EmergenceResult
from dspine_probe.experiments.reproduction import Reproduction, ReproductionConfig, reproduce
from dspine_probe.prompts import Prompt

PROMPTS = [Prompt(f"{name}/{i}", name, name * (i + 2)) for i in range(6) for name in ("ab", "cd")]


@pytest.fixture(scope="module")
def found() -> Reproduction:
    target = tiny_target(stop_ids=())
    target.encode_chat = lambda text: [3 + ord(c) % 50 for c in text]  # type: ignore[method-assign, assignment]
    drafts = {"dflash": tiny_draft(target, DFLASH), "dspine": tiny_draft(target, DSPINE)}
    config = ReproductionConfig(max_new_tokens=24, batch_size=4, decoded_prompts=3, decoded_tokens=10)
    stages: set[str] = set()
    result = reproduce(
        target, drafts, PROMPTS, config=config, on_progress=lambda stage, _done, _total: stages.add(stage)
    )
    assert stages == {"answers", "states", "walks", "emergence", "corruption", "decoding"}
    return result


def test_offline_and_real_decoding_agree(found: Reproduction) -> None:
    """The decoded prompts are the first of the walked ones; both must tell the same tokens as plain decoding."""
    assert found.speed.same_tokens
    assert found.speed.modes == ("plain", *found.acceptance.drafts)
    assert len(found.acceptance.requests) == 2 * len(PROMPTS)


def test_the_summary_has_a_row_for_each_mode(found: Reproduction) -> None:
    table = found.summary()
    assert table[""].tolist() == ["plain", "dflash", "dspine"]
    assert table["AL"][0] == "1"
    assert "(" in table["AL"][1]


def test_everything_is_written_and_opens_without_network(found: Reproduction, tmp_path: Path) -> None:
    page, _notes = report.write(found, tmp_path)
    text = page.read_text()
    assert "<script src=" not in text
    assert text.count("<li>") == len(found.findings()) > 0
    for name in report.figure_blocks(found):
        assert (tmp_path / f"{name}.html").is_file()
    assert AcceptanceResult.load(tmp_path).requests == found.acceptance.requests
    assert EmergenceResult.load(tmp_path).grid("dflash").shape == found.emergence.grid("dflash").shape
    assert (tmp_path / "speed.csv").is_file() and (tmp_path / "corruption.csv").is_file()
