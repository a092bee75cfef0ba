"""Real decoding side by side: same tokens, sound sums."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tiny import tiny_draft, tiny_target

from dspine_probe.errors import UsageError
from dspine_probe.experiments.speed import decode_all
from dspine_probe.prompts import Prompt


def test_modes_agree_and_shares_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    monkeypatch.setattr(target, "encode_chat", lambda text: [3 + ord(c) % 50 for c in text])
    prompts = [Prompt(f"p{i}", "a", "word" * (i + 1)) for i in range(3)]
    result = decode_all(target, {"dflash": tiny_draft(target)}, prompts, max_new_tokens=12)
    assert result.modes == ("plain", "dflash")
    assert result.same_tokens
    assert float(result.acceptance_length("plain").value) == 1.0
    assert float(result.acceptance_length("dflash").value) >= 1.0
    speedup = float(result.tokens_per_second("dflash").value / result.tokens_per_second("plain").value)
    assert float(result.speedup("dflash").value) == pytest.approx(speedup)
    assert 0 < result.share("dflash", "drafting") + result.share("dflash", "verifying") <= 1
    result.save(tmp_path)
    assert (tmp_path / "speed.csv").read_text().count("\n") == 3
    wrong = dataclasses.replace(result.answers[0], same_as_plain=False)
    assert not dataclasses.replace(result, answers=(wrong, *result.answers[1:])).same_tokens


def test_refusals() -> None:
    target = tiny_target()
    with pytest.raises(UsageError, match="at least one prompt"):
        decode_all(target, {}, [], max_new_tokens=4)
    with pytest.raises(UsageError, match="not named 'plain'"):
        decode_all(target, {"plain": tiny_draft(target)}, [Prompt("p", "a", "x")], max_new_tokens=4)
