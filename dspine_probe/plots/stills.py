"""Still pictures in executed notebooks, for pages that draw no plotly figures (a code host's, nbconvert's).

    python -m dspine_probe.plots.stills notebooks/*.ipynb

JupyterLab goes on showing the live figure. Entry point: `add_stills`.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import plotly.graph_objects as go

from dspine_probe.errors import UsageError
from dspine_probe.files import write_atomically
from dspine_probe.machine import find_browser

PLOTLY, PNG = "application/vnd.plotly.v1+json", "image/png"


def add_stills(path: str | Path) -> int:
    """Put a PNG beside every plotly figure of a notebook that has none yet; how many were drawn.

    The times at which cells ran are dropped, so that a notebook changes only where its outputs do.

    Raises:
        UsageError: no browser is at hand to draw them.
    """
    if find_browser() is None:
        raise UsageError("stills need a Chromium-like browser and none was found; install one or set BROWSER_PATH.")
    path = Path(path)
    notebook = nbformat.read(path, as_version=4)
    missing = [data for data in _figures(notebook) if PNG not in data]
    for data in missing:
        drawn = go.Figure(data[PLOTLY]).to_image("png", width=900, scale=1)
        data[PNG] = base64.b64encode(drawn).decode()
    timed = [cell.metadata.pop("execution") for cell in notebook.cells if "execution" in cell.metadata]
    if missing or timed:
        write_atomically(path, lambda to: nbformat.write(notebook, to))
    return len(missing)


def _figures(notebook: nbformat.NotebookNode) -> Iterator[dict[str, Any]]:
    """The data of all outputs that hold a plotly figure."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if PLOTLY in output.get("data", {}):
                yield output["data"]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}: {add_stills(name)} stills")
