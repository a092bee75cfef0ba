"""From a `Reproduction` to files: figures that open without network, one report page, and the tables behind them.

The page opens with a card a claim, in the ledger's words; then a section an experiment, its first figure with one
sentence and everything else folded. Experiments come from the registry; the page knows none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

from plotly.offline import get_plotlyjs

from dspine_probe.experiments.common.claims import OUTCOMES, Claim
from dspine_probe.experiments.common.markup import listed
from dspine_probe.experiments.common.records import versions
from dspine_probe.experiments.registry import EXPERIMENTS
from dspine_probe.experiments.reproduction import Reproduction
from dspine_probe.plots.figure_block import FigureBlock, write_figure
from dspine_probe.plots.page import page, write_text

REPORT, HEADING = "report.html", "The findings on the shipped drafts"
FASTER = "faster"
_AGREE = {
    None: "",
    True: " The fast engine writes the same tokens as the readable loop in fp32.",
    False: " The fast engine and the readable loop DIFFER in fp32.",
}


def figure_blocks(found: Reproduction) -> dict[str, dict[str, FigureBlock]]:
    """The figures of every experiment by file name, sections in the order of their first claims."""
    claimed = dict.fromkeys(name for name, _ in found.claims())
    order = [*claimed, *(name for name in found.results if name not in claimed)]
    return {name: EXPERIMENTS[name].draw(found.results[name]) for name in order}


def lead(found: Reproduction) -> str | None:
    """The sentence that says whether a draft makes decoding faster; None if it was not measured."""
    for _, claim in found.claims():
        if claim.id == FASTER:
            said = f"Decoding with a draft is faster: {claim.verdict.effect}. {claim.here}."
            return said + _AGREE[found.engines_agree]
    return None


def write(found: Reproduction, folder: Path) -> tuple[Path, list[str]]:
    """Write tables, figures and the report into `folder`; returns the report's path and notes on what was left out."""
    found.save(folder)
    sections = figure_blocks(found)
    notes = {write_figure(folder / name, block) for blocks in sections.values() for name, block in blocks.items()}
    write_text(folder / REPORT, page(HEADING, f"<script>{get_plotlyjs()}</script>", "".join(_body(found, sections))))
    return folder / REPORT, [*sorted(note for note in notes if note), *found.left_out.values()]


def _body(found: Reproduction, sections: Mapping[str, Mapping[str, FigureBlock]]) -> Iterator[str]:
    yield f"<h1>{escape(HEADING)}</h1>\n"
    said = lead(found)
    if said:
        yield f'<p class="lead">{escape(said)}</p>\n'
    cards = "".join(_card(name, claim) for name, claim in found.claims())
    yield f'<div class="cards">{cards}</div>\n'
    first = 1
    for name, blocks in sections.items():
        yield _section(found, name, list(blocks.values()), first)
        first += len(blocks)
    yield f"<footer><p>{escape(_about(found))}</p></footer>\n"


def _card(name: str, claim: Claim) -> str:
    rows = {"paper": claim.paper, "here": claim.here}
    listed = "".join(f"<dt>{term}</dt><dd>{escape(text)}</dd>" for term, text in rows.items())
    return (
        f'<article class="card"><h2>{escape(claim.claim)}</h2><dl>{listed}<dt>verdict</dt>'
        f'<dd class="verdict">{escape(str(claim.verdict))}</dd></dl>'
        f'<a href="#{name}">{escape(claim.id)}: figure and controls</a></article>\n'
    )


def _section(found: Reproduction, name: str, blocks: list[FigureBlock], first: int) -> str:
    """An experiment: its first figure with one sentence; findings, controls, other figures and tables folded."""
    shown = ""
    if blocks:
        caption = f"<figcaption>{escape(blocks[0].sentence)}</figcaption>"
        shown = f"<h3>{escape(blocks[0].title)}</h3>\n<figure>{blocks[0].plot_html(first)}{caption}</figure>\n"
    folded = [_list("Findings", found.results[name].findings())]
    for owner, claim in found.claims():
        if owner == name:
            lines = [f"{one.name}: {one.outcome} ({OUTCOMES[one.passed]})" for one in claim.controls]
            folded.append(_list(f"Controls of {claim.id}", lines))
    for number, block in enumerate(blocks, start=first):
        words = f"<p>{escape(block.caption)}</p>\n<p>In words: {escape(block.alt)}</p>\n"
        if number == first:
            folded.append(f"{words}{block.table_html()}")
        else:
            folded.append(f"<h3>{escape(block.title)}</h3>\n{block.plot_html(number)}{words}{block.table_html()}")
    return (
        f'<section id="{name}"><h2>{escape(EXPERIMENTS[name].summary)}</h2>\n{shown}'
        f"<details><summary>Details</summary>\n{''.join(folded)}</details></section>\n"
    )


def _list(title: str, lines: list[str]) -> str:
    return f"<h3>{escape(title)}</h3>\n{listed(lines)}\n" if lines else ""


def _about(found: Reproduction) -> str:
    """What was measured, and how to read it."""
    used = versions()
    left = "".join(f" Left out: {why}" for why in found.left_out.values())
    return (
        f"dspine_probe {used['dspine_probe']}, torch {used['torch']}; measured in {found.seconds:.0f} seconds.{left} "
        "Parentheses hold 95 % intervals. These are small drafts of a small target; numbers of published models are "
        "their authors'."
    )
