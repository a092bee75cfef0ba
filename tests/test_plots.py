"""Figures: offline pages, words beside every picture, tensors of any kind, colours that differ in grey too."""

import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
import torch
from test_emergence import SMALL, make_rows
from tiny import tiny_draft, tiny_target

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.experiments.emergence import emergence
from dspine_probe.plots import emergence as emergence_plots
from dspine_probe.plots import figure_block, style
from dspine_probe.plots.figure_block import FigureBlock, write_figure
from dspine_probe.plots.panels import floors, grids, panels


def _emergence():
    target = tiny_target()
    drafts = {"dflash": tiny_draft(target, DFLASH, trimmed=40), "dspine": tiny_draft(target, DSPINE, trimmed=40)}
    return emergence(drafts, make_rows(9), config=SMALL)


@pytest.fixture(scope="module")
def blocks():
    read = _emergence()
    return {
        "heatmaps": emergence_plots.heatmaps(read),
        "codes": emergence_plots.heatmaps(read, reader="nearest code", metric="mrr"),
        "slots": emergence_plots.slot_curves(read),
        "controls": emergence_plots.controls(read),
    }


class _Loads(HTMLParser):
    """Everything a page would fetch."""

    def __init__(self):
        super().__init__()
        self.found, self.tags = [], []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append((tag, given))
        self.found += [given[name] for name in ("src", "href", "data", "srcset") if name in given]


def _parse(path):
    loads = _Loads()
    loads.feed(path.read_text(encoding="utf-8"))
    return loads


def test_every_block_has_words_and_numbers_that_agree(blocks):
    for name, block in blocks.items():
        assert block.title and "n = " in block.caption and len(block.table) and "nan" not in block.alt.lower(), name
        assert re.search(r"\d", block.alt) and block.alt.endswith(".")
        assert block.figure.layout.paper_bgcolor == style.PAPER and block.figure.layout.font.size >= 12


def test_heatmap_cells_are_the_table(blocks):
    block = blocks["heatmaps"]
    for draft, trace in zip(("dflash", "dspine"), block.figure.data, strict=True):
        grid = block.table[block.table["draft"] == draft].pivot(index="depth", columns="slot", values="mean")
        assert np.allclose(trace.z, 100 * grid.to_numpy(), atol=1e-4)
        assert trace.texttemplate and trace.coloraxis == "coloraxis"
    assert block.figure.layout.coloraxis.cmin == 0
    assert [a.text for a in block.figure.layout.annotations] == ["dflash", "dspine"]


def test_curves_carry_intervals(blocks):
    for name in ("slots", "controls"):
        for trace in blocks[name].figure.data:
            assert not trace.error_y.symmetric and (np.asarray(trace.error_y.array) >= -1e-5).all()
            assert (np.asarray(trace.error_y.arrayminus) >= -1e-5).all()


