"""Figures in notebooks: what `show` displays, and still pictures beside live ones."""

import base64

import nbformat
import pandas as pd
import plotly.graph_objects as go
import pytest

from dspine_probe.errors import UsageError
from dspine_probe.machine import find_browser
from dspine_probe.plots import figure_block, stills
from dspine_probe.plots.figure_block import FigureBlock

BAR = go.Figure(go.Bar(x=["a"], y=[1]))


@pytest.fixture
def notebook(tmp_path):
    """A notebook on disk with a figure, a figure that has its still, and a sentence."""
    bundles = [
        {stills.PLOTLY: BAR.to_plotly_json()},
        {stills.PLOTLY: BAR.to_plotly_json(), stills.PNG: "kept"},
        {"text/plain": "words"},
    ]
    outputs = [nbformat.v4.new_output("display_data", data=data) for data in bundles]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("draw()", outputs=outputs)])
    path = tmp_path / "book.ipynb"
    nbformat.write(book, path)
    return path


@pytest.mark.skipif(find_browser() is None, reason="no browser to draw with")
def test_figures_without_a_still_get_one(notebook):
    assert stills.add_stills(notebook) == 1
    drawn, kept, words = (o["data"] for o in nbformat.read(notebook, as_version=4).cells[0].outputs)
    assert base64.b64decode(drawn[stills.PNG]).startswith(b"\x89PNG") and stills.PLOTLY in drawn
    assert kept[stills.PNG] == "kept"
    assert set(words) == {"text/plain"}
    assert stills.add_stills(notebook) == 0, "nothing is drawn twice"


def test_without_a_browser_the_notebook_stays_as_it_was(notebook, monkeypatch):
    before = notebook.read_bytes()
    monkeypatch.setattr(stills, "find_browser", lambda: None)
    with pytest.raises(UsageError, match="install one or set BROWSER_PATH"):
        stills.add_stills(notebook)
    assert notebook.read_bytes() == before


def test_show_displays_words_that_no_markup_garbles_and_the_live_figure(monkeypatch):
    shown = []
    monkeypatch.setattr(figure_block, "display", lambda *what: shown.extend(what))
    FigureBlock(BAR, "Title", "Under <it>.", "slot 3 '```' 0.35", pd.DataFrame()).show()
    words, figure = shown
    assert figure is BAR
    assert words.data == "<p><b>Title.</b> Under &lt;it&gt;.</p>\n<p>In words: slot 3 &#x27;```&#x27; 0.35</p>"
