"""The HTML page around figures: readable on a phone, in print, in light and dark, and without network.

On a narrow page the panels of a figure are stacked; in print everything folded is unfolded.
"""

from __future__ import annotations

import html
from pathlib import Path

from dspine_probe.files import write_atomically

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1a1a1a; --soft: #555; --line: #ccc; --card: #f6f6f6; }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181c; --ink: #eee; --soft: #bbb; --line: #444; --card: #22252b; } }
@media print { :root { --page: #fff; --ink: #000; --soft: #333; --line: #bbb; --card: #fff; }
  figure, .plot, .card, tr { break-inside: avoid; } details, .plot { overflow: visible !important; }
  table { font-size: .6rem !important; } th, td { padding: .1rem .2rem !important; } .modebar { display: none; } }
body { background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
  max-width: 72rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: break-word; }
a { color: inherit; } section { margin: 3rem 0; } figure { margin: 0; }
.lead { font-size: 1.25rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 1rem; }
.card h2 { font-size: 1rem; margin: 0; } .card dl { margin: .5rem 0; } .card dd { margin: 0 0 .4rem; }
.card dt { color: var(--soft); font-size: .85rem; } .verdict { font-weight: 600; }
.plot { background: #fff; border: 1px solid var(--line); border-radius: 6px; padding: .5rem; overflow-x: auto; }
figcaption { color: var(--soft); margin: .6rem 0; } details { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .7rem; text-align: right; }
@media (max-width: 30rem) { .plot { padding: 0; } body { margin: 1rem auto; padding: 0 .6rem; } }
"""
_SCRIPT = """
const fit = plot => {
  const wide = plot.wide ??= JSON.parse(JSON.stringify(plot.layout));
  const xs = Object.keys(wide).filter(key => /^xaxis\\d*$/.test(key)).sort((a, b) => a.slice(5) - b.slice(5));
  const narrow = plot.clientWidth < 600, count = xs.length, change = {};
  xs.forEach((x, i) => {
    const y = 'yaxis' + x.slice(5), top = 1 - i / count;
    change[x + '.domain'] = narrow ? [0, 1] : wide[x].domain;
    change[y + '.domain'] = narrow && count > 1 ? [top - .72 / count, top - .06 / count] : wide[y].domain;
    change[y + '.showticklabels'] = narrow || wide[y].showticklabels !== false;
    if (count > 1 && wide.annotations?.[i]) {
      change[`annotations[${i}].x`] = narrow ? .5 : wide.annotations[i].x;
      change[`annotations[${i}].y`] = narrow ? top - .06 / count : wide.annotations[i].y;
    }
  });
  change.height = narrow ? 70 + 300 * count : wide.height;
  change.width = plot.clientWidth;
  change['legend.orientation'] = narrow ? 'h' : 'v';
  if (wide.coloraxis) change['coloraxis.showscale'] = !narrow;
  Plotly.relayout(plot, change);
};
const fitAll = () => document.querySelectorAll('.js-plotly-plot').forEach(plot => plot.offsetParent && fit(plot));
addEventListener('load', fitAll);
addEventListener('resize', fitAll);
document.addEventListener('toggle', fitAll, true);
let folded = [];
addEventListener('beforeprint', () => {
  folded = [...document.querySelectorAll('details:not([open])')];
  folded.forEach(part => part.open = true);
  fitAll();
});
addEventListener('afterprint', () => folded.forEach(part => part.open = false));
"""


def page(title: str, library: str, body: str) -> str:
    """A whole page; `library` is the script element that brings Plotly."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>{library}</head>\n"
        f"<body>{body}<script>{_SCRIPT}</script></body></html>\n"
    )


def write_text(path: Path, text: str) -> None:
    """Write a page, whole or not at all.

    Raises:
        ProbeError: the folder cannot be written to or the disk is full.
    """
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
