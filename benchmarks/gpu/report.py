"""From measurements to bars, simulated speedups and a page of tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.published import ACCEPTANCE, IN_EVERY_ROUND, ROUNDS

Rows = list[dict[str, Any]]

FIVE_INJECTIONS_MS = 0.15
ROUND_MS = 7.14
OVER_LIMIT = 1.3
CACHE_OVER_SERIAL = 0.5


def best_ms(row: Mapping[str, Any]) -> float:
    """Milliseconds as deployed: the graph's where there is one."""
    return row["eager_ms"] if row["graph_ms"] is None else row["graph_ms"]


def by_part(timings: Rows, geometry: str, batch: int) -> dict[str, dict[str, Any]]:
    """The rows of one geometry and batch, by name of the part."""
    return {r["part"]: r for r in timings if r["geometry"] == geometry and r["batch"] == batch}


def bars(timings: Rows, rounds: Rows, geometry: str) -> Rows:
    """The bars at batch 1 of the large geometry; a bar whose parts were not timed is left out."""
    parts = by_part(timings, geometry, 1)
    whole = next((r for r in rounds if (r["geometry"], r["batch"], r["what"]) == (geometry, 1, "DSpine")), None)
    found = []

    def add(name: str, value: float, limit: float) -> None:
        found.append({"bar": name, "measured": value, "limit": limit, "holds": value <= limit})

    if "injections alone" in parts:
        added = best_ms(parts["block with injections"]) - best_ms(parts["block, no injection"])
        add("ms that the injections add to the block's pass", added, FIVE_INJECTIONS_MS)
        add("ms of the injections alone", best_ms(parts["injections alone"]), FIVE_INJECTIONS_MS)
    if "DFlash2: selector" in parts:
        serial = min(best_ms(parts[name]) for name in ("DSpark: Markov head", "Domino: GRU head"))
        ratio = best_ms(parts["DSpine: candidates, cache, walk"]) / serial
        add("candidates, cache and walk over the better serial head", ratio, CACHE_OVER_SERIAL)
    if whole is not None:
        add("ms of a whole round", whole["ms"], ROUND_MS)
        add("whole round over its bytes at the measured bandwidth", whole["ms"] / whole["limit_ms"], OVER_LIMIT)
    return found


def speedups(timings: Rows) -> Rows:
    """AL · t_plain / t_round by draft, with published acceptance lengths and the sum of the measured parts."""
    found = []
    for geometry, batch in dict.fromkeys((r["geometry"], r["batch"]) for r in timings):
        parts = by_part(timings, geometry, batch)
        if not {"plain step", *IN_EVERY_ROUND} <= parts.keys():
            continue
        plain = best_ms(parts["plain step"])
        for draft, own in ROUNDS.items():
            ms = sum(best_ms(parts[name]) for name in (*IN_EVERY_ROUND, *own))
            row = {"geometry": geometry, "batch": batch, "draft": draft, "round_ms": ms, "plain_ms": plain}
            for scale, lengths in ACCEPTANCE.items():
                row[scale] = lengths[draft] * plain / ms if draft in lengths else None
            found.append(row)
    return found


def page(result: Mapping[str, Any]) -> str:
    """The whole result as Markdown."""
    title = f"# GPU decoding on {result['card']}\n"
    warning = "\n**A rehearsal on a CPU: the script works; the times mean nothing.**\n"
    blocks = [
        title + (warning if result["rehearsal"] else ""),
        f"{result['about']}\n",
        "## Kernels against float64\n",
        table(result["checks"]),
        "## Bars\n",
        table(result["bars"]) or "Nothing was timed at the geometry of the bars.\n",
        "## Whole rounds, the host's wait included\n",
        table(result["rounds"]),
        "## Parts\n\n`limit_ms` is the bytes a part cannot do without over the measured bandwidth.\n",
        table([{k: v for k, v in row.items() if k != "why_eager"} for row in result["timings"]]),
        *(f"Not captured: {reason}.\n" for reason in _reasons(result["timings"])),
        "## Simulated speedup over plain decoding\n\nMeasured times with acceptance lengths from the literature "
        "(Qwen3-8B, T = 0; see `benchmarks/gpu/published.py`); none of the acceptance lengths was measured here.\n",
        table(result["speedups"]),
    ]
    if result["skipped"]:
        blocks += ["## Not done\n", *(f"- {line}\n" for line in result["skipped"])]
    return "\n".join(blocks)


def _reasons(timings: Rows) -> list[str]:
    return list(dict.fromkeys(row["why_eager"] for row in timings if row["why_eager"]))


def table(rows: Rows) -> str:
    """Rows as a Markdown table, numbers with four digits."""
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(_cell(row.get(name)) for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
