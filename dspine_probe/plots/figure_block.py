"""A figure with everything a reader needs who cannot see it, and pages that open without network.

`FigureBlock` keeps a plotly figure together with its title, caption, text alternative and the table behind it.
`write_report` puts blocks on one self-contained page; `write_figure` writes one block, beside a copy of plotly.js that
figures in one folder share, and a PNG where a browser can draw it.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
from IPython.display import HTML, display
from plotly.offline import get_plotlyjs

from dspine_probe.files import write_atomically
from dspine_probe.machine import find_browser

PLOTLY_FILE = "plotly.min.js"
_CONFIG = {"responsive": True, "displaylogo": False}
_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1a1a1a; --soft: #555; --line: #ccc; }
@media (prefers-color-scheme: dark) { :root { --page: #16181c; --ink: #eee; --soft: #bbb; --line: #444; } }
body { background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
  max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
section { margin: 3rem 0; } figure { margin: 0; }
.plot { background: #fff; border: 1px solid var(--line); border-radius: 6px; padding: .5rem; overflow-x: auto; }
figcaption { color: var(--soft); margin: .6rem 0; } details { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .7rem; text-align: right; }
"""


@dataclass(frozen=True)
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

    def to_html(self, number: int = 1) -> str:
        """The block as an HTML section that expects `Plotly` to be loaded; `number` makes its ids unique."""
        plot = self.figure.to_html(
            full_html=False,
            include_plotlyjs=False,
            include_mathjax=False,
            config=_CONFIG,
            div_id=f"plot-{number}",
        )
        table = self.table.to_html(index=False, border=0, float_format=lambda x: f"{x:.4g}", na_rep="–")
        return (
            f'<section aria-labelledby="title-{number}"><h2 id="title-{number}">{html.escape(self.title)}</h2>\n'
            f'<figure><div class="plot" role="img" aria-label="{html.escape(self.alt)}">{plot}</div>\n'
            f"<figcaption>{html.escape(self.caption)}</figcaption></figure>\n"
            f"<details><summary>Table: {html.escape(self.title)}</summary>\n{table}\n</details></section>\n"
        )


def write_report(
    path: str | Path, blocks: Sequence[FigureBlock], *, heading: str, intro: str, points: Sequence[str] = ()
) -> None:
    """One page with all blocks, plotly.js included once; nothing is loaded from anywhere. `points` become a list.

    Raises:
        ProbeError: the folder cannot be written to or the disk is full.
    """
    body = [f"<h1>{html.escape(heading)}</h1>\n<p>{html.escape(intro)}</p>\n"]
    if points:
        body.append("<ul>" + "".join(f"<li>{html.escape(point)}</li>\n" for point in points) + "</ul>\n")
    body += [block.to_html(number) for number, block in enumerate(blocks, start=1)]
    page = _page(heading, f"<script>{get_plotlyjs()}</script>", "".join(body))
    _write_text(Path(path), page)


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
        _write_text(library, get_plotlyjs())
    page = _page(block.title, f'<script src="{PLOTLY_FILE}"></script>', block.to_html())
    _write_text(stem.with_suffix(".html"), page)
    return _write_png(stem.with_suffix(".png"), block)


def _write_png(path: Path, block: FigureBlock) -> str | None:
    if find_browser() is None:
        return (
            "PNG figures were left out: no Chromium-like browser was found; install one or set BROWSER_PATH."
        )
    try:
        write_atomically(path, lambda temporary: block.figure.write_image(temporary, width=1000, scale=2))
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return f"PNG figures were left out: the browser could not draw them ({reason})."
    return None


def _page(title: str, script: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>{script}</head>\n<body>{body}</body></html>\n"
    )


def _write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
