"""Figures: offline pages, words beside every picture, tensors of any kind, colours that can be told apart."""

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
from dspine_probe.errors import ProbeError
from dspine_probe.experiments.acceptance import AcceptanceResult, RequestCounts
from dspine_probe.experiments.emergence import emergence
from dspine_probe.experiments.speed import Decoded, SpeedResult
from dspine_probe.plots import acceptance, figure_block, speed, style
from dspine_probe.plots import emergence as emergence_plots
from dspine_probe.plots.figure_block import FigureBlock, write_figure, write_report


def _emergence():
    target = tiny_target()
    drafts = {
        "dflash": tiny_draft(target, DFLASH, trimmed=40),
        "dspine": tiny_draft(target, DSPINE, trimmed=40),
    }
    return emergence(drafts, make_rows(9), config=SMALL)


def _acceptance():
    generator = torch.Generator().manual_seed(0)
    requests = []
    for number in range(12):
        for draft in ("dflash", "dspine"):
            kept = torch.randint(0, 5, (8,), generator=generator)
            reached, passed = (tuple(int((kept >= k - less).sum()) for k in range(1, 5)) for less in (1, 0))
            committed = int(kept.sum()) + 8
            requests.append(
                RequestCounts(draft, "ab"[number % 2], str(number), 8, committed, False, reached, passed)
            )
    return AcceptanceResult(tuple(requests), {"target": "tiny"}, resamples=20)


def _speed():
    answers = [
        Decoded(mode, "a", str(i), 20, 20 // step, 2.0 / step, 0.2 * (step > 1), 1.0 / step, True)
        for i in range(4)
        for mode, step in (("plain", 1), ("dflash", 2))
    ]
    return SpeedResult(tuple(answers), {"threads": 2}, resamples=20)


@pytest.fixture(scope="module")
def blocks():
    read, kept = _emergence(), _acceptance()
    return {
        "heatmaps": emergence_plots.heatmaps(read),
        "codes": emergence_plots.heatmaps(read, reader="nearest code", metric="mrr"),
        "slots": emergence_plots.slot_curves(read),
        "controls": emergence_plots.controls(read),
        "bars": acceptance.bars(kept),
        "survival": acceptance.survival(kept),
        "speed": speed.bars(_speed()),
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


def test_report_is_one_file_that_loads_nothing(blocks, tmp_path):
    write_report(tmp_path / "report.html", list(blocks.values()), heading="A <report>", intro="5 < 6 & so on")
    page = _parse(tmp_path / "report.html")
    assert page.found == [] and [p.name for p in tmp_path.iterdir()] == ["report.html"]
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    library = figure_block.get_plotlyjs()
    assert text.count(library) == 1
    rest = text.replace(library, "")
    assert (
        not re.search(r"(https?:)?//[a-z0-9.-]+\.[a-z]{2,}", rest)
        and "@import" not in rest
        and "url(" not in rest
    )
    assert rest.count("Plotly.newPlot(") == len(blocks)
    assert "A &lt;report&gt;" in rest and "5 &lt; 6 &amp; so on" in rest


def test_report_says_in_words_what_it_shows(blocks, tmp_path):
    write_report(tmp_path / "report.html", list(blocks.values()), heading="h", intro="i")
    tags = _parse(tmp_path / "report.html").tags
    pictures = [a for _, a in tags if a.get("role") == "img"]
    assert [a["aria-label"] for a in pictures] == [block.alt for block in blocks.values()]
    assert sum(tag == "details" for tag, _ in tags) == sum(tag == "table" for tag, _ in tags) == len(blocks)
    ids = [a["id"] for _, a in tags if "id" in a]
    assert len(ids) == len(set(ids)) and ("html", {"lang": "en"}) in tags
    assert "prefers-color-scheme: dark" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_every_block_has_words_and_numbers_that_agree(blocks):
    for name, block in blocks.items():
        assert (
            block.title and "n = " in block.caption and len(block.table) and "nan" not in block.alt.lower()
        ), name
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
    for name in ("slots", "controls", "bars", "survival"):
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


# ---- files


def _block():
    return FigureBlock(go.Figure(go.Bar(y=[1, 2])), "t", "c", "a", pd.DataFrame({"x": [1.23456789]}))


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
        write_report(tmp_path / "file" / "report.html", [_block()], heading="h", intro="i")
