"""What all commands share: bad destinations are found before work begins, names of drafts, the precision."""

import os
from pathlib import Path

import pytest
import torch
from tiny import tiny_draft, tiny_target
from typer.testing import CliRunner
from users import as_nobody

from dspine_probe.cli.main import app
from dspine_probe.cli.options import load, load_fast_target, named
from dspine_probe.drafts.checkpoint import save_draft
from dspine_probe.errors import UsageError
from dspine_probe.target import Target

WRITING = {
    "evaluate": "evaluate --draft a --output {}",
    "reproduce": "reproduce --output {}",
    "corruption": "probe corruption --output {}",
    "injection-depth": "probe injection-depth --output {}",
    "supervision": "probe supervision --arms arms --output {}",
    "gates": "probe gates --output {}",
    "probing": "probe probing --output {}",
    "speed": "probe speed --output {}",
    "arena": "probe gates --arena {}",
    "generate-data": "generate-data prompts.jsonl {}",
    "synthesize": "synthesize {}",
    "features": "features {} --corpus corpus",
    "train": "train dflash {} --features features --blocks 64",
    "work": "train dflash new --features features --blocks 64 --work {}",
}


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a target is the first thing that takes time."""

    def load(*_: object, **__: object) -> Target:
        raise AssertionError("work began")

    monkeypatch.setattr(Target, "load", load)


@pytest.mark.parametrize("command", WRITING.values(), ids=WRITING)
def test_a_bad_destination_is_refused_before_work_begins(command: str, tmp_path: Path, no_work: None) -> None:
    (tmp_path / "file").write_text("")
    ran = CliRunner().invoke(app, command.format(tmp_path / "file" / "deep").split())
    assert ran.exit_code == 2 and "file is a file; name another place" in ran.stderr, ran.output


def test_a_closed_destination_is_refused_before_work_begins(open_to_all: Path, no_work: None) -> None:
    with as_nobody():
        ran = CliRunner().invoke(app, ["probe", "gates", "--output", str(open_to_all / "out")])
    assert ran.exit_code == 2 and "closed to you" in ran.stderr


def test_the_ledger_needs_a_file_it_can_write(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["ledger", str(tmp_path), "--output", str(tmp_path)])
    assert ran.exit_code == 2 and "is a folder; name a file" in ran.stderr


def test_a_folder_with_other_files_is_no_place_for_a_checkpoint(tmp_path: Path, no_work: None) -> None:
    (tmp_path / "thesis.tex").write_text("")
    command = ["train", "dflash", str(tmp_path), "--features", "f", "--blocks", "64"]
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 2 and "name a new folder for the checkpoint" in ran.stderr


def test_an_existing_path_is_a_path_and_anything_else_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("lr=1e-3/final", "a=b"):
        os.makedirs(folder)
    assert named(["lr=1e-3/final", "a=b", "dflash", "mine=lr=1e-3/final", "."]) == {
        "final": "lr=1e-3/final",
        "a=b": "a=b",
        "dflash": "dflash",
        "mine": "lr=1e-3/final",
        tmp_path.name: ".",
    }
    with pytest.raises(UsageError, match="tell them apart as NAME=FOLDER"):
        named(["x/final", "y/final"])


@pytest.mark.parametrize("command", ["evaluate --draft dflsh", "probe gates --draft dflsh", "reproduce"])
def test_drafts_are_located_before_the_target_is_fetched(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_work: None
) -> None:
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    (prompts / "lab.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.setenv("DSPINE_PROBE_DATA", str(tmp_path))
    ran = CliRunner().invoke(app, command.split())
    assert ran.exit_code == 2, ran.output
    assert ("clone of the repository" if command == "reproduce" else "draft 'dflsh' is neither") in ran.stderr


def test_weights_are_loaded_in_the_precision_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tiny(_name: str, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Target:
        return Target.from_model(tiny_target().model.to(dtype), name="tiny-llama")

    monkeypatch.setattr(Target, "load", tiny)
    monkeypatch.setattr("dspine_probe.precision.default_device", lambda: "cpu")
    save_draft(tiny_draft(tiny_target()), tmp_path / "a")
    target, drafts = load("tiny", [str(tmp_path / "a")])
    assert target.dtype == drafts["a"].fc.weight.dtype == torch.float32
    assert load_fast_target("tiny", "bf16", tmp_path / "none.json").dtype == torch.bfloat16
    (tmp_path / "run.json").write_text('{"precision": "bf16"}')
    assert load_fast_target("tiny", "auto", tmp_path / "run.json").dtype == torch.bfloat16
    with pytest.raises(UsageError, match="begun in bf16"):
        load_fast_target("tiny", "fp32", tmp_path / "run.json")
