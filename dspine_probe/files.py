"""Files that are whole or absent, and the folders where data and downloads are kept.

`write_atomically` writes beside the destination, flushes to disk and renames, so that a kill or a full disk never
leaves half a file under the final name; `write_folder_atomically` does the same for a folder. `data_dir` is what the
repository ships, `cache_dir` the per-user cache; `sha256_of` checks what is in it.
"""

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from dspine_probe.errors import ProbeError

CACHE_VARIABLE = "DSPINE_PROBE_CACHE"
DATA_VARIABLE = "DSPINE_PROBE_DATA"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CHUNK = 1 << 20


def cache_dir() -> Path:
    """The folder for downloads and conversions, created when absent.

    `$DSPINE_PROBE_CACHE` if set, else `dspine_probe` under `$XDG_CACHE_HOME` or `~/.cache`.

    Raises:
        ProbeError: the folder cannot be created.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(chosen).expanduser() if chosen else base / "dspine_probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProbeError(
            f"the cache folder {folder} cannot be created ({error.strerror}); "
            f"set {CACHE_VARIABLE} to a folder you can write to"
        ) from error
    return folder


def data_dir() -> Path:
    """The folder that holds `prompts/` and, in a clone, corpora, checkpoints and results.

    `$DSPINE_PROBE_DATA` if set, else `data/` of the repository, else the prompts packed into the installed package.
    """
    chosen = os.environ.get(DATA_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    package = Path(__file__).parent
    in_clone = package.parent / "data"
    return in_clone if (in_clone / "prompts").is_dir() else package / "_data"


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file as 64 lower-case hex digits, read in chunks of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Create or replace `path` with what `write` puts into the temporary file it is given.

    The temporary file lies in the same folder and keeps the suffix of `path`. Until the rename, `path` is as it was;
    after a failure the temporary file is gone and `path` untouched.

    Raises:
        ProbeError: the disk is full, or the folder cannot be written to.
    """
    path = Path(path)
    temporary = _temporary_beside(path)
    try:
        write(temporary)
        _use_ordinary_mode(temporary)
        _flush(temporary)
        os.replace(temporary, path)
    except Exception as error:
        if _is_full(error):
            raise _full(path) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)
    _flush_folder(path.parent)


def write_folder_atomically(folder: Path, write: Callable[[Path], object]) -> None:
    """Create or replace `folder` with what `write` puts into the empty folder it is given.

    `write` sees a folder beside the final one and should flush its files (`write_atomically` does). A folder already
    there is replaced whole, other files in it included.

    Raises:
        ProbeError: the disk is full, or the parent folder cannot be written to.
    """
    folder = Path(folder).absolute()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    except OSError as error:
        if _is_full(error):
            raise _full(folder) from error
        raise ProbeError(
            f"{folder} cannot be written ({error.strerror}); name a folder you can write to"
        ) from error
    try:
        made = scratch / "new"
        made.mkdir()
        write(made)
        if folder.exists():
            folder.rename(scratch / "old")
        made.rename(folder)
    except Exception as error:
        if _is_full(error):
            raise _full(folder) from error
        raise
    finally:
        if (scratch / "old").exists() and not folder.exists():
            (scratch / "old").rename(folder)
        shutil.rmtree(scratch, ignore_errors=True)
    _flush_folder(folder.parent)


def _temporary_beside(path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    except OSError as error:
        if _is_full(error):
            raise _full(path) from error
        raise ProbeError(
            f"{path} cannot be written ({error.strerror}); name a folder you can write to"
        ) from error
    os.close(handle)
    return Path(name)


def _use_ordinary_mode(path: Path) -> None:
    # mkstemp gives 0600, and some writers put such a file of their own in its place
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(path, 0o666 & ~umask)


def _flush(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_full(error: Exception) -> bool:
    # safetensors and torch report a full disk with errors of their own
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return "No space left on device" in str(error)


def _full(path: Path) -> ProbeError:
    return ProbeError(
        f"the disk is full, so {path} was not written; free some space there and run the command again"
    )
