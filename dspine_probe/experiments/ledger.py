"""The claims ledger: `docs/claims.md`, written from saved results and from nothing else.

Every result in a folder that an experiment of the registry made is loaded and asked for its `claims()`; what no result
speaks to is listed as not measured. The same results always give the same text, and other numbers give another.
Entry points: `collect`, `render`, `write_ledger`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.experiments.common.claims import OUTCOMES, PUBLISHED, Claim, Control, Published
from dspine_probe.experiments.registry import EXPERIMENTS
from dspine_probe.files import write_atomically

COMMAND = "dspine-probe ledger"
_INTRO = f"""# Claims ledger

What the DSpine publication (arXiv 2609.36173) claims, and what was measured here. The paper's numbers are its authors';
ours are on the embedded target and drafts hundreds of times smaller, trained on a CPU. They stand beside each other,
never in place of each other. Parentheses hold 95 % intervals. A verdict has three parts, by rules that are fixed in
[protocols.md](protocols.md): is the effect there, is it the claimed cause, is it as large as published. A control that
is "open" was reported without a bar to pass, or was not measured. Where several results speak to a claim, each has a
row; drafts with a number in their name, and what else is not shipped, are made by the commands in
[training.md](training.md). This file is written by `{COMMAND}` from `data/results/`; edit those, not this.
"""


@dataclass(frozen=True)
class Filed:
    """A claim and the result it was read from, relative to the folder of results."""

    claim: Claim
    source: str


def collect(folder: str | Path) -> list[Filed]:
    """The claims of every result of the registry in `folder` and below, by experiment, then path.

    Raises:
        UsageError: there is no such folder.
        ProbeError: a result is there but cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; give the one that holds saved results, such as data/results.")
    filed = []
    for experiment in EXPERIMENTS.values():
        kind = experiment.load_result_class()
        for record in sorted(folder.rglob(f"{kind.NAME}.json")):
            source = record.relative_to(folder).as_posix()
            try:
                claims = kind.load(record.parent).claims()
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                raise ProbeError(
                    f"{record} gives no claims ({type(error).__name__}: {error}); make it again."
                ) from error
            filed += [Filed(claim, source) for claim in claims]
    return filed


def render(filed: Sequence[Filed]) -> str:
    """The ledger as Markdown: one table of all claims, then each claim with its controls."""
    lines = [_INTRO, "| id | claim | paper | here | effect | specificity | size | controls |", "|" + "---|" * 8]
    for published in PUBLISHED:
        mine = [one.claim for one in filed if one.claim.id == published.id]
        if not mine:
            cells = (published.id, published.claim, published.paper, "not measured", "–", "–", "–", "–")
            lines.append(_row(cells))
        for number, c in enumerate(mine):
            said = ("", "", "") if number else (c.id, c.claim, c.paper)
            lines.append(_row((*said, c.here, *c.verdict, _tally(c.controls))))
    for published in PUBLISHED:
        lines += _section(published, [one for one in filed if one.claim.id == published.id])
    return "\n".join(lines) + "\n"


def write_ledger(results: str | Path, path: str | Path) -> list[Filed]:
    """Write the ledger of a folder of results to `path`; returns what went in."""
    filed = collect(results)
    text = render(filed)
    write_atomically(Path(path), lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return filed


def _section(published: Published, filed: Sequence[Filed]) -> list[str]:
    lines = ["", f"## {published.id}: {published.claim}", "", f"Paper: {published.paper}."]
    if not filed:
        return [*lines, "", "Here: not measured."]
    for one in filed:
        claim = one.claim
        lines += ["", f"Here: {claim.here}. Verdict: **{claim.verdict}**. "]
        lines[-1] += f"From `{one.source}`, made by `{claim.command}`."
        if claim.controls:
            lines += ["", "| control | outcome | |", "|---|---|---|"]
            lines += [_row((c.name, c.outcome, OUTCOMES[c.passed])) for c in claim.controls]
    return lines


def _tally(controls: Sequence[Control]) -> str:
    counts = {state: sum(control.passed is state for control in controls) for state in OUTCOMES}
    found = [f"{count} {OUTCOMES[state]}" for state, count in counts.items() if count]
    return ", ".join(found) or "none"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
