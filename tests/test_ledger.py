"""The ledger says what the results say: no more, the same every time, and something else when they change."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.experiments.acceptance import AcceptanceCounts, AcceptanceResult, RequestCounts
from dspine_probe.experiments.common.claims import PUBLISHED, Claim, Control
from dspine_probe.experiments.common.intervals import Estimate
from dspine_probe.experiments.common.rows import RowBuilder
from dspine_probe.experiments.common.verdicts import ClaimVerdict
from dspine_probe.experiments.emergence import EmergenceResult
from dspine_probe.experiments.ledger import Filed, collect, render, write_ledger


def acceptance(gain=30, kinds=(DFLASH, DSPINE)):
    """Two drafts on two sets of three prompts; the second commits `gain` tokens more a prompt."""
    requests = tuple(
        RequestCounts(draft, name, f"{name}{i}", 50, 60 + 2 * i + more, False, (50, 20), (20 + i, 10))
        for draft, more in (("a", 0), ("b", gain))
        for name in ("math", "chat")
        for i in range(3)
    )
    drafts = {name: {"architecture": kind} for name, kind in zip("ab", kinds, strict=True)}
    counts = AcceptanceCounts(requests, resamples=100)
    return AcceptanceResult.of(counts, {"max_new_tokens": 99, "target": "toy"}, drafts)


def emergence(fall=0.2, gap=0.15, prompts=3):
    """A table with what P0 asks for; depth 3 of 4 is deep and not asked about."""
    rows = RowBuilder(EmergenceResult.FACTORS)
    for setting, value in (
        ("trained", fall), ("untrained draft", fall - gap), ("trained − untrained draft", gap),
        ("attention cut", fall / 2),
    ):  # fmt: skip
        for metric, mean in (("top1_fall", value), ("top1_trend", -value)):
            for depth in range(5):
                mean = -mean if depth > 2 else mean
                found = Estimate(*(torch.tensor(end).double() for end in (mean, mean - 0.05, mean + 0.05)))
                rows.add(
                    found, draft="spine", metric=metric, n=9, depth=depth, setting=setting, reader="translator"
                )  # fmt: skip
    data = {"test_prompts": 6, "test_prompts_by_set": {"math": prompts, "chat": 4}}
    return EmergenceResult(rows.table(), {}, {"spine": {}}, data, 1.0)


@pytest.fixture
def folder(tmp_path: Path):
    acceptance().save(tmp_path / "acceptance_public")
    emergence().save(tmp_path)
    return tmp_path


def test_without_results_everything_is_not_measured(tmp_path):
    text = render(collect(tmp_path))
    for published in PUBLISHED:
        row = next(line for line in text.splitlines() if line.startswith(f"| {published.id} |"))
        assert row.count("not measured") == 1 and published.paper in row
    assert text.count("Here: not measured.") == len(PUBLISHED)


def test_ledger_is_the_same_text_every_time_and_names_its_sources(folder):
    write_ledger(folder, folder / "claims.md")
    first = (folder / "claims.md").read_text()
    write_ledger(folder, folder / "claims.md")
    assert (folder / "claims.md").read_text() == first == render(collect(folder))
    assert "From `acceptance_public/acceptance.json`, made by `dspine-probe evaluate --draft a --draft b" in first
    assert "From `emergence.json`, made by `make reproduce`" in first
    assert str(folder) not in first
    assert first.count("Here: not measured.") == len(PUBLISHED) - 2
    assert [f.claim.id for f in collect(folder)] == ["P0", "AL"]


def test_an_edited_result_changes_the_ledger(folder):
    before = render(collect(folder))
    record = folder / "acceptance_public" / "acceptance.json"
    raw = json.loads(record.read_text())
    raw["data"]["requests"][-1]["committed"] += 25
    record.write_text(json.dumps(raw))
    changed = render(collect(folder))
    assert changed != before
    table = pd.read_csv(folder / "emergence.csv")
    table.loc[(table["condition"] == "trained | translator") & (table["depth"] == 1), ["mean", "low", "high"]] = (
        -0.3,
        -0.4,
        -0.2,
    )
    table.to_csv(folder / "emergence.csv", index=False)
    final = render(collect(folder))
    assert "-30.0 points (-40.0, -20.0) at depth 1" in final and "-30.0 points" not in changed
    assert "| reversed in 1 seed |" in final and "| reversed in 1 seed |" not in changed


def test_published_claims_are_those_of_the_paper():
    assert [published.id for published in PUBLISHED] == ["faster", "P0", "P1", "P2", "P3", "AL", "speed"]


def test_acceptance_claims_the_ratio_and_how_far_it_carries():
    claim = acceptance().claims()[0]
    result = acceptance()
    assert (
        f"= {float(result.counts.paired_ratio('b', 'a').value):.2f} (" in claim.here and "n = 6 prompts" in claim.here
    )
    assert claim.verdict == ("shown in 1 seed", "not measured", "larger") and claim.controls[0] == Control(
        "ahead in every set alone", "2 of 2 intervals above 1", True
    )
    assert acceptance(gain=0).claims()[0].verdict.effect == "negligible in 1 seed"
    assert acceptance(gain=-30).claims()[0].verdict.effect == "reversed in 1 seed"
    assert acceptance(kinds=(DFLASH, DFLASH)).claims() == []


def test_emergence_claims_hold_only_where_controls_could_tell():
    claim = emergence().claims()[0]
    assert (
        claim.verdict.effect == "shown in 1 seed"
        and "+20.0 points (+15.0, +25.0) at depth 2" in claim.here
        and "depth 3" not in claim.here
    )
    passed = {control.name: control.passed for control in claim.controls}
    assert passed == {
        "spine: an untrained draft shows less": True,
        "spine: attention cut": None,
        "test prompts in every set": True,
        "a draft trained with equal slot weights": None,
    }
    thin = emergence(prompts=1).claims()[0]
    assert (
        thin.verdict.effect == "undecided" and Control("test prompts in every set", "1 or more", False) in thin.controls
    )
    assert emergence(fall=0.04).claims()[0].verdict.effect == "undecided"
    assert emergence(fall=-0.2).claims()[0].verdict.effect == "reversed in 1 seed"
    assert emergence(gap=0.01).claims()[0].controls[0].passed is False


def test_verdicts_controls_and_cells_are_spelled_out():
    open_, done = ClaimVerdict("undecided"), ClaimVerdict("shown", "reversed", "smaller")
    controls = [("x", "y", False), ("z", "w", True)]
    claim = Claim.on("P2", here="a | b\nc", controls=controls, verdict=open_, command="run")
    text = render([Filed(claim, "some/where.json"), Filed(replace(claim, here="again", verdict=done), "else.json")])
    assert "| a \\| b c | undecided | not measured | no published number | 1 passed, 1 failed |" in text
    assert "| x | y | failed |" in text and "| z | w | passed |" in text
    assert "|  |  |  | again | shown | reversed | smaller |" in text and text.count("| P2 |") == 1, "said once"


def test_claims_nobody_published_and_broken_results_are_refused(folder):
    with pytest.raises(UsageError, match="no published claim 'P9'; those in the ledger are faster, P0, P1"):
        Claim.on("P9", here="", verdict=ClaimVerdict("shown"), command="")
    with pytest.raises(UsageError, match="is not a folder"):
        collect(folder / "nowhere")
    (folder / "emergence.csv").write_text("draft,condition\nspine,trained\n")
    with pytest.raises(ProbeError, match="emergence.json gives no claims"):
        collect(folder)
