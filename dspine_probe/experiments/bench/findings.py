"""What a bench says in words: speedups beside what was predicted, where the time goes, and whether injecting pays.

A draft that costs δ more time a round than another pays if it commits more by a larger share:
ΔAL / AL > δ / (t_verify + t_draft). Every sentence is computed from the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.experiments.bench.costs import PassCosts
from dspine_probe.experiments.bench.result import ALL, PARTS, PLAIN, BenchResult, spoken
from dspine_probe.experiments.claim import Claim
from dspine_probe.experiments.stats import Estimate
from dspine_probe.sampling import GREEDY

COMMAND = "dspine-probe probe speed"
ACCOUNTED = 0.92
"""Share of the predicted speedup below which the passes do not account for the time measured."""


def findings(result: BenchResult) -> Iterator[str]:
    """Sentences for and against."""
    greedy = [run for run in result.runs if run.draft != PLAIN and run.same_as_plain is not None]
    if greedy:
        same = sum(bool(run.same_as_plain) for run in greedy)
        yield f"{same} of {len(greedy)} batches decoded greedily with a draft have the tokens of plain decoding."
    table = result.to_frame()
    whole = table[(table["set"] == ALL) & (table["draft"] != PLAIN)]
    for _, row in whole[whole["rows"] == result.rows[0]].iterrows():
        shares = ", ".join(f"{part} {100 * row[f'{part}_share']:.0f}" for part in PARTS)
        speedup = Estimate(*(torch.tensor(row[f"speedup{end}"]) for end in ("", "_low", "_high")))
        yield (
            f"{row['draft']}, {row['sampling']}, {row['rows']} at once: {row['acceptance_length']:.2f} tokens a round, "
            f"{_show(speedup)} times plain decoding, {row['measured_over_predicted']:.2f} of the "
            f"{row['predicted_speedup']:.2f} predicted from its passes; time by part, %: {shares}."
        )
    for (draft, sampling), part in whole.groupby(["draft", "sampling"], sort=False):
        if len(part) > 1:
            curve = ", ".join(f"{r['rows']}: {r['speedup']:.2f}" for _, r in part.iterrows())
            yield f"{draft}, {sampling}, times plain decoding by prompts at once: {curve}."
    for claim in claims(result):
        yield claim.here


def claims(result: BenchResult) -> Iterator[Claim]:
    """What the injections cost, for the first DFlash and the first DSpine, greedy, with the fewest rows."""
    rows = result.rows[0]
    costs = {kind: _costs_of(result, kind, rows) for kind in (DFLASH, DSPINE)}
    flash, spine = costs[DFLASH], costs[DSPINE]
    if flash is None or spine is None:
        return
    lengths = {c.draft: result.acceptance_length(c.draft, GREEDY, rows) for c in (flash, spine)}
    longer = float(lengths[spine.draft].value / lengths[flash.draft].value) - 1
    extra = spine.trunk - flash.trunk
    here = (
        f"the block of {spine.draft} takes {1000 * spine.trunk:.2f} ms, that of {flash.draft} {1000 * flash.trunk:.2f} "
        f"({1000 * extra:+.2f} ms, {100 * extra / flash.round:+.1f} % of a round of {flash.draft}, for "
        f"{100 * longer:+.1f} % tokens a round; {_setting(result, rows)})"
    )
    ratio = float(result.speedup(spine.draft, GREEDY, rows).value) / result.predicted(
        spine.draft, GREEDY, rows
    )
    controls = [
        ("greedy answers are those of plain decoding", str(result.same_tokens).lower(), result.same_tokens),
        ("the passes account for the time", f"{ratio:.2f} of the predicted speedup", ratio >= ACCOUNTED),
        ("AL", ", ".join(f"{name} {_show(found)}" for name, found in lengths.items()), None),
    ]
    yield Claim.on("speed", here=here, controls=controls, holds=longer > extra / flash.round, command=COMMAND)


def _costs_of(result: BenchResult, architecture: str, rows: int) -> PassCosts | None:
    kinds = result.config.get("drafts", {})
    found = [c for c in result.costs if (c.sampling, c.rows) == (GREEDY, rows)]
    return next((c for c in found if kinds.get(c.draft) == architecture), None)


def _setting(result: BenchResult, rows: int) -> str:
    config = result.config
    return f"{rows} at once, {config['dtype']}, {config['device']}, {config['threads']} threads, {spoken(config)}"


def _show(found: Estimate) -> str:
    value, low, high = (float(end) for end in (found.value, found.low, found.high))
    return f"{value:.2f}" if math.isnan(low) else f"{value:.2f} ({low:.2f}–{high:.2f})"
