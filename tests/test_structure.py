"""The shape of the package: imports run one way, files are short, each class has a name of its own."""

import ast
import fnmatch
import graphlib
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import dspine_probe

ROOT = Path(dspine_probe.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MOST_LINES = 300
LAYERS = (
    "errors files config sampling precision machine doctor geometry prompts embedded pretrained chat",
    "transfer target",
    "drafts",
    "decoding hooks hook_names hook_checks hook_cache",
    "training",
    "experiments",
    "plots",
    "widgets report display",
    "lab",
    "cli",
)
"""Parts of the package from the bottom up; a part imports those below it, and its own row."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def imports(node: ast.AST) -> Iterator[str]:
    """Modules of the package that code imports, inside functions too; what only type checkers see is left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names if alias.name in MODULES)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            for alias in child.names:
                inner = f"{child.module}.{alias.name}"
                if inner in MODULES or child.module in MODULES:
                    yield inner if inner in MODULES else child.module
        yield from imports(child)


TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
GRAPH = {name: set(imports(tree)) - {name} for name, tree in TREES.items()}


def test_no_module_imports_itself_by_way_of_others() -> None:
    try:
        graphlib.TopologicalSorter(GRAPH).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_imports_run_one_way() -> None:
    row = {part: index for index, parts in enumerate(LAYERS) for part in parts.split()}
    row |= {"": -1}  # the version, at the front door
    part = {name: name.removeprefix("dspine_probe").lstrip(".").partition(".")[0] for name in MODULES}
    assert set(part.values()) <= set(row), "give a new part of the package its row in LAYERS"
    upward = [f"{a} -> {b}" for a, found in GRAPH.items() for b in found if row[part[b]] > row[part[a]] >= 0]
    assert not upward


def test_imports_inside_functions_count_and_those_for_types_do_not() -> None:
    source = "if TYPE_CHECKING:\n    import dspine_probe.cli\n"
    source += "def f():\n    from dspine_probe.plots import style\n    import dspine_probe.target\n    import os\n"
    assert set(imports(ast.parse(source))) == {"dspine_probe.plots.style", "dspine_probe.target"}


def test_no_file_is_long() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert not {name: count for name, count in lines.items() if count > MOST_LINES}


def test_each_class_name_occurs_once() -> None:
    classes = (node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    names = Counter(node.name for node in classes)
    assert not {name: count for name, count in names.items() if count > 1}


def test_type_checking_makes_exceptions_only_for_modules_that_exist() -> None:
    settings = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
    named = {name for part in settings["tool"]["mypy"]["overrides"] for name in part["module"]}
    ours = [name for name in named if name.startswith("dspine_probe.")]
    assert ours and all(fnmatch.filter(MODULES, name) for name in ours)
