"""Results on disk: a tidy CSV table beside a JSON record of how it was made.

`save_result` writes `<name>.csv` and `<name>.json` (configuration, versions, whatever else reproduces the table), each
whole or not at all; `load_result` reads the pair back. What the columns mean is the experiment's business.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pandas as pd
from torch import Tensor

from dspine_probe import __version__
from dspine_probe.drafts import Draft
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.files import write_atomically


@dataclasses.dataclass(frozen=True, eq=False)
class TableResult:
    """A tidy table with everything that reproduces it; experiments add their fields and what the table says.

    FILE is the name of the two files of a saved result.
    """

    FILE: ClassVar[str]
    table: pd.DataFrame

    def to_frame(self) -> pd.DataFrame:
        """The tidy table, a copy."""
        return self.table.copy()

    def select(self, **wanted: str | int) -> pd.DataFrame:
        """Rows in which every named column has the given value."""
        keep = pd.Series(True, index=self.table.index)
        for column, value in wanted.items():
            keep &= (self.table[column] == value).fillna(False)
        return self.table[keep]

    def save(self, folder: str | Path, name: str | None = None) -> None:
        """Write `<name>.csv` and `<name>.json` into `folder`."""
        save_result(
            folder, name or self.FILE, self.to_frame(), {part: getattr(self, part) for part in self._parts()}
        )

    @classmethod
    def load(cls, folder: str | Path, name: str | None = None) -> Self:
        """Read back what `save` wrote."""
        table, record = load_result(folder, name or cls.FILE)
        return cls(cls._typed(table), **{part: record[part] for part in cls._parts()})

    @classmethod
    def _parts(cls) -> list[str]:
        """Fields that stand in the record."""
        return [part.name for part in dataclasses.fields(cls) if part.name != "table"]

    @classmethod
    def _typed(cls, table: pd.DataFrame) -> pd.DataFrame:
        """A table read from CSV, with the types of its columns put right."""
        return table


_PACKAGES = ("torch", "transformers", "numpy", "pandas")


def versions() -> dict[str, str]:
    """Versions of this package, Python and the libraries that numbers depend on."""
    found = {"dspine_probe": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def save_result(folder: str | Path, name: str, frame: pd.DataFrame, record: Mapping[str, Any]) -> None:
    """Write `frame` as `<name>.csv` and `record` with the versions as `<name>.json` into `folder`.

    The record may hold dataclasses, tensors, arrays, tuples and paths; NaN becomes null.

    Raises:
        ProbeError: the folder cannot be written to or the disk is full.
    """
    folder = Path(folder)
    text = (
        json.dumps(plain({"versions": versions(), **record}), indent=1, allow_nan=False, ensure_ascii=False)
        + "\n"
    )
    write_atomically(folder / f"{name}.csv", lambda path: frame.to_csv(path, index=False))
    write_atomically(folder / f"{name}.json", lambda path: path.write_text(text, encoding="utf-8"))


def load_result(folder: str | Path, name: str) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Read back what `save_result` wrote.

    Raises:
        UsageError: there is no such result in the folder.
        ProbeError: a file is there but cannot be read.
    """
    table, record = Path(folder) / f"{name}.csv", Path(folder) / f"{name}.json"
    for path in (table, record):
        if not path.is_file():
            raise UsageError(
                f"{path} was not found; give the folder that a run with --output {folder} filled."
            )
    try:
        return pd.read_csv(table), json.loads(record.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ProbeError(
            f"the result {name!r} in {folder} cannot be read ({error}); make it again."
        ) from error


def plain(value: Any) -> Any:
    """The same value in types that JSON knows."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def draft_record(draft: Draft) -> dict[str, Any]:
    """What a result keeps of a draft's build."""
    config = draft.config
    return {
        "architecture": config.architecture,
        "layers": config.num_hidden_layers,
        "slots": config.num_slots,
        "causal": config.is_causal,
        "vocabulary": draft.head.shape[0],
    }
