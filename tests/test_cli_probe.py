"""The probe commands end to end on tiny models: table, record, figures, and requests that cannot be met."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from tiny import prompts, tiny_draft, tiny_target
from typer.testing import CliRunner

from dspine_probe.cli.main import app
from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.drafts.checkpoint import save_draft
from dspine_probe.experiments.corruption import CorruptionResult
from dspine_probe.experiments.speed import SpeedResult
from dspine_probe.target import Target


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Drafts "a" (DFlash) and "b" (DSpine), and two sets of four prompts."""
    target, listed = tiny_target(stop_ids=()), prompts(8)
    target.encode_chat = lambda text: listed[int(text)]  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(Target, "load", lambda *_, **__: target)
    save_draft(tiny_draft(target, DFLASH), tmp_path / "a")
    save_draft(tiny_draft(target, DSPINE), tmp_path / "b")
    rows = [json.dumps({"prompt": str(i), "set": "xy"[i % 2], "id": str(i)}) for i in range(8)]
    (tmp_path / "asked.jsonl").write_text("\n".join(rows))
    return tmp_path


def probe(folder: Path, name: str, *options: str) -> Result:
    common = ["--prompts", str(folder / "asked.jsonl"), "--max-new-tokens", "20", "--output", str(folder / "out")]
    return CliRunner().invoke(app, ["probe", name, *common, *options], env={"COLUMNS": "200"})


def test_corruption_writes_table_record_and_figures_and_keeps_its_arena(folder: Path) -> None:
    drafts = ["--draft", f"first={folder / 'a'}", "--draft", str(folder / "b")]
    ran = probe(folder, "corruption", *drafts, "--fast", "--arena", str(folder / "arena"))
    assert ran.exit_code == 0, ran.output
    result = CorruptionResult.load(folder / "out")
    assert list(result.drafts) == ["first", "b"]
    assert (folder / "out" / "corruption_places.html").is_file()
    again = probe(folder, "corruption", *drafts, "--fast", "--arena", str(folder / "arena"))
    assert again.exit_code == 0, again.output
    assert CorruptionResult.load(folder / "out").table.equals(result.table)
    for changed, named in ((["--seed", "3"], "seed (0, not 3)"), (["--limit", "6"], "prompts")):
        refused = probe(folder, "corruption", *drafts, "--fast", "--arena", str(folder / "arena"), *changed)
        assert refused.exit_code == 2 and f"made with another {named}" in refused.stderr, refused.stderr
    (folder / "asked.jsonl").unlink()
    gone = probe(folder, "corruption", *drafts, "--fast", "--arena", str(folder / "arena"))
    assert gone.exit_code == 2 and "asked.jsonl" in gone.stderr


def test_speed_decodes_on_the_engine_that_was_named(folder: Path) -> None:
    options = ["--draft", str(folder / "b"), "--rows", "1", "--temperature", "0", "--limit", "2"]
    ran = probe(folder, "speed", *options, "--engine", "reference")
    assert ran.exit_code == 0, ran.output
    assert SpeedResult.load(folder / "out").fewest == "1"
    unknown = probe(folder, "speed", *options, "--engine", "warp")
    assert unknown.exit_code == 2 and "use one of auto, reference, cpu, gpu" in unknown.stderr.replace("\n", " ")


def test_requests_that_cannot_be_met_are_refused_in_one_sentence(folder: Path) -> None:
    twice = probe(folder, "corruption", "--draft", str(folder / "a"), "--draft", str(folder / "a"))
    assert twice.exit_code == 2 and "NAME=FOLDER" in twice.stderr
    gateless = probe(folder, "gates", "--draft", str(folder / "a"))
    assert gateless.exit_code == 2 and "has no gates" in gateless.stderr
    untrained = probe(folder, "injection-depth", "--draft", str(folder / "a"), "--injectors", str(folder / "none"))
    assert untrained.exit_code == 2 and "no injectors" in untrained.stderr
    homeless = probe(folder, "injection-depth", "--draft", str(folder / "a"), "--features", str(folder))
    assert homeless.exit_code == 2 and "--injectors" in homeless.stderr
    empty = probe(folder, "supervision", "--arms", str(folder / "none"))
    assert empty.exit_code == 2 and "no finished arm" in empty.stderr


def test_a_ledger_without_results_says_not_measured(tmp_path: Path) -> None:
    written = tmp_path / "claims.md"
    ran = CliRunner().invoke(app, ["ledger", str(tmp_path), "--output", str(written)])
    assert ran.exit_code == 0 and written.read_text().count("not measured") >= 6
