"""Drafts on disk: a folder with `config.json` and `model.safetensors` in the public layout.

`save_draft` writes a folder whole or not at all, with checksums in a `manifest.json` and a fingerprint of the target;
`load_draft` reads it, or a public checkpoint without these two, and refuses damaged files and foreign targets.
`shipped_checkpoints` lists the drafts that come with the repository. Tensor names are the business of `layout`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspine_probe.config import DSPINE, DraftConfig
from dspine_probe.drafts import Draft
from dspine_probe.drafts.layout import CODES, from_public, to_public
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.files import data_dir, sha256_of, write_atomically, write_folder_atomically
from dspine_probe.target import Target

CONFIG, WEIGHTS, MANIFEST, CARD = "config.json", "model.safetensors", "manifest.json", "README.md"
CODE_TABLE = "transfer.safetensors"
"""Some public DSpine checkpoints keep the code table beside the weights, under the key `codes`."""
FINGERPRINT = "target_fingerprint"
_FINGERPRINT_ROWS = 1024


def shipped_checkpoints() -> dict[str, Path]:
    """Folders of the drafts that come with the repository, by name."""
    found = sorted((data_dir() / "checkpoints").glob(f"*/{CONFIG}"))
    return {path.parent.name: path.parent for path in found}


def save_draft(
    draft: Draft,
    folder: str | Path,
    *,
    card: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    full_codes: bool = False,
) -> None:
    """Write a draft as a checkpoint folder.

    Args:
        draft: the draft; its target's embedding is fingerprinted, not stored.
        folder: created, or replaced if it holds a checkpoint.
        card: Markdown, written as README.md beside the weights.
        dtype: type of the stored weights; transfer tensors stay in fp32.
        full_codes: store DSpine's code of every token (the public layout) in place of the small map that makes them.

    Raises:
        UsageError: the folder holds other files than a checkpoint's.
        ProbeError: it cannot be written, or the disk is full.
    """
    folder = Path(folder)
    _refuse_other_files(folder)
    tensors = to_public(draft, dtype, full_codes=full_codes)
    config = {**draft.config.to_dict(), FINGERPRINT: fingerprint(draft.embedding)}

    def write(into: Path) -> None:
        _write_json(into / CONFIG, config)
        write_atomically(into / WEIGHTS, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
        _write_json(into / MANIFEST, {name: sha256_of(into / name) for name in (CONFIG, WEIGHTS)})
        if card is not None:
            write_atomically(into / CARD, lambda path: path.write_text(card, encoding="utf-8"))

    write_folder_atomically(folder, write)


def load_draft(
    name_or_folder: str | Path,
    target: Target,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> Draft:
    """Load a shipped draft by name, or any checkpoint folder in the public layout, for use with `target`.

    Args:
        name_or_folder: a name from `shipped_checkpoints`, or a folder.
        target: the model whose embedding and head the draft borrows; they are shared where dtype and device agree.
        dtype: type of the weights; by default fp32 on CPU and the target's elsewhere. Transfer codes stay in fp32.
        device: by default the target's.

    Raises:
        UsageError: no such draft, not the public layout, or made for another target.
        ProbeError: a file is damaged.
    """
    folder = _locate(name_or_folder)
    device = torch.device(target.device if device is None else device)
    dtype = dtype or (torch.float32 if device.type == "cpu" else target.dtype)
    _check_manifest(folder)
    raw = _read_json(folder / CONFIG)
    config = DraftConfig.from_dict(raw)
    _check_target(config, raw.get(FINGERPRINT), target)
    tensors = _read_tensors(folder / WEIGHTS)
    if config.architecture == DSPINE and (folder / CODE_TABLE).is_file():
        tensors[CODES] = _code_table(folder / CODE_TABLE)
    embedding = target.embedding.detach().to(device, dtype)
    head = embedding if target.tied else target.head.detach().to(device, dtype)
    return from_public(config, tensors, embedding, head).eval()


def fingerprint(embedding: Float[Tensor, "vocab d_model"]) -> str:
    """SHA-256 of the first rows of an embedding in bf16: the same for every dtype the target is loaded in."""
    rows = embedding[:_FINGERPRINT_ROWS].detach().to("cpu", torch.bfloat16).contiguous()
    return hashlib.sha256(rows.view(torch.uint8).numpy().tobytes()).hexdigest()


def _locate(name_or_folder: str | Path) -> Path:
    shipped = shipped_checkpoints()
    name, folder = str(name_or_folder), Path(name_or_folder)
    if name in shipped:
        return shipped[name]
    if (folder / CONFIG).is_file():
        return folder
    if folder.is_dir():
        raise UsageError(f"the folder {name} holds no {CONFIG}; give the folder of a draft checkpoint")
    near = difflib.get_close_matches(name, shipped, n=1)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    known = ", ".join(shipped) or "none"
    raise UsageError(f"draft {name!r} is neither a folder nor a shipped draft (shipped: {known}){guess}")


def _check_target(config: DraftConfig, made_for: str | None, target: Target) -> None:
    other = f"{config.target_name!r}" if config.target_name else "another target"
    mend = f"not for {target.name!r}; load the target it belongs to"
    if config.num_target_layers != target.num_layers:
        raise UsageError(
            f"the draft was made for {other} of {config.num_target_layers} layers, {mend} ({target.num_layers} layers)"
        )
    # Sizes that differ are refused with the sizes when the draft is built, so only look-alikes are left here.
    alike = (config.vocab_size, config.hidden_size) == tuple(target.embedding.shape)
    if alike and made_for is not None and made_for != fingerprint(target.embedding):
        raise UsageError(f"the draft was made for {other}, {mend} (same sizes, other weights)")


def _check_manifest(folder: Path) -> None:
    if not (folder / MANIFEST).is_file():
        return
    for name, expected in _read_json(folder / MANIFEST).items():
        path = folder / name
        if not path.is_file():
            raise ProbeError(f"{path} is missing; copy the checkpoint again")
        if sha256_of(path) != expected:
            raise ProbeError(
                f"{path} is not the file that was saved (its checksum differs); copy the checkpoint again"
            )


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UsageError(f"{path} was not found; a draft checkpoint holds {CONFIG} and {WEIGHTS}")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ProbeError(
            f"{path} cannot be read ({error}), it may be truncated; copy the checkpoint again"
        ) from error


def _code_table(path: Path) -> Tensor:
    tensors = _read_tensors(path)
    if "codes" not in tensors:
        raise UsageError(
            f"{path} holds {', '.join(tensors) or 'nothing'} instead of `codes`; copy the checkpoint again"
        )
    return tensors["codes"]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProbeError(f"{path} cannot be read ({error}); copy the checkpoint again") from error
    if not isinstance(found, dict):
        raise ProbeError(f"{path} is not a JSON object; copy the checkpoint again")
    return found


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomically(
        path, lambda scratch: scratch.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    )


def _refuse_other_files(folder: Path) -> None:
    if not folder.exists():
        return
    known = {CONFIG, WEIGHTS, MANIFEST, CARD}
    if not folder.is_dir() or not {path.name for path in folder.iterdir()} <= known:
        raise UsageError(
            f"{folder} holds other things than a draft's files; name a new folder for the checkpoint"
        )
