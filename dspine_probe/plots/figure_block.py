"""A figure with everything a reader needs who cannot see it, and pages that open without network.

`FigureBlock` keeps a plotly figure together with its title, caption, text alternative and the table behind it.
`write_figure` writes one as a page, beside a copy of plotly.js that figures in one folder share, and a PNG where a
browser can draw it. The page around it is `page.py`'s.
"""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from IPython.display import HTML, display
from plotly.offline import get_plotlyjs

from dspine_probe.experiments.common.markup import folded
from dspine_probe.files import write_atomically
from dspine_probe.machine import find_browser
from dspine_probe.plots.page import page, write_text

PLOTLY_FILE, PLOTLY_TYPE = "plotly.min.js", "application/vnd.plotly.v1+json"
_CONFIG = {"responsive": True, "displaylogo": False}


@dataclass(frozen=True, repr=False)
class FigureBlock:
    """A figure in words, numbers and picture. `alt` says what the picture shows, computed from `table`."""

    figure: go.Figure
    title: str
    caption: str
    alt: str
    table: pd.DataFrame

    def show(self) -> None:
        """Show the block in a notebook: title, caption and text alternative above the live figure."""
        words = (f"<b>{html.escape(self.title)}.</b> {html.escape(self.caption)}", html.escape(self.alt))
        display(HTML("<p>{}</p>\n<p>In words: {}</p>".format(*words)), self.figure)

    def __repr__(self) -> str:
        return f"{self.title}. {self.alt}"

    def bundles(self) -> list[dict[str, Any]]:
        """What a notebook shows of the block, as MIME bundles: the words, the live figure, the folded table.

        Each carries plain text, which is what a terminal prints.
        """
        words = f"<p><b>{html.escape(self.title)}.</b> {html.escape(self.caption)}</p>"
        words += f"<p>In words: {html.escape(self.alt)}</p>"
        return [
            {"text/html": words, "text/plain": repr(self)},
            {PLOTLY_TYPE: json.loads(self.figure.to_json()), "text/plain": f"(figure: {self.title})"},
            {"text/html": self.table_html(), "text/plain": f"(table: {len(self.table)} rows)"},
        ]

    def _ipython_display_(self) -> None:
        for bundle in self.bundles():
            display(bundle, raw=True)

    @property
    def sentence(self) -> str:
        """The caption's first sentence."""
        return self.caption.split(". ")[0].rstrip(".") + "."

    def plot_html(self, number: int = 1) -> str:
        """The picture, for a page that loads `Plotly`; `number` makes its id unique."""
        plot = self.figure.to_html(
            full_html=False, include_plotlyjs=False, include_mathjax=False, config=_CONFIG, div_id=f"plot-{number}"
        )
        return f'<div class="plot" role="img" aria-label="{html.escape(self.alt)}">{plot}</div>\n'

    def table_html(self) -> str:
        """The numbers behind the picture, folded."""
        return folded(self.table, f"Table: {self.title}")

    def to_html(self, number: int = 1) -> str:
        """Title, picture, caption and folded table."""
        title, caption = html.escape(self.title), html.escape(self.caption)
        figure = f"<figure>{self.plot_html(number)}<figcaption>{caption}</figcaption></figure>\n"
        heading = f'<h2 id="title-{number}">{title}</h2>\n'
        return f'<section aria-labelledby="title-{number}">{heading}{figure}{self.table_html()}</section>\n'


def write_figure(stem: str | Path, block: FigureBlock) -> str | None:
    """Write `<stem>.html`, which opens without network, and `<stem>.png` where a browser is at hand.

    Returns:
        None, or a sentence about what was left out and why.

    Raises:
        ProbeError: the folder cannot be written to or the disk is full.
    """
    stem = Path(stem)
    library = stem.parent / PLOTLY_FILE
    if not library.is_file() or library.read_text(encoding="utf-8") != get_plotlyjs():
        write_text(library, get_plotlyjs())
    text = page(block.title, f'<script src="{PLOTLY_FILE}"></script>', block.to_html())
    write_text(stem.with_suffix(".html"), text)
    return _write_png(stem.with_suffix(".png"), block)


def _write_png(path: Path, block: FigureBlock) -> str | None:
    if find_browser() is None:
        return "PNG figures were left out: no Chromium-like browser was found; install one or set BROWSER_PATH."
    try:
        write_atomically(path, lambda temporary: block.figure.write_image(temporary, width=1000, scale=2))
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return f"PNG figures were left out: the browser could not draw them ({reason})."
    return None
