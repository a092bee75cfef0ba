"""What the doctor sees and what it makes of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from users import as_nobody

from dspine_probe import doctor, machine
from dspine_probe.doctor import examine, render
from dspine_probe.machine import Machine, find_browser, look

SOUND = Machine(
    python="3.11.7",
    system="Linux",
    packages={"torch": "2.13.0", "triton": "3.7.1"},
    cpu="some processor",
    cpu_flags=("avx512_bf16",),
    cores=2,
    threads=2,
    memory=16 * 1024**3,
    cuda=("some GPU, 24 GiB, sm_90",),
    browser="/usr/bin/chromium",
)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds the target and a data folder that holds one draft."""
    monkeypatch.setenv("DSPINE_PROBE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DSPINE_PROBE_DATA", str(tmp_path / "data"))
    for name in ("cache/targets/smollm2-r1/manifest.json", "data/checkpoints/dflash/config.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "data/checkpoints/dflash/model.safetensors").write_bytes(b"0" * 10)
    return tmp_path


def _findings(monkeypatch: pytest.MonkeyPatch, seen: Machine) -> dict[str, str]:
    monkeypatch.setattr(doctor, "look", lambda: seen)
    return {finding.what: finding.level for finding in examine().findings}


def test_a_sound_machine_has_no_findings(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "look", lambda: SOUND)
    report = examine()
    assert report.findings == () and report.sound
    assert report.checkpoints == ("dflash",)
    assert report.embedded_target and report.cache_size == 2
    assert "Everything works here." in list(render(report))


@pytest.mark.parametrize(
    ("change", "what", "level"),
    [
        ({"packages": {"torch": "2.13.0", "plotly": None}}, "what needs plotly", "fault"),
        ({"cuda": ()}, "GPU kernels, CUDA graphs, billion-parameter targets", "limit"),
        ({"cuda": (), "cpu_flags": ("avx2",)}, "fast training in bf16", "limit"),
        ({"memory": 4 * 1024**3}, "the full reproduce run", "limit"),
        ({"browser": None}, "PNG figures", "limit"),
    ],
)
def test_what_is_missing_is_found(
    data: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], what: str, level: str
) -> None:
    assert _findings(monkeypatch, replace(SOUND, **change))[what] == level


def test_an_empty_cache_and_no_drafts_are_found(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPINE_PROBE_CACHE", str(tmp_path / "empty"))
    (data / "data/checkpoints/dflash/model.safetensors").unlink()
    assert _findings(monkeypatch, SOUND) == {"working offline": "limit", "measuring shipped drafts": "limit"}


def test_too_small_a_disk_is_a_fault(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPINE_PROBE_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(doctor, "CACHE_NEEDED", 1 << 62)
    monkeypatch.setattr(doctor, "look", lambda: SOUND)
    report = examine()
    assert not report.sound and "free" in report.findings[0].why


def test_a_home_that_cannot_be_written_is_a_finding(
    data: Path, open_to_all: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DSPINE_PROBE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: open_to_all)
    monkeypatch.setattr(doctor, "look", lambda: SOUND)
    monkeypatch.setattr(doctor, "_checkpoints", lambda: ("dflash",))
    with as_nobody():
        report = examine()
    (finding,) = report.findings
    assert not report.sound and "cannot be created (Permission denied)" in finding.why
    assert "DSPINE_PROBE_CACHE" in finding.mend and len(list(render(report))) == 3


def test_a_complete_cache_may_be_read_only(open_to_all: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPINE_PROBE_CACHE", str(open_to_all))
    monkeypatch.setattr(doctor, "_checkpoints", lambda: ("dflash",))
    for name in ("targets/smollm2-r1/manifest.json", "kernels/1.so"):
        (open_to_all / name).parent.mkdir(parents=True)
        (open_to_all / name).write_text("{}")
    open_to_all.chmod(0o555)
    with as_nobody():
        assert _findings(monkeypatch, SOUND) == {}
    (open_to_all / "kernels/1.so").unlink()
    with as_nobody():
        assert _findings(monkeypatch, SOUND) == {"keeping compiled kernels": "limit"}
    (open_to_all / "targets/smollm2-r1/manifest.json").unlink()
    with as_nobody():
        assert _findings(monkeypatch, SOUND) == {"fetching the embedded target": "fault"}


def test_looking_at_this_machine_gives_json_and_tables(data: Path) -> None:
    report = examine()
    assert json.loads(json.dumps(report.as_dict()))["machine"]["cores"] >= 1
    console = Console(width=100, record=True, quiet=True)
    console.print(*render(report))
    assert report.machine == look()


def test_the_browser_comes_from_the_environment_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    browser = tmp_path / "browser"
    browser.write_text("")
    monkeypatch.setenv("BROWSER_PATH", str(browser))
    assert find_browser() is None  # named, but not executable
    browser.chmod(0o755)
    assert find_browser() == str(browser)


def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PACKAGES", ("rich", "no-such-package-here"))
    assert look().packages["no-such-package-here"] is None
