"""Building the C kernels on the machine that runs them, and loading them.

The compiler is `$CC`, or the first of cc, gcc and clang. A library is built for this very processor, once for each
precision, and kept in the user cache under a name that changes with the sources, the compiler, its options and the
processor. Where there is no compiler, or it fails, `load` says why, and the caller computes with torch instead.

Processors with AVX-512 can multiply bfloat16 in pairs. AMD's do so at twice the rate of floats, Intel's at half of it;
there, weights are widened to floats on the way. Where an Intel processor has a matrix unit (AMX), that multiplies.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from dspine_probe.errors import ProbeError
from dspine_probe.files import cache_dir, write_atomically

SOURCES = ("heads.c", "layer.c", "spine.c")
HEADERS = ("numbers.h", "product.h", "tiles.h")
COMPILERS = ("cc", "gcc", "clang")
OPTIONS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-Wno-psabi")
NATIVE = "-march=native" if platform.machine().lower() in ("x86_64", "amd64", "i686") else "-mcpu=native"
THREADED = (("-fopenmp",), ())  # without OpenMP everything runs in one thread
AMD = "AuthenticAMD"
SECONDS = 120


class NotBuilt(Exception):
    """Why there are no kernels on this machine, in one sentence."""


def load(*, half: bool, in_pairs: bool | None = None, matrix_unit: bool = True) -> ctypes.CDLL:
    """The kernels for bfloat16 (`half`) or float weights, built first where they are not in the cache.

    Args:
        half: bfloat16 weights.
        in_pairs: multiply bfloat16 by the instructions for pairs where there are any; by default where that is faster.
        matrix_unit: multiply bfloat16 on Intel's matrix unit (AMX) where there is one and the system allows it.

    Raises:
        NotBuilt: there is no C compiler, it fails, or its result does not load.
    """
    library = _load(half, in_pairs, matrix_unit)
    return library if library.allowed() else _load(half, in_pairs, False)


def _load(half: bool, in_pairs: bool | None, matrix_unit: bool) -> ctypes.CDLL:
    compiler = _compiler()
    folder = Path(__file__).parent
    version = _run([compiler, "--version"]).splitlines()[0]
    processor = _processor()
    in_pairs = AMD in processor if in_pairs is None else in_pairs
    numbers = (f"-DHALF={int(half)}", f"-DDOT={int(in_pairs)}", f"-DAMX={int(matrix_unit)}")
    stamp = hashlib.sha256(f"{compiler} {version} {OPTIONS} {numbers} {processor}".encode())
    for name in (*HEADERS, *SOURCES):
        stamp.update((folder / name).read_bytes())
    try:
        library = cache_dir() / "kernels" / f"{stamp.hexdigest()[:16]}.so"
        if not library.is_file():
            write_atomically(library, lambda path: _compile(compiler, folder, path, numbers))
        return ctypes.CDLL(str(library))
    except (OSError, ProbeError) as error:
        raise NotBuilt(f"the compiled kernels could not be kept or loaded ({error})") from error


def _compiler() -> str:
    names = filter(None, (os.environ.get("CC"), *COMPILERS))
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise NotBuilt("there is no C compiler on the search path (cc, gcc or clang)")
    return found


def _compile(compiler: str, folder: Path, library: Path, numbers: tuple[str, ...]) -> None:
    """Build with OpenMP, or without it where it is not known or cannot be linked."""
    sources = [str(folder / name) for name in SOURCES]
    faults: list[Exception] = []
    for threaded in THREADED:
        try:
            _run([compiler, *OPTIONS, NATIVE, *threaded, *numbers, *sources, "-o", str(library), "-lm"])
            ctypes.CDLL(str(library))
            return
        except (NotBuilt, OSError) as fault:
            faults.append(fault)
    raise NotBuilt(str(faults[0])) from faults[0]


def _run(command: list[str]) -> str:
    try:
        with tempfile.TemporaryDirectory() as scratch:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=scratch)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(f"{command[0]} did not run ({error})") from error
    if done.returncode:
        said = next(iter(done.stderr.strip().splitlines()), "no reason given")
        raise NotBuilt(f"{command[0]} failed ({said})")
    return done.stdout or "unknown"


def _processor() -> str:
    """What "native" stands for: code built here may not run on another processor that shares the cache."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    lines = [line for line in text.splitlines() if line.startswith(("vendor_id", "model name", "flags", "Features"))]
    return "\n".join(sorted(set(lines))) or f"{platform.machine()} {platform.processor()}"
