"""What every result says of its making: command, commit, day and machine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dspine_probe.files import write_atomically
from dspine_probe.machine import look

RESULTS = Path(__file__).parent / "results"


def commit() -> str:
    """The commit that is measured, with a mark if files differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def made() -> dict[str, Any]:
    """How this process was called, on what."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": asdict(look()),
    }


def save(result: Mapping[str, Any], path: Path) -> None:
    """Write a result as JSON, beside its place first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text))
