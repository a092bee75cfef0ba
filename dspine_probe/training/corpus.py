"""A corpus of answered prompts, packed: token ids of prompts and of the target's own responses.

On disk a corpus is a folder of `meta.json`, `ids.json` and `tokens.safetensors`. Prompts may be left out when their
texts cannot be shared; loading then needs them again, and a checksum per prompt catches a wrong file. Responses are
made in `regenerate.py` and `synthesis.py`.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.files import write_atomically

FORMAT = 1
TOKENS, IDS, META = "tokens.safetensors", "ids.json", "meta.json"


@dataclass(frozen=True)
class Example:
    """One prompt with the response to learn from; `response_ids` ends with the stop id if the target stopped."""

    id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]


@dataclass(frozen=True)
class Corpus:
    """Examples and a note of how they came about (`meta`: target, generation settings, counts of what was dropped)."""

    examples: list[Example]
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def response_tokens(self) -> int:
        """Response tokens of all examples, stop ids included."""
        return sum(len(example.response_ids) for example in self.examples)

    def save(self, folder: Path, include_prompts: bool) -> None:
        """Write the packed folder; `meta.json`, which vouches for the other two files, goes last.

        Args:
            folder: made if absent; a corpus in it is replaced.
            include_prompts: false stores ids and checksums of the prompts only.
        """
        folder = Path(folder)
        arrays = _pack("response", [example.response_ids for example in self.examples])
        prompts = [example.prompt_ids for example in self.examples]
        if include_prompts:
            arrays |= _pack("prompt", prompts)
        else:
            arrays["prompt_check"] = np.array([_checksum(ids) for ids in prompts], dtype=np.uint32)
        ids = json.dumps([example.id for example in self.examples])
        write_atomically(folder / TOKENS, lambda path: save_file(arrays, path))
        write_atomically(folder / IDS, lambda path: path.write_text(ids))
        meta = {
            **self.meta,
            "format": FORMAT,
            "examples": len(self.examples),
            "response_tokens": self.response_tokens,
            "prompts_included": include_prompts,
            "sha256": {name: _sha256(folder / name) for name in (TOKENS, IDS)},
        }
        write_atomically(folder / META, lambda path: path.write_text(json.dumps(meta, indent=2) + "\n"))

    @classmethod
    def load(cls, folder: Path, prompts: Mapping[str, Sequence[int]] | None = None) -> Corpus:
        """Read a packed folder.

        Args:
            folder: as written by `save`.
            prompts: encoded prompts by id, needed when the corpus was saved without them.

        Raises:
            UsageError: no corpus there, or prompts are needed and missing, unknown or different.
            ProbeError: a file is damaged or half replaced.
        """
        folder = Path(folder)
        meta = _read_meta(folder)
        try:
            arrays = load_file(folder / TOKENS)
            ids = json.loads((folder / IDS).read_text())
        except (OSError, ValueError, SafetensorError) as error:
            raise ProbeError(f"the corpus in {folder} is damaged ({error}); pack it again") from error
        responses = _unpack("response", arrays)
        if "prompt" in arrays:
            found = _unpack("prompt", arrays)
        else:
            found = _match(folder, ids, arrays["prompt_check"], prompts)
        triples = zip(ids, found, responses, strict=True)
        return cls([Example(*triple) for triple in triples], meta)


def _read_meta(folder: Path) -> dict[str, Any]:
    if not (folder / META).is_file():
        raise UsageError(f"{folder} holds no corpus (no {META}); give a folder that generate-data or synthesize wrote")
    try:
        meta = json.loads((folder / META).read_text())
        known, sums = meta["format"] == FORMAT, dict(meta["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise ProbeError(f"{folder / META} is damaged; pack the corpus again") from error
    if not known:
        raise UsageError(f"the corpus in {folder} has format {meta['format']}; this version reads format {FORMAT}")
    for name, expected in sums.items():
        if not (folder / name).is_file() or _sha256(folder / name) != expected:
            raise ProbeError(f"{folder / name} is not the file that {META} describes; pack the corpus again")
    return dict(meta)


def _match(
    folder: Path, ids: Sequence[str], checks: np.ndarray, prompts: Mapping[str, Sequence[int]] | None
) -> list[tuple[int, ...]]:
    if prompts is None:
        raise UsageError(
            f"the corpus in {folder} was saved without prompts; give the prompts file it was made from as well"
        )
    found = []
    for name, check in zip(ids, checks.tolist(), strict=True):
        if name not in prompts:
            raise UsageError(f"the corpus in {folder} answers prompt {name!r}, which the prompts given do not have")
        prompt = tuple(prompts[name])
        if _checksum(prompt) != check:
            raise UsageError(
                f"prompt {name!r} differs from the one answered in {folder}; use the same prompts file, target and "
                "boxed share as when it was made"
            )
        found.append(prompt)
    return found


def _pack(name: str, rows: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Rows end to end plus the offsets where each begins, uint16 if every id fits."""
    flat = np.array([token for row in rows for token in row], dtype=np.int32)
    if flat.size == 0 or flat.max() < 1 << 16:
        flat = flat.astype(np.uint16)
    offsets = np.cumsum([0, *[len(row) for row in rows]], dtype=np.int64)
    return {name: flat, f"{name}_offsets": offsets}


def _unpack(name: str, arrays: Mapping[str, np.ndarray]) -> list[tuple[int, ...]]:
    flat, offsets = arrays[name].tolist(), arrays[f"{name}_offsets"].tolist()
    return [tuple(flat[start:stop]) for start, stop in zip(offsets, offsets[1:], strict=False)]


def _checksum(ids: Sequence[int]) -> int:
    return zlib.crc32(np.array(ids, dtype=np.int32).tobytes())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
