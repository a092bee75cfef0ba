import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.gpu import run

    return run


def test_the_script_runs_from_end_to_end_and_says_that_it_was_a_rehearsal(tmp_path: Path):
    command = [sys.executable, "-m", "benchmarks.gpu.run", "--rehearse", "--out", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    result = json.loads((tmp_path / "gpu-a-cpu.json").read_text())
    page = (tmp_path / "gpu-a-cpu.md").read_text()
    assert result["rehearsal"] and "A rehearsal on a CPU" in page and page in ran.stdout
    assert result["skipped"] == []
    assert all(check["passed"] for check in result["checks"])
    timed = {(row["batch"], row["part"]) for row in result["timings"]}
    assert len(timed) == len(result["timings"]) == 2 * 16
    assert all(row["eager_ms"] > 0 and row["graph_ms"] is None for row in result["timings"])
    assert all("CUDA" in row["why_eager"] and row["limit_ms"] > 0 for row in result["timings"])
    assert {row["what"] for row in result["rounds"]} == {"DSpine", "DFlash", "plain step"}
    assert all(row["ms"] > 0 and row["eager_ms"] > 0 for row in result["rounds"])
    assert len(result["bars"]) == 5
    assert result["machine"]["packages"]["torch"]


def test_a_speedup_is_acceptance_length_times_plain_step_over_round(script):
    from benchmarks.gpu.published import IN_EVERY_ROUND, ROUNDS, SMALL_BUDGET
    from benchmarks.gpu.report import speedups

    names = {"plain step", *IN_EVERY_ROUND, *(name for parts in ROUNDS.values() for name in parts)}
    times = {name: 1.0 + place for place, name in enumerate(sorted(names))}
    rows = [
        {"geometry": "g", "batch": 2, "part": name, "eager_ms": 100.0, "graph_ms": ms} for name, ms in times.items()
    ]
    made = {row["draft"]: row for row in speedups(rows)}
    parts = (*IN_EVERY_ROUND, *ROUNDS["DSpine"])
    assert made["DSpine"]["round_ms"] == sum(times[name] for name in parts)
    expected = SMALL_BUDGET["DSpine"] * times["plain step"] / made["DSpine"]["round_ms"]
    assert made["DSpine"]["small budget (paper)"] == pytest.approx(expected)
    assert made["Domino"]["small budget (paper)"] is None
    assert speedups(rows[1:2]) == []


def test_bars_can_fail_and_are_left_out_when_nothing_was_timed(script):
    from benchmarks.gpu.report import bars, page

    assert bars([], [], "g") == []
    slow = [{"geometry": "g", "batch": 1, "what": "DSpine", "ms": 9.0, "limit_ms": 8.0}]
    assert [(bar["measured"], bar["holds"]) for bar in bars([], slow, "g")] == [(9.0, False), (9 / 8, True)]
    empty = {name: [] for name in ("checks", "rounds", "timings", "speedups", "skipped")}
    text = page({"card": "c", "rehearsal": False, "about": "", **empty, "bars": bars([], slow, "g")})
    assert "rehearsal" not in text and "| ms of a whole round | 9 | 7.14 | NO |" in text


def test_when_the_time_is_up_what_is_left_is_named(script):
    plan = replace(script.REHEARSAL, seconds=0.0)
    result = script.run(plan, torch.device("cpu"))
    assert result["timings"] == [] and result["checks"] == []
    assert result["skipped"] == ["checks at odd: the time was up", "tiny: the time was up"]


def test_without_a_device_only_a_rehearsal_elsewhere_than_in_the_results_is_taken(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run", "--rehearse"])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert "name another folder with --out" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["run"])
    assert script.main() == 2
    assert "there is no CUDA device here" in capsys.readouterr().err


@torch.inference_mode()
def test_the_bytes_of_a_part_are_those_of_the_weights_it_reads(script):
    from benchmarks.gpu.models import TINY, build
    from benchmarks.gpu.parts import open_bench, parts_of
    from dspine_probe.decoding.fast_gpu import FastGpu

    bench = open_bench(build(TINY, torch.device("cpu"), torch.float32), FastGpu(), 2, context=12)
    needed = {part.name: part.bytes for part in parts_of(bench)}
    model, draft = bench.models.target.model, bench.models.draft
    weights = sum(p.numel() for n, p in model.named_parameters() if "embed" not in n)
    context = 2 * 12 * 2 * TINY.layers * TINY.kv_heads * TINY.d_head
    norms = TINY.d_model + 2 * TINY.layers * TINY.d_head  # of the end and of heads, which are not counted
    assert needed["verify"] == 4 * (weights + model.lm_head.weight.numel() + context - norms)
    read = TINY.draft_layers * (TINY.rank + 3 * TINY.message) * TINY.d_model
    assert needed["injections alone"] == 4 * (read + TINY.draft_layers * TINY.message * TINY.d_model)
    assert needed["block with injections"] - needed["block, no injection"] == needed["injections alone"]
    assert needed["scores of the vocabulary"] == 4 * draft.head.numel()
