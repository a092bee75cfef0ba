"""A new experiment is one entry of the registry: command, ledger and report take it up by themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go
import pytest
from tiny import prompts, tiny_draft, tiny_target
from typer.testing import CliRunner

from dspine_probe import report
from dspine_probe.cli.main import app
from dspine_probe.config import DFLASH
from dspine_probe.drafts import Draft
from dspine_probe.drafts.checkpoint import save_draft
from dspine_probe.experiments.common.claims import Claim
from dspine_probe.experiments.common.request import NothingToMeasure, Request, option
from dspine_probe.experiments.common.rows import RowBuilder
from dspine_probe.experiments.common.schema import Result
from dspine_probe.experiments.common.verdicts import ClaimVerdict
from dspine_probe.experiments.ledger import write_ledger
from dspine_probe.experiments.registry import EXPERIMENTS, Experiment, imported
from dspine_probe.experiments.reproduction import Reproduction, reproduce
from dspine_probe.plots.figure_block import FigureBlock
from dspine_probe.prompts import Prompt
from dspine_probe.target import Target


@dataclass(frozen=True)
class LengthConfig:
    unit: str = option("tokens", "What answers are measured in.")
    shortest: tuple[int, ...] = option((1, 2), "Lengths that are counted; repeat.", min=1)
    base: Mapping[str, Draft] | None = option(None, "NAME=FOLDER: a draft to compare with.")
    seed: int = 0


@dataclass(frozen=True, eq=False)
class LengthResult(Result):
    NAME = "answer_length"

    def findings(self) -> list[str]:
        return [f"Answers are {self.table['mean'][0]:.0f} {self.config['unit']} long."]

    def claims(self) -> list[Claim]:
        return [Claim.on("AL", here=self.findings()[0], verdict=ClaimVerdict("undecided"), command="toy")]


def run(request: Request, config: LengthConfig) -> LengthResult:
    if "mute" in request.drafts:
        raise NothingToMeasure("a mute draft says nothing.")
    rows = RowBuilder()
    for name in {**request.drafts, **(config.base or {})}:
        lengths = [len(answer.response_ids) for answer in request.answers]
        rows.add(sum(lengths) / len(lengths), draft=name, metric="length", n=len(lengths))
    request.on_progress("answer-length", 1, 1)
    about = {"unit": config.unit, "shortest": config.shortest, "seed": config.seed}
    return LengthResult(rows.table(), about, {name: {} for name in request.drafts}, {}, 0.0)


def picture(result: LengthResult) -> FigureBlock:
    return FigureBlock(go.Figure(), "Lengths", "How long. And more.", "Long.", result.table)


def nothing(_result: LengthResult) -> None:
    return None


@pytest.fixture
def toy() -> Iterator[Experiment]:
    entry = Experiment(
        "answer-length",
        "How long answers are.",
        result=f"{__name__}:LengthResult",
        config=f"{__name__}:LengthConfig",
        run=f"{__name__}:run",
        figures=(f"{__name__}:picture", f"{__name__}:nothing"),
        drafts=("toy",),
        reproduced={"unit": "pieces"},
    )
    others = dict(EXPERIMENTS)
    EXPERIMENTS.clear()
    EXPERIMENTS[entry.name] = entry
    yield entry
    EXPERIMENTS.clear()
    EXPERIMENTS.update(others)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    made, listed = tiny_target(stop_ids=()), prompts(12)
    made.encode_chat = lambda text: listed[int(text)]  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(Target, "load", lambda *_, **__: made)
    return made


def test_it_is_a_command_with_its_own_options(toy: Experiment, target: Target, tmp_path: Path) -> None:
    wide = {"COLUMNS": "200"}
    listed = CliRunner().invoke(app, ["probe", "--help"], env=wide).output
    assert "answer-length" in listed and "How long answers are." in listed
    shown = CliRunner().invoke(app, ["probe", "answer-length", "--help"], env=wide).output
    assert "What answers are measured in." in shown and "--arena" in shown and "--precision" in shown
    save_draft(tiny_draft(target, DFLASH), tmp_path / "d")
    (tmp_path / "asked.jsonl").write_text("\n".join(json.dumps({"prompt": str(i), "id": str(i)}) for i in range(3)))
    where = ["--prompts", str(tmp_path / "asked.jsonl"), "--output", str(tmp_path / "out")]
    asked = ["--max-new-tokens", "9", "--draft", f"400={tmp_path / 'd'}", "--base", f"01={tmp_path / 'd'}"]
    own = ["--unit", "words", "--shortest", "3", "--shortest", "4", "--seed", "5"]
    ran = CliRunner().invoke(app, ["probe", "answer-length", *where, *asked, *own], env=wide)
    assert ran.exit_code == 0, ran.output
    assert "Answers are 9 words long." in ran.stdout
    result = LengthResult.load(tmp_path / "out")
    assert result.config == {"unit": "words", "shortest": [3, 4], "seed": 5}
    assert result.table["draft"].tolist() == ["400", "01"] and list(result.drafts) == ["400"]
    assert (tmp_path / "out" / "answer_length_picture.html").is_file()
    unknown = CliRunner().invoke(app, ["probe", "answer-lengths"])
    assert unknown.exit_code == 2


def test_it_is_in_the_ledger(toy: Experiment, tmp_path: Path) -> None:
    rows = RowBuilder()
    rows.add(7.0, draft="NA", metric="length", n=1)
    LengthResult(rows.table(), {"unit": "words"}, {}, {}, 0.0).save(tmp_path)
    filed = write_ledger(tmp_path, tmp_path / "claims.md")
    assert [one.source for one in filed] == ["answer_length.json"]
    assert "Answers are 7 words long." in (tmp_path / "claims.md").read_text()


def test_it_is_in_the_report_and_left_out_with_its_reason(toy: Experiment, target: Target, tmp_path: Path) -> None:
    asked = [Prompt(str(i), "one", str(i)) for i in range(5)]
    request = Request(target, {"toy": tiny_draft(target, DFLASH)}, asked, max_new_tokens=9, batch_size=4)
    found = reproduce(request)
    page, notes = report.write(found, tmp_path)
    text = page.read_text()
    for said in ("How long answers are.", "Answers are 9 pieces long.", 'id="answer-length"', "effect undecided"):
        assert said in text
    assert "<figcaption>How long.</figcaption>" in text and (tmp_path / "answer_length.csv").is_file()
    mute = reproduce(Request(target, {"mute": request.drafts["toy"]}, asked, max_new_tokens=9))
    page, notes = report.write(mute, tmp_path / "mute")
    assert notes[-1] == "a mute draft says nothing." and "a mute draft says nothing." in page.read_text()


def test_every_entry_names_what_is_there_and_no_name_twice() -> None:
    stems = []
    for name, one in EXPERIMENTS.items():
        assert one.name == name and one.summary.endswith((".", ")."))
        result, config = one.load_result_class(), one.load_config()
        assert issubclass(result, Result) and callable(one.load_run())
        assert all(callable(imported(path)) for path in one.figures)
        if one.reproduced is not None:
            made = config(**one.reproduced)
            assert all(getattr(made, key) == value for key, value in one.reproduced.items())
        stems.append(result.NAME)
    assert len(set(stems)) == len(stems)


def test_listing_commands_imports_no_experiment() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from dspine_probe.cli.main import app;"
        "out = CliRunner().invoke(app, ['probe', '--help']).output; assert 'corruption' in out, out;"
        "print(sorted({'torch', 'transformers', 'plotly', 'pandas'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_an_empty_reproduction_writes_a_page(tmp_path: Path) -> None:
    page, _ = report.write(Reproduction({}, {}, 0.0), tmp_path)
    assert report.lead(Reproduction({}, {}, 0.0)) is None and "<h1>" in page.read_text()
