"""Cached target states: what a draft trains on and what the offline experiments read.

For every token of a sequence the store keeps the tapped residual streams and the final-normed state (bf16, about
7 KB a token at SmolLM2 geometry), in flat memory-mapped files. Building is resumable: a killed run continues at the
first unfinished batch. Entry points: `build_features`, `FeatureStore.open`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.files import write_atomically
from dspine_probe.precision import name_of
from dspine_probe.target import Target
from dspine_probe.training.corpus import Example

BATCH_TOKENS = 2048  # padded tokens of one pass; larger ones leave the cache of a CPU
META, _PROGRESS = "meta.json", "progress.json"


@dataclass(frozen=True)
class Sequence:
    """One prompt with its response, and the target's states at every position."""

    id: str
    tokens: Int[Tensor, "n"]
    prompt_length: int
    taps: Float[Tensor, "n taps_d_model"]
    final: Float[Tensor, "n d_model"]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class FeatureMeta:
    """Description of a store: whose states, which taps, how many sequences, how they are cut into passes.

    `precision` is what the target computed in ("fp32" or "bf16"); stores made before it was noted have None.
    """

    target: str
    taps: tuple[int, ...]
    hidden_size: int
    ids: tuple[str, ...]
    lengths: tuple[int, ...]
    prompt_lengths: tuple[int, ...]
    batch_tokens: int = BATCH_TOKENS
    precision: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens over all sequences, prompts included."""
        return sum(self.lengths)


class FeatureStore:
    """Read access to finished stores as one; `store[i]` is a `Sequence` of tensors on the memory map."""

    def __init__(self, parts: Seq[tuple[FeatureMeta, tuple[Tensor, Tensor, Tensor]]]) -> None:
        """`parts`: description and (tokens, taps, final) of each store."""
        metas = [meta for meta, _ in parts]
        self.meta = _join(metas)
        self._arrays = [arrays for _, arrays in parts]
        self._places = [(part, row) for part, meta in enumerate(metas) for row in _rows(meta)]

    @classmethod
    def open(cls, *folders: Path) -> FeatureStore:
        """Map one or several stores of the same target and taps; an unfinished one is refused."""
        parts = []
        for folder in folders:
            meta = _read_meta(folder)
            if _batches_done(folder) is not None:
                raise ProbeError(
                    f"The features in {folder} are unfinished; run the same `features` command again to finish them."
                )
            parts.append((meta, _open_arrays(folder, meta, "r")))
        return cls(parts)

    def __len__(self) -> int:
        return len(self.meta.lengths)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what the store holds: whose states, and every token and some states of every sequence."""
        digest = hashlib.sha256(json.dumps(asdict(self.meta)).encode())
        for tokens, taps, _ in self._arrays:
            digest.update(tokens.numpy().tobytes())
            digest.update(taps[:: max(1, len(taps) // 64)].float().numpy().tobytes())
        return digest.hexdigest()[:16]

    def __getitem__(self, index: int) -> Sequence:
        part, rows = self._places[index]
        tokens, taps, final = (array[rows] for array in self._arrays[part])
        return Sequence(self.meta.ids[index], tokens.long(), self.meta.prompt_lengths[index], taps, final)


def _rows(meta: FeatureMeta) -> list[slice]:
    ends = np.cumsum(meta.lengths).tolist()
    return [slice(end - length, end) for end, length in zip(ends, meta.lengths, strict=True)]


def _join(metas: Seq[FeatureMeta]) -> FeatureMeta:
    """One description of several stores, which must agree on target and taps."""
    if not metas:
        raise UsageError("No features were named; give at least one folder.")
    first = metas[0]
    for other in metas[1:]:
        if (other.target, other.taps, other.hidden_size) != (first.target, first.taps, first.hidden_size):
            raise UsageError(
                f"Features of target {first.target!r} with taps {list(first.taps)} cannot be joined with those of "
                f"{other.target!r} with taps {list(other.taps)}; build them alike."
            )
    return replace(
        first,
        ids=tuple(name for meta in metas for name in meta.ids),
        lengths=tuple(length for meta in metas for length in meta.lengths),
        prompt_lengths=tuple(length for meta in metas for length in meta.prompt_lengths),
    )


def build_features(
    target: Target,
    examples: Seq[Example],
    taps: Seq[int],
    folder: Path,
    *,
    batch_tokens: int = BATCH_TOKENS,
    on_batch: Callable[[int, int], None] | None = None,
) -> FeatureStore:
    """Run the target over every example and store its states; `on_batch(tokens_done, tokens_in_all)` reports."""
    meta = FeatureMeta(
        target.name,
        tuple(taps),
        target.hidden_size,
        tuple(e.id for e in examples),
        tuple(len(e.prompt_ids) + len(e.response_ids) for e in examples),
        tuple(len(e.prompt_ids) for e in examples),
        batch_tokens,
        name_of(target.dtype),
    )
    if not meta.lengths:
        raise UsageError("There are no examples to compute features for; generate a corpus first.")
    done = _start_or_resume(folder, meta)
    if done is None:
        return FeatureStore.open(folder)
    arrays = _open_arrays(folder, meta, "r+")
    offsets = np.concatenate([[0], np.cumsum(meta.lengths)])
    finished = 0
    for number, batch in enumerate(_batches(meta.lengths, batch_tokens)):
        if number >= done:
            _fill(target, [examples[i] for i in batch], [offsets[i] for i in batch], meta.taps, arrays)
            write_atomically(folder / _PROGRESS, _json({"batches": number + 1}))
        finished += sum(meta.lengths[i] for i in batch)
        if on_batch is not None:
            on_batch(finished, meta.tokens)
    (folder / _PROGRESS).unlink()
    return FeatureStore.open(folder)


def _fill(
    target: Target, examples: list[Example], offsets: list[int], taps: Seq[int], arrays: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Write one right-padded batch to its places."""
    rows = [torch.tensor(e.prompt_ids + e.response_ids) for e in examples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    # Causal attention never looks right, so the padding needs no mask.
    states = target.hidden_states(ids.to(target.device), taps)
    tokens, tap_rows, final = arrays
    for row, (sequence, start) in enumerate(zip(rows, offsets, strict=True)):
        stop = start + len(sequence)
        tokens[start:stop] = sequence.int()
        tap_rows[start:stop] = states.taps[row, : len(sequence)].to("cpu", torch.bfloat16)
        final[start:stop] = states.final[row, : len(sequence)].to("cpu", torch.bfloat16)


def _batches(lengths: Seq[int], batch_tokens: int) -> list[list[int]]:
    """Sequences of similar length together, at most `batch_tokens` padded tokens a batch."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _start_or_resume(folder: Path, meta: FeatureMeta) -> int | None:
    """Number of batches already there, or None when the store is complete."""
    if (folder / META).exists():
        if _read_meta(folder) not in (meta, replace(meta, precision=None)):
            raise UsageError(
                f"{folder} holds features of other examples, taps, target, precision or batches; choose another folder."
            )
        return _batches_done(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, width, dtype in _layout(meta):
        with open(folder / name, "wb") as file:
            file.truncate(meta.tokens * width * torch.empty((), dtype=dtype).element_size())
    write_atomically(folder / _PROGRESS, _json({"batches": 0}))
    write_atomically(folder / META, _json(asdict(meta)))
    return 0


def _layout(meta: FeatureMeta) -> tuple[tuple[str, int, torch.dtype], ...]:
    return (
        ("tokens.i32", 1, torch.int32),
        ("taps.bf16", len(meta.taps) * meta.hidden_size, torch.bfloat16),
        ("final.bf16", meta.hidden_size, torch.bfloat16),
    )


def _open_arrays(folder: Path, meta: FeatureMeta, mode: str) -> tuple[Tensor, Tensor, Tensor]:
    arrays = []
    for name, width, dtype in _layout(meta):
        count = meta.tokens * width
        size = count * torch.empty((), dtype=dtype).element_size()
        path = folder / name
        if not path.exists() or path.stat().st_size != size:
            raise ProbeError(
                f"{path} is missing or not {size:,} bytes long; delete {folder} and build the features again."
            )
        flat = torch.from_file(str(path), shared=mode == "r+", size=count, dtype=dtype)
        arrays.append(flat if width == 1 else flat.view(meta.tokens, width))
    return arrays[0], arrays[1], arrays[2]


def _read_meta(folder: Path) -> FeatureMeta:
    try:
        raw = json.loads((folder / META).read_text())
    except FileNotFoundError:
        raise UsageError(f"{folder} holds no features; build them with `dspine-probe features`.") from None
    lists = {name: tuple(raw[name]) for name in ("taps", "ids", "lengths", "prompt_lengths")}
    return FeatureMeta(**{**raw, **lists})


def _batches_done(folder: Path) -> int | None:
    path = folder / _PROGRESS
    return json.loads(path.read_text())["batches"] if path.exists() else None


def _json(value: object) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(json.dumps(value))

    return write
