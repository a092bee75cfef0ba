"""Figure of the joint experiment: what a code is worth by the depth at which it enters, in each reading."""

from __future__ import annotations

import pandas as pd

from dspine_probe.experiments.injection_depth.injectors import NOISE, TRANSFER
from dspine_probe.experiments.joint_injection.objective import ALL_SLOTS, ONE_SLOT
from dspine_probe.experiments.joint_injection.table import ACCURACY, GUESS, WRONG, JointInjectionResult
from dspine_probe.plots.figure_block import FigureBlock
from dspine_probe.plots.panels import floors, panels
from dspine_probe.plots.style import layout

_SERIES = {
    "true codes, seen by all slots": (ALL_SLOTS, TRANSFER, None),
    "true codes, seen by their slot alone": (ONE_SLOT, TRANSFER, None),
    "the draft's own guesses": (ALL_SLOTS, TRANSFER, GUESS),
    "the target's second choices": (ALL_SLOTS, TRANSFER, WRONG),
    "trained and read with noise": (ALL_SLOTS, NOISE, None),
}


def by_depth(result: JointInjectionResult) -> FigureBlock:
    """Accuracy of slots 2…T over the depth of injection."""
    rows = pd.concat(result.curve(*wanted).assign(series=name) for name, wanted in _SERIES.items())
    figure = panels(rows, by="series", x="depth", scale=100, column=None)
    plain = result.select(metric=ACCURACY, depth=None)
    plain = plain[plain["slot"].str.contains("-")]
    if len(plain):
        floors(
            figure,
            pd.DataFrame({"mean": [plain["mean"].mean()], "by": ["no injection"]}),
            by="by",
            column=None,
            scale=100,
        )
    figure.update_xaxes(title_text="depth of injection (0 = block embedding)", dtick=1)
    figure.update_yaxes(title_text="top-1 accuracy, mean of slots 2…T, %")
    seeds = result.table["condition"].str.rsplit(" | ", n=1).str[-1].nunique()
    return FigureBlock(
        layout(figure, height=480),
        "A code injected early or late, in a draft trained to use it",
        "A causal DFlash and an injector at one depth, trained together from the warm start. Bars: 95 % intervals over "
        f"{seeds} training seeds and held-out sequences. n = {result.data['blocks']:,} blocks.",
        " ".join(result.findings()),
        rows,
    )
