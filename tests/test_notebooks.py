"""Every notebook runs from top to bottom without network, and is kept clean in the repository."""

import ast
import importlib
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

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


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shrink(notebook):
    """Set the sizes that the notebook names to those of the tests."""
    (cell,) = [cell for cell in notebook.cells if "parameters" in tags(cell)]
    for size, value in SMALL.items():
        cell.source = re.sub(rf"^{size} = \d+", f"{size} = {value}", cell.source, flags=re.MULTILINE)
    assert f"PROMPTS = {SMALL['PROMPTS']}" in cell.source


class Numbered(ast.NodeTransformer):
    """Lets every `assert` of a notebook note, when it is reached, that it was."""

    def __init__(self):
        self.checks = 0

    def visit_Assert(self, node):
        noted = ast.parse(f"reached_checks.add({self.checks})", mode="eval").body
        self.checks += 1
        node.test = ast.BoolOp(ast.Or(), [noted, node.test])  # add returns None
        return ast.fix_missing_locations(node)


def number_checks(notebook):
    """Number the checks of a notebook, which afterwards prints the numbers of those it reached; how many there are."""
    numbered = Numbered()
    for cell in code_cells(notebook):
        cell.source = ast.unparse(numbered.visit(ast.parse(cell.source)))
    first, last = (nbformat.v4.new_code_cell(line) for line in ("reached_checks = set()", "print(*reached_checks)"))
    notebook.cells = [first, *notebook.cells, last]
    return numbered.checks


def run(notebook):
    """Execute a notebook, live cells too, and refuse one with a check that fails or is not reached."""
    checks = number_checks(notebook)
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": ROOT}},
        skip_cells_with_tag="",  # live cells run too
        store_widget_state=False,
    ).execute()
    reached = {int(number) for number in notebook.cells[-1].outputs[0].text.split()}
    assert checks and reached == set(range(checks)), "a check of the notebook is never reached"


@needs_drafts
@pytest.mark.embedded
@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebook_runs(path):
    notebook = nbformat.read(path, as_version=4)
    shrink(notebook)
    run(notebook)
    kinds = [{kind for output in cell.outputs for kind in output.get("data", {})} for cell in code_cells(notebook)]
    assert any(PLOTLY in kind for kind in kinds), "no figure was drawn"
    views = sum("application/vnd.jupyter.widget-view+json" in kind for kind in kinds)
    assert views == sum(LIVE in tags(cell) for cell in notebook.cells), "a live cell shows no view"


def test_a_check_that_is_not_reached_fails_the_run():
    cells = ["assert 1 + 1 == 2", "for number in []:\n    assert number > 0"]
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
    with pytest.raises(AssertionError, match="never reached"):
        run(notebook)


def test_a_check_that_does_not_hold_fails_the_run():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 + 1 == 3, 'sums'")])
    with pytest.raises(CellExecutionError, match="sums"):
        run(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_everything_a_notebook_imports_exists(path):
    for cell in code_cells(nbformat.read(path, as_version=4)):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                missing = [one.name for one in node.names if not hasattr(module, one.name)]
                assert not missing, f"{node.module} has no {', '.join(missing)}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebook_is_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata
    text = path.read_text(encoding="utf-8")
    assert str(ROOT) not in text and not re.search(r'"[^"]*(/home/|/root/|/Users/)', text)
    assert not any(re.search(r"^\s*[!%]", cell.source, flags=re.MULTILINE) for cell in code_cells(notebook))
    assert not any("execution" in cell.metadata for cell in notebook.cells), "run times are not kept"
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert all(part in prose for part in ("**Question.**", "**Prediction", "does not show"))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert outputs and all(output.output_type != "error" for output in outputs)
    drawn = [output.data for output in outputs if PLOTLY in output.get("data", {})]
    assert drawn and all(PNG in data for data in drawn), "run `make notebooks`, which adds the stills"
    stills = sum(len(data[PNG]) for data in drawn)
    assert path.stat().st_size - stills < 300_000, "figures are kept as data, without a copy of plotly.js"
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
