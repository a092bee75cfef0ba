"""Every notebook runs from top to bottom without network, and is kept clean in the repository."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from dspine_probe.drafts.checkpoint import shipped_checkpoints
from dspine_probe.plots.stills import PLOTLY, PNG

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SMALL = {"PROMPTS": 14, "NEW_TOKENS": 24, "ANCHORS": 2}
"""Sizes for the tests, in place of those in the cell tagged "parameters": two prompts of each kind."""
LIVE = "skip-execution"
"""Tag of cells with widgets, whose state a saved notebook does not keep."""
needs_drafts = pytest.mark.skipif(
    not {"dflash", "dspine"} <= set(shipped_checkpoints()), reason="no trained drafts in data/checkpoints"
)


def name(path):
    return path.stem


def tags(cell):
    return cell.metadata.get("tags", [])


def shrink(notebook):
    """Set the sizes that the notebook names to those of the tests."""
    (cell,) = [cell for cell in notebook.cells if "parameters" in tags(cell)]
    for size, value in SMALL.items():
        cell.source = re.sub(rf"^{size} = \d+", f"{size} = {value}", cell.source, flags=re.MULTILINE)
    assert f"PROMPTS = {SMALL['PROMPTS']}" in cell.source


@needs_drafts
@pytest.mark.embedded
@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebook_runs(path):
    notebook = nbformat.read(path, as_version=4)
    shrink(notebook)
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": ROOT}},
        skip_cells_with_tag="",  # live cells run too
        store_widget_state=False,
    )
    client.execute()
    kinds = [
        {kind for output in cell.outputs for kind in output.get("data", {})}
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    assert any(PLOTLY in kind for kind in kinds), "no figure was drawn"
    views = sum("application/vnd.jupyter.widget-view+json" in kind for kind in kinds)
    assert views == sum(LIVE in tags(cell) for cell in notebook.cells), "a live cell shows no view"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebook_is_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata
    text = path.read_text(encoding="utf-8")
    assert str(ROOT) not in text and not re.search(r'"[^"]*(/home/|/root/|/Users/)', text)
    source = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(re.search(r"^\s*[!%]", cell, flags=re.MULTILINE) for cell in source)
    assert sum("assert" in cell for cell in source) >= 3
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert all(part in prose for part in ("**Question.**", "**Prediction", "does not show"))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert outputs and all(output.output_type != "error" for output in outputs)
    drawn = [output.data for output in outputs if PLOTLY in output.get("data", {})]
    assert drawn and all(PNG in data for data in drawn), "run `make notebooks`, which adds the stills"
    stills = sum(len(data[PNG]) for data in drawn)
    assert path.stat().st_size - stills < 300_000, "figures are kept as data, without a copy of plotly.js"
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
