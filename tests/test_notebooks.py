"""Every notebook runs from top to bottom without network, and is kept clean in the repository."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from dspine_probe.drafts.checkpoint import shipped_checkpoints

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
needs_drafts = pytest.mark.skipif(
    not {"dflash", "dspine"} <= set(shipped_checkpoints()), reason="no trained drafts in data/checkpoints"
)


def name(path):
    return path.stem


@needs_drafts
@pytest.mark.embedded
@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebook_runs(path):
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": ROOT}}
    )
    client.execute()
    figures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "application/vnd.plotly.v1+json" in output.get("data", {})
    ]
    assert figures, "no figure was drawn"


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
    assert any("does not show" in cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
