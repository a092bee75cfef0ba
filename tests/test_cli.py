"""The command line: exit statuses, one sentence a fault, tracebacks only when asked for."""

import errno
import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from dspine_probe import __version__
from dspine_probe.cli.main import app
from dspine_probe.errors import ProbeError, UsageError

runner = CliRunner()


def _doctor_raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("dspine_probe.doctor.examine", fail)


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (UsageError("no draft named 'x'; choose dflash"), 2, "no draft named 'x'; choose dflash"),
        (ProbeError("the disk is full"), 1, "the disk is full"),
        (
            PermissionError(errno.EACCES, "Permission denied", "out.csv"),
            1,
            "the system refused: Permission denied: out.csv",
        ),
        (MemoryError(), 1, "memory ran out"),
        (KeyError("shape [1, 2]"), 1, "internal fault, KeyError"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_a_fault_is_one_sentence_and_a_status(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, sentence: str
) -> None:
    _doctor_raises(monkeypatch, error)
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == status
    assert result.stdout == ""
    assert result.stderr.startswith(f"dspine-probe: {sentence}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(("error", "status"), [(UsageError("wrong"), 2), (ProbeError("failed"), 1)])
def test_debug_adds_the_traceback_and_keeps_the_status(
    monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    _doctor_raises(monkeypatch, error)
    result = runner.invoke(app, ["--debug", "doctor"])
    assert result.exit_code == status
    assert "Traceback" in result.stderr and f"dspine-probe: {error}" in result.stderr


@pytest.mark.parametrize("arguments", [["nope"], ["doctor", "--nope"], ["--nope"], ["doctor", "extra"]])
def test_unknown_words_are_usage_errors(arguments: list[str]) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"dspine-probe {__version__}\n")


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, dspine_probe.cli.main; print(sorted({'torch', 'transformers', 'plotly'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


def test_doctor_prints_tables_and_json() -> None:
    tables = runner.invoke(app, ["doctor"])
    assert tables.exit_code == 0 and "Packages" in tables.stdout and "embedded target" in tables.stdout
    report = json.loads(runner.invoke(app, ["doctor", "--json"]).stdout)
    assert report["version"] == __version__
    assert report["machine"]["packages"]["torch"]
