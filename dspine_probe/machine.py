"""What this machine is: packages, processor, memory, CUDA devices, browser.

Plain facts read from the system; nothing is judged, changed or downloaded. `look` gathers them all,
`find_browser` finds what PNG figures are drawn with.
"""

import importlib.metadata
import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from dspine_probe.errors import ProbeError

PACKAGES = (
    "torch", "transformers", "transformer-lens", "accelerate", "safetensors", "gguf", "triton", "numpy", "pandas",
    "scikit-learn", "plotly", "kaleido", "jupyterlab", "ipywidgets", "anywidget", "nbclient", "nbformat", "jaxtyping",
    "typer", "rich",
)  # fmt: skip
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
BROWSERS = (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge", "brave",
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """Facts about a machine. `memory` is in bytes; a package that is not installed has the version None."""

    python: str
    system: str
    packages: dict[str, str | None]
    cpu: str
    cpu_flags: tuple[str, ...]
    cores: int
    threads: int
    memory: int | None
    cuda: tuple[str, ...]
    browser: str | None


def look() -> Machine:
    """Gather the facts.

    Raises:
        ProbeError: torch is missing or does not load.
    """
    threads, cuda = _torch_devices()
    return Machine(
        python=platform.python_version(),
        system=platform.platform(),
        packages={name: _installed(name) for name in PACKAGES},
        cpu=_cpuinfo("model name") or platform.processor() or platform.machine(),
        cpu_flags=_cpu_flags(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=threads,
        memory=_memory(),
        cuda=cuda,
        browser=find_browser(),
    )


def find_browser() -> str | None:
    """The Chromium-like browser that can turn figures into PNG: `$BROWSER_PATH`, else one on the search path."""
    chosen = os.environ.get("BROWSER_PATH")
    if chosen:
        return chosen if os.access(chosen, os.X_OK) else None
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_devices() -> tuple[int, tuple[str, ...]]:
    try:
        import torch
    except (ImportError, OSError) as error:
        raise ProbeError(f"torch does not load ({error}); run 'make install' to set it up again") from error
    cuda = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        seen = torch.cuda.get_device_properties(index)
        cuda.append(f"{seen.name}, {seen.total_memory / 1024**3:.0f} GiB, sm_{seen.major}{seen.minor}")
    return torch.get_num_threads(), tuple(cuda)


def _cpuinfo(field: str) -> str:
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    found = re.search(rf"^{field}\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return found.group(1) if found else ""


def _cpu_flags() -> tuple[str, ...]:
    present = set(_cpuinfo("flags").split())
    return tuple(flag for flag in CPU_FLAGS if flag in present)


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
