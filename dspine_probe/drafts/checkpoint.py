"""Drafts on disk: a folder with `config.json` and `model.safetensors` (or its shards) in the public layout.

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

from dspine_probe.config import DraftConfig
from dspine_probe.drafts import Draft
from dspine_probe.drafts.layout import from_public, to_public
from dspine_probe.drafts.registry import read_config
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.files import DATA_VARIABLE, data_dir, sha256_of, write_atomically, write_folder_atomically
from dspine_probe.target import Target

CONFIG, WEIGHTS, MANIFEST, CARD = "config.json", "model.safetensors", "manifest.json", "README.md"
INDEX = f"{WEIGHTS}.index.json"
SHIPPED = ("dflash", "dspine")
FINGERPRINT, TRAINING = "target_fingerprint", "training"
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
        full_codes: store the code of every token (the public layout) in place of the small map that makes them.

    Raises:
        UsageError: the folder holds other files than a checkpoint's.
        ProbeError: it cannot be written, or the disk is full.
    """
    folder = Path(folder)
    refuse_other_files(folder)
    tensors = to_public(draft, dtype, full_codes=full_codes)
    config = {**draft.config.to_dict(), FINGERPRINT: fingerprint(draft.embedding)}
    if draft.training_record:
        config[TRAINING] = dict(draft.training_record)

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
    folder = locate(name_or_folder)
    device = torch.device(target.device if device is None else device)
    dtype = dtype or (torch.float32 if device.type == "cpu" else target.dtype)
    _check_manifest(folder)
    raw = _read_json(folder / CONFIG)
    kind, config = read_config(raw)
    _check_target(config, raw.get(FINGERPRINT), target)
    tensors = _read_weights(folder)
    for file, (key, name) in kind.draft.side_files.items():
        if (folder / file).is_file():
            tensors[name] = _side_tensor(folder / file, key)
    embedding = target.embedding.detach().to(device, dtype)
    head = embedding if target.tied else target.head.detach().to(device, dtype)
    draft = from_public(kind, config, tensors, embedding, head).eval()
    draft.training_record = raw.get(TRAINING, {})
    return draft


def fingerprint(embedding: Float[Tensor, "vocab d_model"]) -> str:
    """SHA-256 of the first rows of an embedding in bf16: the same for every dtype the target is loaded in."""
    rows = embedding[:_FINGERPRINT_ROWS].detach().to("cpu", torch.bfloat16).contiguous()
    return hashlib.sha256(rows.view(torch.uint8).numpy().tobytes()).hexdigest()


def locate(name_or_folder: str | Path) -> Path:
    """The folder of a shipped draft or of any checkpoint.

    Raises:
        UsageError: there is no such draft, or it is not part of this installation.
    """
    shipped = shipped_checkpoints()
    name, folder = str(name_or_folder), Path(name_or_folder)
    if name in shipped:
        return shipped[name]
    if (folder / CONFIG).is_file():
        return folder
    if folder.is_dir():
        raise UsageError(f"the folder {name} holds no {CONFIG}; give the folder of a draft checkpoint")
    if name in SHIPPED:
        raise UsageError(
            f"the shipped draft {name!r} is not in {data_dir() / 'checkpoints'}: an installed package carries prompts "
            f"alone; work in a clone of the repository, or set {DATA_VARIABLE} to the data folder of one"
        )
    near = difflib.get_close_matches(name, shipped, n=1)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    known = ", ".join(shipped) or "none"
    raise UsageError(f"draft {name!r} is neither a folder nor a shipped draft (shipped: {known}){guess}")


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a checkpoint's tensors: one, or the shards that its index names.

    Raises:
        UsageError: there are neither weights nor an index.
        ProbeError: the index is damaged, or a shard is missing.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise UsageError(
            f"{folder / WEIGHTS} was not found, nor {INDEX}; a draft checkpoint holds {CONFIG} and one of them"
        )
    shards = [folder / name for name in sorted(set(_shard_of_tensor(folder).values()))]
    for shard in shards:
        if shard.parent != folder or not shard.is_file():
            raise ProbeError(f"{shard}, which {INDEX} names, is missing; copy the checkpoint again")
    return shards


def weights_digest(folder: Path) -> str:
    """SHA-256 of a checkpoint's weights; of shards, of their own in order."""
    digests = [sha256_of(path) for path in weight_files(folder)]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


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
            raise ProbeError(f"{path} is not the file that was saved (its checksum differs); copy the checkpoint again")


def _read_weights(folder: Path) -> dict[str, Tensor]:
    files = weight_files(folder)
    tensors = {name: tensor for path in files for name, tensor in _read_tensors(path).items()}
    lacking = [] if files == [folder / WEIGHTS] else sorted(set(_shard_of_tensor(folder)) - set(tensors))
    if lacking:
        raise ProbeError(f"{folder} lacks {lacking[0]}, which {INDEX} names; copy the checkpoint again")
    return tensors


def _shard_of_tensor(folder: Path) -> dict[str, str]:
    shards = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ProbeError(f"{folder / INDEX} has no weight_map; copy the checkpoint again")
    return shards


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ProbeError(f"{path} cannot be read ({error}), it may be truncated; copy the checkpoint again") from error


def _side_tensor(path: Path, key: str) -> Tensor:
    tensors = _read_tensors(path)
    if key not in tensors:
        raise UsageError(
            f"{path} holds {', '.join(tensors) or 'nothing'} instead of `{key}`; copy the checkpoint again"
        )
    return tensors[key]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProbeError(f"{path} cannot be read ({error}); copy the checkpoint again") from error
    if not isinstance(found, dict):
        raise ProbeError(f"{path} is not a JSON object; copy the checkpoint again")
    return found


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomically(path, lambda scratch: scratch.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8"))


def refuse_other_files(folder: Path) -> None:
    """Refuse to replace a folder that holds more than a checkpoint.

    Raises:
        UsageError: naming the folder.
    """
    if not folder.exists():
        return
    known = {CONFIG, WEIGHTS, MANIFEST, CARD}
    if not folder.is_dir() or not {path.name for path in folder.iterdir()} <= known:
        raise UsageError(f"{folder} holds other things than a draft's files; name a new folder for the checkpoint")
