"""What kept work depends on: noted beside it when it begins, and compared before any of it is used again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dspine_probe.drafts.checkpoint import fingerprint
from dspine_probe.errors import UsageError
from dspine_probe.files import write_atomically
from dspine_probe.target import Target
from dspine_probe.training.features import FeatureStore
from dspine_probe.training.optimization import TrainConfig
from dspine_probe.training.run import DraftPlan

_HASH_LENGTH = 16


def note_or_refuse(path: Path, wanted: Mapping[str, Any], *, begun: bool) -> None:
    """Write to `path` what the work in its folder depends on, or compare it with what stands there.

    Args:
        path: the note.
        wanted: what the work depends on, in types that JSON knows.
        begun: whether there is work already, so that there should be a note.

    Raises:
        UsageError: the work depends on something else, which is named, or has no note.
    """
    now = json.loads(json.dumps(wanted))
    if path.is_file():
        refuse_other(path.parent, json.loads(path.read_text(encoding="utf-8")), now)
        return
    if begun:
        raise UsageError(
            f"{path.parent} holds work without a {path.name} to say what it was trained with; choose another folder, "
            "or delete this one."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda to: to.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8"))


def training_depends(draft: DraftPlan, training: TrainConfig, target: Target, store: FeatureStore) -> dict[str, Any]:
    """Everything that the numbers of a training run depend on; how often it saves and logs changes none of them."""
    settings = {name: value for name, value in asdict(training).items() if name not in ("save_every", "log_every")}
    made_on = {"features": store.fingerprint, "target": fingerprint(target.embedding)}
    return draft.settings() | settings | made_on


def refuse_other(place: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse work in `place` that depends on something else than what is wanted.

    Raises:
        UsageError: naming what differs, with both values where they say something to a reader.
    """
    changed = differing(found, wanted)
    if changed:
        raise UsageError(
            f"{place} was trained with other settings: {changed}; choose another folder, or delete this one."
        )


def differing(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Names of what is not as wanted, with both values where they say something to a reader; "" if nothing differs."""
    return ", ".join(
        name if _is_hash(value) else f"{name} ({found.get(name)}, not {value})"
        for name, value in wanted.items()
        if found.get(name) != value
    )


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and len(value) >= _HASH_LENGTH and set(value) <= set("0123456789abcdef")
