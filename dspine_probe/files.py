"""Files that are whole or absent, and the folders where data and downloads are kept.

`write_atomically` writes beside the destination, flushes to disk and renames, so that a kill or a full disk never
leaves half a file under the final name; `write_folder_atomically` does the same for a folder. Both write to where a
link leads. `refuse_unwritable` finds a bad destination before any work. `data_dir` is what the repository ships,
`cache_dir` the per-user cache; `sha256_of` checks what is in it.
"""

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dspine_probe.errors import ProbeError, UsageError

CACHE_VARIABLE = "DSPINE_PROBE_CACHE"
DATA_VARIABLE = "DSPINE_PROBE_DATA"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_RENAME = (errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS)
_NO_PLACE = (errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOTEMPTY)
_CHUNK = 1 << 20


def cache_dir() -> Path:
    """The folder for downloads and conversions, created when absent.

    `$DSPINE_PROBE_CACHE` if set, else `dspine_probe` under `$XDG_CACHE_HOME` or `~/.cache`.

    Raises:
        ProbeError: the folder cannot be created.
    """
    chosen, shared = os.environ.get(CACHE_VARIABLE), os.environ.get("XDG_CACHE_HOME")
    try:
        if chosen:
            folder = Path(chosen).expanduser()
        else:
            folder = (Path(shared) if shared else Path.home() / ".cache") / "dspine_probe"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        fault = getattr(error, "strerror", None) or str(error).rstrip(".")
        place = getattr(error, "filename", None) or "the cache folder"
        raise ProbeError(
            f"{place} cannot be created ({fault}); set {CACHE_VARIABLE} to a folder you can write to"
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


def refuse_unwritable(path: Path, *, folder: bool = True) -> None:
    """Refuse a destination that could not be written in the end. Nothing is created.

    Args:
        path: a folder, or with `folder=False` a file, that need not exist yet.

    Raises:
        UsageError: something else is there, or it cannot be made or written to.
    """
    place = Path(os.path.realpath(path))
    if place.exists() and place.is_dir() != folder:
        raise UsageError(
            f"{path} is a {'file' if folder else 'folder'}; name a {'folder' if folder else 'file'} to write to"
        )
    within = place if folder else place.parent
    nearest = next(step for step in (within, *within.parents) if os.path.lexists(step))
    if not nearest.is_dir():
        raise UsageError(f"{path} cannot be made because {nearest} is a file; name another place to write to")
    if not may_write(nearest):
        raise UsageError(f"{path} cannot be written ({nearest} is closed to you); name a place you can write to")


def may_write(folder: Path) -> bool:
    """Whether files can be made in a folder that exists."""
    effective = os.access in os.supports_effective_ids
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=effective)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Create or replace `path`, or what it links to, with what `write` puts into the temporary file it is given.

    The temporary file lies in the same folder and keeps the suffix of `path`. Until the rename, `path` is as it was;
    after a failure the temporary file is gone and `path` untouched.

    Raises:
        ProbeError: the disk is full, or the folder cannot be written to.
    """
    path = Path(os.path.realpath(path))
    with _faults_of(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            give_ordinary_mode(temporary)
            _flush(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    _flush_folder(path.parent)


def write_folder_atomically(folder: Path, write: Callable[[Path], object]) -> None:
    """Create or replace `folder`, or what it links to, with what `write` puts into the empty folder it is given.

    `write` sees a folder beside the final one and should flush its files (`write_atomically` does). A folder already
    there is replaced whole, other files in it included. Where it cannot be renamed (a mount point, or a parent that is
    closed), `write` is called with a folder inside it, and the contents are exchanged one by one.

    Raises:
        ProbeError: the disk is full, or neither the folder nor its parent can be written to.
    """
    folder = Path(os.path.realpath(folder))
    with _faults_of(folder):
        try:
            _exchange(folder, write, inside=False)
        except OSError as error:
            if error.errno not in _NO_RENAME or not folder.is_dir():
                raise
            _exchange(folder, write, inside=True)
    _flush_folder(folder.parent)


def _exchange(folder: Path, write: Callable[[Path], object], *, inside: bool) -> None:
    """Make the new contents in a scratch folder beside or inside, then put them in place of the old."""
    place = folder if inside else folder.parent
    place.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=place, prefix=f".{folder.name}."))
    made, old = scratch / "new", scratch / "old"
    try:
        made.mkdir()
        write(made)
        if inside:
            old.mkdir()
            _move(folder, old, all_but=scratch)
            _move(made, folder)
        else:
            if folder.exists():
                folder.rename(old)
            made.rename(folder)
    except BaseException:
        if old.exists() and inside:
            _move(old, folder)
        elif old.exists():
            old.rename(folder)
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _move(source: Path, destination: Path, *, all_but: Path | None = None) -> None:
    for path in list(source.iterdir()):
        if path != all_but:
            path.rename(destination / path.name)


def give_ordinary_mode(path: Path) -> None:
    """Let those read a file who may read any new file; mkstemp and some writers close it to others (0600)."""
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(path, 0o666 & ~umask)


def _flush(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    with suppress(PermissionError):  # one may write to a folder that one may not read
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    """Turn what the system refuses into a sentence."""
    try:
        yield
    except Exception as error:
        code = error.errno if isinstance(error, OSError) else None
        # safetensors and torch report a full disk with errors of their own
        if code in _FULL or "No space left on device" in str(error):
            raise ProbeError(
                f"the disk is full, so {path} was not written; free some space there and run the command again"
            ) from error
        if code in (*_NO_RENAME, *_NO_PLACE):
            raise ProbeError(
                f"{path} cannot be written ({os.strerror(code or 0)}); name a place you can write to"
            ) from error
        raise
