"""An append-only file of finished work, one JSON object a line, that survives a kill.

Lines reach the disk every few seconds. A kill can cut the last line short: reading ignores it, and the next writer
removes it before it appends. One writer per file.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from dspine_probe.errors import ProbeError

SYNC_SECONDS = 5.0


def read_work(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a work file; none if it does not exist.

    Raises:
        ProbeError: a line other than the cut last one is not a JSON object.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield dict(json.loads(line))
            except (ValueError, TypeError) as error:
                raise ProbeError(
                    f"line {number} of {path} is damaged; delete that line to go on from the rest"
                ) from error


class WorkLog:
    """Appends objects to a work file and syncs every few seconds and on leaving the `with` block."""

    def __init__(self, path: Path) -> None:
        self._path, self._synced = path, time.monotonic()
        self._file: FileIO | None = None

    def __enter__(self) -> WorkLog:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            data = self._path.read_bytes()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                os.truncate(self._path, whole)
        self._file = self._path.open("ab", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with self._file:
                os.fsync(self._file.fileno())

    def append(self, row: dict[str, Any]) -> None:
        """Add one object.

        Raises:
            ProbeError: the disk is full; what was written before is kept and the run can be resumed.
        """
        assert self._file is not None, "WorkLog is used inside a with block"
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        try:
            whole = self._file.write(line) == len(line)  # a disk that fills up takes a part of the line
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            whole = False
        if not whole:
            raise ProbeError(
                f"the disk with {self._path} is full; free some space and run the same command again to resume"
            )
        if time.monotonic() - self._synced >= SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()
