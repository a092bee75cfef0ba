"""Trained injectors on disk: one safetensors file and one JSON record an arm, in a folder that belongs to one draft.

`save_arm` writes an arm when it is done, `trained` says which are there, `InjectorSet.load` brings them back to their
draft and refuses another draft's. Weights are stored in bf16.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dspine_probe.drafts import Draft
from dspine_probe.drafts.checkpoint import shipped_checkpoints
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.experiments.injection_depth.arms import Arm, ArmModule, build
from dspine_probe.experiments.injection_depth.injectors import Codes
from dspine_probe.files import data_dir, write_atomically
from dspine_probe.target import Target

Record = Mapping[str, Any]


def draft_fingerprint(draft: Draft) -> str:
    """SHA-256 of a draft's weights in bf16, the type checkpoints keep."""
    digest = hashlib.sha256()
    for name, weight in sorted(draft.named_parameters()):
        digest.update(name.encode())
        digest.update(weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save_arm(folder: Path, module: ArmModule, record: Record) -> None:
    """Write `<arm>.safetensors`, then `<arm>.json`, which says that the arm is done."""
    stem = folder / module.arm.name
    tensors = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in module.named_parameters()
    }
    write_atomically(_suffixed(stem, "safetensors"), lambda path: save_file(tensors, path))
    text = json.dumps({"arm": asdict(module.arm), **record}, indent=1) + "\n"
    write_atomically(_suffixed(stem, "json"), lambda path: path.write_text(text, encoding="utf-8"))


def trained(folder: Path) -> dict[str, Record]:
    """Records of the finished arms in a folder, by name."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if "arm" in record and path.with_name(path.stem + ".safetensors").is_file():
            found[path.stem] = record
    return found


def shipped_injectors(name: str) -> Path | None:
    """The folder of the injectors that come with a shipped draft, or None."""
    folder = data_dir() / "injectors" / name
    return folder if folder.is_dir() and name in shipped_checkpoints() else None


@dataclass(frozen=True)
class InjectorSet:
    """Trained arms of one draft, ready to run beside it, with the codes they were trained on.

    all_slots: whether they were trained on all slots of a block at once (causal drafts) or on one slot a block.
    message: size of the injectors' message.
    """

    modules: Mapping[str, ArmModule]
    codes: Codes
    all_slots: bool
    message: int
    records: Mapping[str, Record]

    @classmethod
    def load(cls, folder: str | Path, draft: Draft, target: Target, *, names: Sequence[str] | None = None) -> Self:
        """The arms in `folder`, or those named.

        Raises:
            UsageError: there are none, one that was named is missing, or they were trained on another draft.
            ProbeError: a file is damaged.
        """
        folder = Path(folder)
        records = trained(folder)
        chosen = list(records) if names is None else list(names)
        missing = [name for name in chosen if name not in records]
        if missing or not chosen:
            what = f"no injector {missing[0]!r}" if missing else "no injectors"
            raise UsageError(f"{folder} holds {what}; train them with train_injectors or name another folder.")
        mark = draft_fingerprint(draft)
        for name in chosen:
            if records[name]["draft"] != mark:
                raise UsageError(
                    f"the injector {name!r} in {folder} was trained on another draft; use the draft it belongs to or "
                    "train injectors for this one."
                )
        first = records[chosen[0]]
        codes = Codes.of(target.head, first["rank"], first["seed"])
        modules = {name: _read(folder, records[name], draft, codes) for name in chosen}
        return cls(modules, codes, first["all_slots"], first["message"], {name: records[name] for name in chosen})


def _read(folder: Path, record: Record, draft: Draft, codes: Codes) -> ArmModule:
    module = build(Arm(**record["arm"]), draft, codes, message=record["message"], seed=record["seed"])
    path = _suffixed(folder / module.arm.name, "safetensors")
    try:
        tensors = load_file(path)
        parameters = dict(module.named_parameters())
        if tensors.keys() != parameters.keys():
            raise ValueError("its tensors are not those of the arm")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(tensors[name])
    except (SafetensorError, ValueError, RuntimeError, OSError) as error:
        raise ProbeError(f"{path} cannot be read ({error}); delete it and train the arm again.") from error
    return module.eval().requires_grad_(False)


def _suffixed(stem: Path, suffix: str) -> Path:
    # Names such as rho-0.50 hold a dot, which with_suffix would cut.
    return stem.with_name(f"{stem.name}.{suffix}")