def test_every_legend_entry_appears_once(blocks):
    for block in blocks.values():
        named = [t.name for t in block.figure.data if t.showlegend is not False and t.name]
        assert len(named) == len(set(named))
    conditions = {t.name for t in blocks["controls"].figure.data if t.showlegend}
    assert conditions == {
        "trained",
        "shuffled labels",
        "untrained draft",
        "attention cut",
        "attention and injection cut",
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_tensor_becomes_numbers(dtype):
    values = torch.tensor([0.5, 1.5], dtype=dtype, requires_grad=True)
    assert style.numbers(values).tolist() == [0.5, 1.5] and style.numbers(values).dtype == np.float32
    bars = style.interval_bars(values, values - 0.25, values + 0.5)
    go.Figure(go.Scatter(y=style.numbers(values), error_y=bars)).to_json()
    assert bars["array"].tolist() == [0.5, 0.5] and bars["arrayminus"].tolist() == [0.25, 0.25]


def _luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_ink_and_lines_stand_out_from_the_paper():
    def contrast(a, b):
        high, low = sorted((_luminance(a), _luminance(b)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    assert contrast(style.INK, style.PAPER) > 12
    assert all(contrast(colour, style.PAPER) > 2 for colour in style.CATEGORICAL)
    looks = [style.look(i) for i in range(7)]
    assert len({look["marker"]["symbol"] for look in looks}) == 7


# ---- panels


def _rows():
    return pd.DataFrame(
        [
            {"draft": draft, "kind": kind, "site": site, "mean": 0.1 * at, "low": 0.05 * at, "high": low}
            for draft in ("a", "b")
            for kind in ("x", "y")[draft == "b" :]
            for at, (site, low) in enumerate((("near", 0.3), ("far", float("nan"))), start=1)
        ]
    )


def test_panels_draw_every_series_once_in_the_legend_with_its_interval():
    for kind, trace in (("bars", go.Bar), ("lines", go.Scatter), ("points", go.Scatter)):
        figure = panels(_rows(), by="kind", x="site", kind=kind, scale=100, names={"x": "wrong", "y": "right"})
        assert [type(one) for one in figure.data] == [trace] * 3
        assert [(one.name, one.showlegend) for one in figure.data] == [
            ("wrong", True), ("right", True), ("right", False),
        ]  # fmt: skip
        assert figure.data[0].y.tolist() == pytest.approx([10, 20]) and figure.data[2].xaxis == "x2"
        assert figure.data[0].error_y.array[0] == pytest.approx(20) and np.isnan(figure.data[0].error_y.array[1])
        assert [a.text for a in figure.layout.annotations] == ["a", "b"]
    assert len(panels(_rows(), by="draft", x="site", column=None).data) == 2
    with pytest.raises(UsageError, match="nothing to draw"):
        panels(_rows()[:0], by="kind", x="site")


def test_floors_lie_in_the_panel_of_their_row():
    figure = panels(_rows(), by="kind", x="site")
    floors(figure, pd.DataFrame([{"draft": "b", "kind": "chance", "mean": 0.02}]), by="kind", scale=100)
    (line,) = figure.layout.shapes
    assert (line.y0, line.yref, figure.layout.annotations[-1].text) == (2, "y2", "chance")


def test_grids_share_one_scale():
    table = pd.DataFrame({1: [0.1, 0.4], 2: [0.2, 0.3]}, index=[1, 2])
    figure = grids({"a": table, "b": 2 * table}, unit="share", x="slot", y="layer", digits=2, top=0.8)
    assert [trace.coloraxis for trace in figure.data] == ["coloraxis"] * 2 and figure.layout.coloraxis.cmax == 0.8
    assert figure.data[1].z.tolist() == pytest.approx((2 * table).to_numpy()) and figure.data[0].x == ("1", "2")


# ---- files


def _block():
    return FigureBlock(go.Figure(go.Bar(y=[1, 2])), "t", "c", "a", pd.DataFrame({"x": [1.23456789]}))


def test_a_table_shows_numbers_and_marks_what_is_absent():
    rows = pd.DataFrame({"depth": pd.array([3, pd.NA], dtype="Int64"), "mean": [0.123456, float("nan")]})
    cells = re.findall(r"<td>(.*?)</td>", FigureBlock(go.Figure(), "t", "c", "a", rows).table_html())
    assert cells == ["3", "0.1235", "–", "–"]


def test_figures_share_one_library_and_open_offline(tmp_path, monkeypatch):
    monkeypatch.setattr(figure_block, "find_browser", lambda: None)
    note = write_figure(tmp_path / "one", _block())
    write_figure(tmp_path / "two", _block())
    assert note is not None and "no Chromium-like browser" in note
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.html", "plotly.min.js", "two.html"]
    assert _parse(tmp_path / "one.html").found == ["plotly.min.js"]
    assert (tmp_path / "one.html").stat().st_size < 30_000 and "1.235" in (tmp_path / "one.html").read_text()


def test_a_browser_that_fails_is_a_note_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(figure_block, "find_browser", lambda: "/bin/false")
    monkeypatch.setattr(go.Figure, "write_image", _fail)
    assert "did not start" in write_figure(tmp_path / "one", _block())
    assert not list(tmp_path.glob("*.png"))


def _fail(*_args, **_kwargs):
    raise RuntimeError("did not start\nlong trace")


def test_png_is_written_where_a_browser_draws(tmp_path, monkeypatch):
    monkeypatch.setattr(figure_block, "find_browser", lambda: "/browser")
    monkeypatch.setattr(go.Figure, "write_image", lambda self, path, **_: path.write_bytes(b"png"))
    assert write_figure(tmp_path / "one", _block()) is None
    assert (tmp_path / "one.png").read_bytes() == b"png"


def test_an_unwritable_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ProbeError, match="cannot be written"):
        write_figure(tmp_path / "file" / "one", _block())
