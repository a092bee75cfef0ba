"""The record of a result: a JSON file that says how it was made, with the versions that numbers depend on.

`write_record` writes it whole or not at all, `read_record` reads it back; `schema.Result` keeps its table beside it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dspine_probe import __version__
from dspine_probe.drafts import Draft
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.files import write_atomically

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


def write_record(folder: str | Path, name: str, record: Mapping[str, Any]) -> None:
    """Write `record` with the versions as `<name>.json` into `folder`.

    It may hold dataclasses, tensors, arrays, tuples and paths; NaN becomes null.

    Raises:
        ProbeError: the folder cannot be written to or the disk is full.
    """
    text = json.dumps(plain({"versions": versions(), **record}), indent=1, allow_nan=False, ensure_ascii=False)
    write_atomically(Path(folder) / f"{name}.json", lambda path: path.write_text(text + "\n", encoding="utf-8"))


def read_record(folder: str | Path, name: str) -> dict[str, Any]:
    """Read back what `write_record` wrote.

    Raises:
        UsageError: there is no such record in the folder.
        ProbeError: it is there but cannot be read.
    """
    path = Path(folder) / f"{name}.json"
    if not path.is_file():
        raise UsageError(f"{path} was not found; give the folder that a run with --output {folder} filled.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ProbeError(f"the result {path} cannot be read ({error}); make it again.") from error


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
    """What a result keeps of a draft's build, and of its training where its checkpoint says it."""
    config, run = draft.config, draft.training_record
    trained = {name: run[name] for name in ("blocks", "seed", "schedule") if name in run}
    return {
        "architecture": config.architecture,
        "layers": config.num_hidden_layers,
        "slots": config.num_slots,
        "causal": config.is_causal,
        "vocabulary": draft.head.shape[0],
        **({"trained": trained} if trained else {}),
    }
