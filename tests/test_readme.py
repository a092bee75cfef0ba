"""The README's example runs as it stands, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.embedded
def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert "tokens per round" in capsys.readouterr().out


def test_the_named_commands_are_make_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in re.findall(r"^    make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert f"\n{command}:" in makefile


def test_the_rooms_exist() -> None:
    for path in re.findall(r"^\| `([\w/.]+)`", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert (ROOT / path).exists(), path
