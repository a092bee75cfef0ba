"""From a `Reproduction` to files: figures that open without network, one report page, and the tables behind them."""

from __future__ import annotations

from pathlib import Path

import torch

from dspine_probe.experiments.reproduction import Reproduction
from dspine_probe.experiments.results import versions
from dspine_probe.plots import acceptance as acceptance_plots
from dspine_probe.plots import corruption as corruption_plots
from dspine_probe.plots import emergence as emergence_plots
from dspine_probe.plots import injection_depth as injection_plots
from dspine_probe.plots import speed as speed_plots
from dspine_probe.plots.figure_block import FigureBlock, write_figure, write_report

REPORT = "report.html"


def figure_blocks(found: Reproduction) -> dict[str, FigureBlock]:
    """Every figure of the report by file name, in reading order."""
    blocks = {
        "emergence_heatmaps": emergence_plots.heatmaps(found.emergence),
        "emergence_slots": emergence_plots.slot_curves(found.emergence),
        "emergence_controls": emergence_plots.controls(found.emergence),
        "corruption_places": corruption_plots.places(found.corruption),
        "corruption_slots": corruption_plots.slots(found.corruption),
    }
    if found.injection is not None:
        blocks["injection_by_depth"] = injection_plots.by_depth(found.injection)
    return blocks | {
        "acceptance_by_set": acceptance_plots.bars(found.acceptance),
        "acceptance_by_slot": acceptance_plots.survival(found.acceptance),
        "speed": speed_plots.bars(found.speed),
    }


def write(found: Reproduction, folder: Path) -> tuple[Path, list[str]]:
    """Write tables, figures and the report into `folder`; returns the report's path and notes on what was left out."""
    found.save(folder)
    blocks = figure_blocks(found)
    notes = [note for name, block in blocks.items() if (note := write_figure(folder / name, block))]
    write_report(
        folder / REPORT,
        list(blocks.values()),
        heading="The findings on the shipped drafts",
        intro=_intro(found),
        points=found.findings(),
    )
    return folder / REPORT, sorted(set(notes))


def _intro(found: Reproduction) -> str:
    """What was measured, on what, and how to read it."""
    used = versions()
    setting = found.speed.config
    same = (
        "equal those of plain decoding" if found.speed.same_tokens else "DIFFER from those of plain decoding"
    )
    return " ".join(
        [
            f"Target {setting['target']} in fp32 on {setting['threads']} threads, torch {torch.__version__}, "
            f"dspine_probe {used['dspine_probe']}. Measured in {found.seconds:.0f} seconds.",
            f"All {len(found.speed.answers)} decoded answers {same}.",
            "These are small drafts of a small target; numbers of published models are their authors'.",
        ]
    )
