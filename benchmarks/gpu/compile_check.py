"""Compile every launch of the decoding path for GPUs that are not here, and find kernels that would run badly there.

The launches are those of `Problem.launches` on the meta device, so what is compiled is what would run: types,
constants, alignment, warps, stages. From the machine code come registers, the stack a thread needs (spilled registers,
arrays that did not fit) and shared memory; `faults` names what breaks a limit. Says nothing about speed. Entry points:
`compile_launch`, `compile_all`, and  python -m benchmarks.gpu.compile_check
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.problem import EMBEDDED, QWEN3_8B, Problem, Sizes
from dspine_probe.decoding.kernels.launch import Launch, interpreting, triton
from dspine_probe.errors import ProbeError

SHARED_MEMORY = {90: 227 * 1024, 80: 163 * 1024}  # bytes one program may have, by architecture
REGISTER_FILE = 65_536  # of a multiprocessor, so at most what one program may take
GEOMETRIES = {"Qwen3-8B": QWEN3_8B, "Qwen3-8B, batch 32": replace(QWEN3_8B, batch=32), "embedded": EMBEDDED}
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Compiled:
    """What one kernel takes on one architecture: registers and stack bytes per thread, shared bytes per program."""

    kernel: str
    arch: int
    geometry: str
    registers: int
    stack: int
    shared: int
    threads: int

    @property
    def faults(self) -> list[str]:
        """Why this kernel must not ship; empty if it may."""
        found = []
        if self.stack:
            found.append(f"uses {self.stack} bytes of stack a thread (spilled registers)")
        if self.registers * self.threads > REGISTER_FILE:
            found.append(f"needs {self.registers} registers for each of {self.threads} threads")
        if self.shared > SHARED_MEMORY[self.arch]:
            found.append(f"needs {self.shared} bytes of shared memory, of {SHARED_MEMORY[self.arch]}")
        return found


def compile_launch(launch: Launch, arch: int, geometry: str = "") -> Compiled:
    """Compile one launch for a compute capability (90, 80) and read what it takes.

    Raises:
        ProbeError: Triton is absent, interprets kernels in this process, or rejects the kernel.
    """
    if triton is None or interpreting():
        raise ProbeError(
            "kernels cannot be compiled in this process: it needs Triton, and TRITON_INTERPRET must not be set"
        )
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = _specialised(launch)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    try:
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:
        raise ProbeError(f"{launch.name} does not compile for sm_{arch}: {error}") from error
    registers, stack = _resources(made.asm["cubin"])
    return Compiled(launch.name, arch, geometry, registers, stack, made.metadata.shared, 32 * launch.warps)


def compile_all(
    arches: Iterable[int] = tuple(SHARED_MEMORY), geometries: Iterable[str] = tuple(GEOMETRIES)
) -> list[Compiled]:
    """Compile each different launch of the geometries once per architecture."""
    return [
        compile_launch(launch, arch, name)
        for arch in arches
        for name, launch in _distinct({name: GEOMETRIES[name] for name in geometries})
    ]


def _distinct(geometries: dict[str, Sizes]) -> list[tuple[str, Launch]]:
    kept: dict[str, tuple[str, Launch]] = {}
    for name, sizes in geometries.items():
        for launch in Problem.make(sizes, torch.bfloat16, "meta").launches():
            key = repr((launch.name, *_specialised(launch), launch.warps, launch.stages))
            kept.setdefault(key, (name, launch))
    return list(kept.values())


def _specialised(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[Any]]]]:
    """Types, constants and alignments as Triton derives them from arguments when it launches."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: dict[tuple[int], list[list[Any]]] = {}
    for place, name in enumerate(launch.kernel.arg_names):
        value = launch.constants[name] if name in launch.constants else launch.arguments[name]
        if name in launch.constants or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = _TYPES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if name not in constants and _divides_16(value):
            aligned[(place,)] = [["tt.divisibility", 16]]
    return signature, constants, aligned


def _divides_16(value: Tensor | int | float) -> bool:
    if isinstance(value, Tensor):  # storage is aligned, a view into it need not be
        return value.storage_offset() * value.element_size() % 16 == 0
    return isinstance(value, int) and value % 16 == 0


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack, read from machine code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (re.findall(rf"{field}:(\d+)", told) for field in ("REG", "STACK"))
    return max(map(int, registers)), max(map(int, stack))


def main() -> int:
    """Print a table; the number of faulty kernels is the exit status."""
    made = compile_all()
    print(f"{'kernel':20} {'geometry':20} {'sm':>3} {'registers':>9} {'stack':>5} {'shared':>7}")
    for c in made:
        line = f"{c.kernel:20} {c.geometry:20} {c.arch:>3} {c.registers:>9} {c.stack:>5} {c.shared:>7}"
        print(line, "; ".join(c.faults))
    return sum(bool(c.faults) for c in made)


if __name__ == "__main__":
    sys.exit(main())
