"""Atomic files, the cache and the data folder."""

import errno
import hashlib
import os
import stat
from pathlib import Path

import pytest

from dspine_probe.errors import ProbeError
from dspine_probe.files import cache_dir, data_dir, sha256_of, write_atomically


def test_a_file_is_written_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    write_atomically(path, lambda part: part.write_text("whole"))
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


def test_the_temporary_file_keeps_the_suffix_and_lies_beside(tmp_path: Path) -> None:
    seen: list[Path] = []
    write_atomically(tmp_path / "a.safetensors", seen.append)
    assert seen[0].suffix == ".safetensors" and seen[0].parent == tmp_path


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def half(part: Path) -> None:
        part.write_text("ha")
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        write_atomically(path, half)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_ctrl_c_leaves_no_rest(tmp_path: Path) -> None:
    def interrupted(part: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "a.txt", interrupted)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError("io error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_one_clear_sentence(tmp_path: Path, error: Exception) -> None:
    def full(part: Path) -> None:
        raise error

    with pytest.raises(ProbeError, match="the disk is full, so .*a.txt was not written; free some space"):
        write_atomically(tmp_path / "a.txt", full)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProbeError, match="cannot be written"):
        write_atomically(tmp_path / "file" / "a.txt", lambda part: None)


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_atomically(tmp_path / "a.txt", lambda part: part.write_text(""))
    modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "a.txt")}
    assert modes["a.txt"] == modes["plain"]


def test_sha256(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000
    (tmp_path / "a").write_bytes(content)
    assert sha256_of(tmp_path / "a") == hashlib.sha256(content).hexdigest()


def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("DSPINE_PROBE_CACHE", raising=False)
    assert cache_dir() == tmp_path / "xdg" / "dspine_probe"
    monkeypatch.setenv("DSPINE_PROBE_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    assert cache_dir().is_dir()


def test_a_cache_that_cannot_be_made_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSPINE_PROBE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ProbeError, match="set DSPINE_PROBE_CACHE"):
        cache_dir()


def test_the_data_folder_is_the_repositorys_unless_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DSPINE_PROBE_DATA", raising=False)
    assert (data_dir() / "prompts").is_dir()
    monkeypatch.setenv("DSPINE_PROBE_DATA", str(tmp_path))
    assert data_dir() == tmp_path
