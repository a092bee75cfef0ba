"""Time the GPU decoding path at the geometries of Qwen3-8B and Qwen3-4B, with random weights.

From the repository's root, on a machine with one CUDA device, torch 2.11+, Triton 3.6+ and transformers 5.17+:

    python -m benchmarks.gpu.run                 # under 8 minutes; writes benchmarks/results/gpu-<card>.json and .md
    python -m benchmarks.gpu.run --rehearse      # any machine: the same code at a toy geometry, once

Every kernel is first compared with float64. Then each part of a round is timed eagerly and as a CUDA graph, at batch 1
to 32, beside the bytes it must read over the bandwidth measured in the same process; then whole rounds. Work is done in
order of interest, and what the time does not allow is named in the result. Acceptance is never measured here.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import problem
from benchmarks.gpu.checks import check_kernels
from benchmarks.gpu.models import QWEN3_4B, QWEN3_8B, TINY, Geometry, build
from benchmarks.gpu.parts import Bench, open_bench, parts_of, plain_step_of, round_of, run_eagerly
from benchmarks.gpu.report import bars, page, speedups
from benchmarks.gpu.timing import Stopwatch
from benchmarks.recording import RESULTS, commit, save
from dspine_probe.decoding.fast_gpu import FastGpu
from dspine_probe.files import write_atomically
from dspine_probe.machine import look


@dataclass(frozen=True)
class Plan:
    """What is done, and how long it may take."""

    geometries: tuple[Geometry, ...]
    batches: tuple[int, ...]
    problems: tuple[tuple[str, problem.Sizes, torch.dtype], ...]
    context: int
    repetitions: int
    seconds: float


FULL = Plan(
    geometries=(QWEN3_8B, QWEN3_4B),
    batches=(1, 32, 8, 2, 16, 4),  # in order of interest
    problems=(
        ("odd", problem.ODD, torch.float32),
        ("odd", replace(problem.ODD, batch=30), torch.bfloat16),
        ("embedded", problem.EMBEDDED, torch.float32),
        ("Qwen3-8B", problem.QWEN3_8B, torch.bfloat16),
        ("Qwen3-8B, batch 4", replace(problem.QWEN3_8B, batch=4), torch.bfloat16),
        ("Qwen3-4B, batch 32", replace(problem.QWEN3_4B, batch=32), torch.bfloat16),
    ),
    context=1024,
    repetitions=30,
    seconds=400,
)
REHEARSAL = Plan(
    geometries=(TINY,),
    batches=(1, 2),
    problems=(("odd", replace(problem.ODD, batch=1), torch.bfloat16),),
    context=12,
    repetitions=1,
    seconds=400,
)


@dataclass
class Session:
    """One run: its plan, device and clock, and what it has found."""

    plan: Plan
    device: torch.device
    started: float = field(default_factory=time.monotonic)
    found: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"checks": [], "timings": [], "rounds": []})
    skipped: list[str] = field(default_factory=list)

    def late(self, what: str) -> bool:
        """Whether the time is up; if so, `what` is named as not done."""
        if time.monotonic() - self.started < self.plan.seconds:
            return False
        self.skipped.append(f"{what}: the time was up")
        return True

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"{time.monotonic() - self.started:6.1f} s  {text}", flush=True)


def check(session: Session) -> None:
    """Every kernel at every problem."""
    for name, sizes, dtype in session.plan.problems:
        if session.late(f"checks at {name}"):
            return
        generator = torch.Generator(session.device).manual_seed(0)
        made = problem.Problem.make(sizes, dtype, session.device, generator)
        checks = check_kernels(made)
        session.found["checks"] += [
            {"problem": name, "batch": sizes.batch, **asdict(c), "passed": c.passed} for c in checks
        ]
        failed = [c.kernel for c in checks if not c.passed]
        session.say(f"checked {name}, {dtype}: {'all kernels agree' if not failed else f'WRONG: {failed}'}")


def measure(session: Session, watch: Stopwatch, bench: Bench, bandwidth: float) -> None:
    """All parts, then whole rounds."""
    where = {"geometry": bench.models.geometry.name, "batch": bench.batch}
    needed = {}
    for part in parts_of(bench):
        with torch.inference_mode():
            timing = watch.time(part.run)
        needed[part.name] = part.bytes
        times = {"eager_ms": timing.eager, "graph_ms": timing.graph, "limit_ms": part.bytes / bandwidth * 1000}
        session.found["timings"].append({**where, "part": part.name, **times, "why_eager": timing.reason})
    shared = sum(needed[name] for name in ("context rows", "scores of the vocabulary", "verify"))
    rounds = {
        "DSpine": (round_of(bench, bench.draft), shared + needed["block with injections"]),
        "DFlash": (round_of(bench, bench.plain), shared + needed["block, no injection"]),
        "plain step": (plain_step_of(bench), needed["plain step"]),
    }
    found = {
        name: {**where, "what": name, "ms": watch.host(run), "limit_ms": size / bandwidth * 1000}
        for name, (run, size) in rounds.items()
    }
    run_eagerly(bench)
    for name, (run, _) in rounds.items():
        found[name]["eager_ms"] = watch.host(run)
    session.found["rounds"] += found.values()
    session.say(f"{where['geometry']}, batch {bench.batch}: round {found['DSpine']['ms']:.3f} ms")


def measure_all(session: Session, bandwidth: float, dtype: torch.dtype) -> None:
    """Every geometry at every batch, as far as the time allows."""
    plan = session.plan
    watch = Stopwatch(session.device, plan.repetitions)
    for geometry in plan.geometries:
        if session.late(geometry.name):
            continue
        models, engines = build(geometry, session.device, dtype), FastGpu()
        session.say(f"built {geometry.name}")
        for batch in plan.batches:
            if not session.late(f"{geometry.name}, batch {batch}"):
                measure(session, watch, open_bench(models, engines, batch, plan.context), bandwidth)
        del models, engines  # before the next geometry takes its memory
        gc.collect()


def run(plan: Plan, device: torch.device) -> dict[str, Any]:
    """Do what the plan says, as far as the time allows."""
    session = Session(plan, device)
    check(session)
    bandwidth = Stopwatch(device, plan.repetitions).bandwidth()
    session.say(f"bandwidth {bandwidth / 1e12:.2f} TB/s")
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    measure_all(session, bandwidth, dtype)
    timings, rounds = session.found["timings"], session.found["rounds"]
    machine = asdict(look())
    versions = ", ".join(f"{name} {machine['packages'][name]}" for name in ("torch", "triton", "transformers"))
    return {
        "card": torch.cuda.get_device_name(device) if on_gpu else "a CPU",
        "rehearsal": not on_gpu,
        "about": f"Random weights in {dtype}, context of {plan.context} tokens, median of {plan.repetitions}, cold "
        f"cache; a large copy moves {bandwidth / 1e12:.2f} TB/s. Commit {commit()}; {versions}.",
        "bandwidth_bytes_per_second": bandwidth,
        "seconds": time.monotonic() - session.started,
        **session.found,
        "bars": bars(timings, rounds, plan.geometries[0].name),
        "speedups": speedups(timings),
        "skipped": session.skipped,
        "machine": machine,
    }


def main() -> int:
    """Run and write; 1 if a kernel was wrong, 2 if there is no device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="a toy geometry on the CPU, one repetition")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    arguments = parser.parse_args()
    if arguments.rehearse and arguments.out == RESULTS:
        parser.error("--rehearse measures nothing worth keeping; name another folder with --out")
    if not arguments.rehearse and not torch.cuda.is_available():
        print("there is no CUDA device here; --rehearse --out FOLDER tries the script without one", file=sys.stderr)
        return 2
    plan, device = (REHEARSAL, "cpu") if arguments.rehearse else (FULL, "cuda")
    torch.manual_seed(0)
    result = run(plan, torch.device(device))
    name = "gpu-" + "-".join(result["card"].lower().split())
    save(result, arguments.out / f"{name}.json")
    write_atomically(arguments.out / f"{name}.md", lambda path: path.write_text(page(result)))
    print(page(result))
    return int(not all(c["passed"] for c in result["checks"]))


if __name__ == "__main__":
    sys.exit(main())
