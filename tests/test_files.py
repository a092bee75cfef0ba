"""Atomic files, the cache and the data folder."""

import errno
import hashlib
import os
import stat
from pathlib import Path

import pytest
from users import as_nobody

from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.files import (
    cache_dir,
    data_dir,
    refuse_unwritable,
    sha256_of,
    write_atomically,
    write_folder_atomically,
)


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
    [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), RuntimeError("io error: No space left on device (os error 28)")],
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


def test_a_cache_that_cannot_be_made_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSPINE_PROBE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ProbeError, match="set DSPINE_PROBE_CACHE"):
        cache_dir()


def test_the_data_folder_is_the_repositorys_unless_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSPINE_PROBE_DATA", raising=False)
    assert (data_dir() / "prompts").is_dir()
    monkeypatch.setenv("DSPINE_PROBE_DATA", str(tmp_path))
    assert data_dir() == tmp_path


# ---- destinations of other kinds


def test_a_link_is_written_through_and_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "old").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_folder_atomically(tmp_path / "link", lambda into: (into / "new").write_text("new"))
    assert (tmp_path / "link").is_symlink() and [p.name for p in (tmp_path / "real").iterdir()] == ["new"]
    (tmp_path / "file-link").symlink_to("real/new")
    write_atomically(tmp_path / "file-link", lambda part: part.write_text("newer"))
    assert (tmp_path / "file-link").is_symlink() and (tmp_path / "real" / "new").read_text() == "newer"
    (tmp_path / "ahead").symlink_to("not-yet")
    write_folder_atomically(tmp_path / "ahead", lambda into: (into / "new").write_text("new"))
    assert (tmp_path / "ahead").is_symlink() and (tmp_path / "not-yet" / "new").read_text() == "new"


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that no one may rename, as a mount point is, with an old file in it."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    (folder / "old").write_text("old")
    rename = Path.rename

    def busy(self: Path, to: Path) -> Path:
        if folder in (self, Path(to)):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(self))
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", busy)
    return folder


def test_a_mount_point_keeps_its_place_and_changes_its_contents(mounted: Path) -> None:
    write_folder_atomically(mounted, lambda into: (into / "new").write_text("new"))
    assert {p.name: p.read_text() for p in mounted.iterdir()} == {"new": "new"}
    assert [p.name for p in mounted.parent.iterdir()] == ["mounted"]


def test_a_failure_on_a_mount_point_leaves_the_old_contents(mounted: Path) -> None:
    def fail(into: Path) -> None:
        (into / "new").write_text("half")
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        write_folder_atomically(mounted, fail)
    assert {p.name: p.read_text() for p in mounted.iterdir()} == {"old": "old"}


def test_a_folder_under_a_closed_parent_changes_its_contents(open_to_all: Path) -> None:
    folder = open_to_all / "closed" / "mine"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    folder.parent.chmod(0o555)
    with as_nobody():
        write_folder_atomically(folder, lambda into: (into / "new").write_text("new"))
        refuse_unwritable(folder)
        with pytest.raises(ProbeError, match="other cannot be written .*; name a place you can write to"):
            write_folder_atomically(folder.parent / "other", lambda into: None)
        with pytest.raises(UsageError, match="other/deep cannot be written .*closed is closed to you"):
            refuse_unwritable(folder.parent / "other" / "deep")
        with pytest.raises(ProbeError, match="a.txt cannot be written .*; name a place you can write to"):
            write_atomically(folder.parent / "a.txt", lambda part: None)
    assert [p.name for p in folder.iterdir()] == ["new"]


def test_a_bad_destination_is_found_without_touching_anything(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, folder, fault in (
        (tmp_path / "file", True, "file is a file; name a folder"),
        (tmp_path / "file" / "deep", True, "cannot be made because .*file is a file"),
        (tmp_path, False, "is a folder; name a file"),
        (tmp_path / "file" / "a.txt", False, "cannot be made because .*file is a file"),
    ):
        with pytest.raises(UsageError, match=fault):
            refuse_unwritable(path, folder=folder)
    refuse_unwritable(tmp_path / "new" / "deep")
    refuse_unwritable(tmp_path / "new" / "a.txt", folder=False)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_home_is_asked_for_only_when_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(*_: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setenv("DSPINE_PROBE_CACHE", str(tmp_path / "cache"))
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("DSPINE_PROBE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(ProbeError, match="Could not determine home directory.*set DSPINE_PROBE_CACHE"):
        cache_dir()
