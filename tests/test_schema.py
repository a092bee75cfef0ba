"""The one result schema: rows in, the same table back from disk whatever drafts are called, numbers as numbers."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
import torch

from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.experiments.common.intervals import Estimate
from dspine_probe.experiments.common.rows import RowBuilder
from dspine_probe.experiments.common.schema import COLUMNS, Result
from dspine_probe.experiments.common.wording import number, percent, points

# Names that a reader of CSV takes for a number, a truth value or nothing at all.
NAMES = ["400", "01", "1e3", "true", "NA", "None", "nan", "", "a,b", 'a"b', "x = y", "−1", "two\nlines"]


@dataclass(frozen=True, eq=False)
class ToyResult(Result):
    NAME, FACTORS = "toy_schema", ("protocol", "site")
    checks: dict[str, int]


def toy(rows: RowBuilder, names: list[str] = NAMES) -> ToyResult:
    return ToyResult(rows.table(), {"seed": 1}, {name: {} for name in names}, {}, 1.5, {"kept": 3})


def estimate(*values: float) -> Estimate:
    return Estimate(*(torch.tensor(value, dtype=torch.float64) for value in values))


def filled(names: list[str] = NAMES) -> RowBuilder:
    rows = RowBuilder(ToyResult.FACTORS)
    for name in names:
        rows.add(
            estimate(1 / 3, 0.1, 0.7), draft=name, metric="NA", n=7, depth=11, slot="01", set="1e5",
            protocol="None", site="007",
        )  # fmt: skip
        rows.add(0.25, draft=name, metric="top1", n=1, depth=2, protocol="A", site=name)
        rows.add(0.5, draft=name, metric="top1", n=2, protocol="", site="")
    return rows


def test_any_name_comes_back_as_it_was(tmp_path: Path):
    before = toy(filled())
    before.save(tmp_path)
    after = ToyResult.load(tmp_path)
    pd.testing.assert_frame_equal(after.table, before.table, check_exact=True)
    pd.testing.assert_frame_equal(after.frame(), before.frame(), check_exact=True)
    assert list(after.drafts) == NAMES and (after.config, after.checks, after.seconds) == (
        {"seed": 1},
        {"kept": 3},
        1.5,
    )
    for name in NAMES:
        mine = after.select(draft=name)
        assert len(mine) == 3 and mine["slot"].tolist() == ["01", "", ""]
        assert mine["site"].tolist() == ["007", name, ""] and mine["protocol"].tolist() == ["None", "A", ""]


def test_depth_sorts_as_a_number_and_may_be_absent(tmp_path: Path):
    rows = RowBuilder()
    for depth in (10, 2, None, 0, 11):
        rows.add(1.0, draft="d", metric="m", n=1, depth=depth)

    @dataclass(frozen=True, eq=False)
    class Plain(Result):
        NAME = "plain"

    Plain(rows.table(), {}, {}, {}, 0.0).save(tmp_path)
    loaded = Plain.load(tmp_path)
    assert loaded.table.sort_values("depth")["depth"].dropna().tolist() == [0, 2, 10, 11]
    assert len(loaded.select(depth=10)) == len(loaded.select(depth=None)) == 1
    assert len(loaded.select(depth=[0, 2, 3])) == 2
    assert tuple(loaded.frame().columns) == COLUMNS


def test_an_empty_table_keeps_its_columns(tmp_path: Path):
    toy(RowBuilder(ToyResult.FACTORS), []).save(tmp_path)
    loaded = ToyResult.load(tmp_path)
    assert loaded.table.empty and loaded.select(protocol="A", depth=1).empty


def test_rows_and_questions_that_do_not_fit_are_refused(tmp_path: Path):
    rows = RowBuilder(("protocol", "site"))
    with pytest.raises(UsageError, match=r"factors \['protocol', 'site'\]"):
        rows.add(1.0, draft="d", metric="m", n=1, protocol="A")
    with pytest.raises(UsageError, match="joins them"):
        rows.add(1.0, draft="d", metric="m", n=1, protocol="A | B", site="x")
    with pytest.raises(UsageError, match="no column 'place'"):
        toy(filled()).select(place="x")
    with pytest.raises(UsageError, match="make it with RowBuilder"):
        ToyResult(pd.DataFrame({"a": [1]}), {}, {}, {}, 0.0, {})
    with pytest.raises(UsageError, match="does not name protocol, site"):
        odd = RowBuilder(("alone",))
        odd.add(1.0, draft="d", metric="m", n=1, alone="x")
        ToyResult(odd.table(), {}, {}, {}, 0.0, {}).frame()


def test_damaged_results_are_named(tmp_path: Path):
    with pytest.raises(UsageError, match="toy_schema.json was not found"):
        ToyResult.load(tmp_path)
    toy(filled()).save(tmp_path)
    table = tmp_path / "toy_schema.csv"
    text = table.read_text()
    table.write_text(text.replace(",11,", ",eleven,", 1))
    with pytest.raises(ProbeError, match="toy_schema.csv cannot be read .*eleven"):
        ToyResult.load(tmp_path)
    table.write_text("draft,reader\nx,y\n")
    with pytest.raises(UsageError, match="measure again if an older version wrote it"):
        ToyResult.load(tmp_path)
    table.unlink()
    with pytest.raises(ProbeError, match="make it again"):
        ToyResult.load(tmp_path)


def test_values_are_written_with_their_interval_or_without_one():
    found, alone = estimate(-0.287, -0.316, -0.255), Estimate.without_interval(0.287)
    assert points(found) == "-28.7 points (-31.6, -25.5)"
    assert percent(pd.Series({"mean": 0.613, "low": 0.58, "high": 0.644})) == "61.3 % (58.0, 64.4)"
    assert number(found, 3, signed=True) == "-0.287 (-0.316, -0.255)"
    assert number(alone, signed=True) == "+0.29 (no interval)" and percent(alone) == "28.7 % (no interval)"
    assert number(Estimate.without_interval(float("nan"))) == "undefined"
