"""Acceptance lengths from the literature, to turn measured times into the speedups they would give.

None of them was measured here. Both scales are of Qwen3-8B at T = 0, averaged over seven benchmarks; they differ in the
budget the drafts were trained with and must not be mixed.
"""

SMALL_BUDGET = {"DFlash": 3.77, "DSpark": 4.32, "DFlash2": 4.39, "DSpine": 4.82}
"""arXiv 2609.36173, abstract: equal small budget."""

PUBLIC_WEIGHTS = {"DFlash": 5.92, "Domino": 7.05, "DSpark": 7.44, "DFlash2": 7.55}
"""Model card of the DSpine release: public weights. DSpine's own average was not in the excerpt we read."""

ACCEPTANCE = {"small budget (paper)": SMALL_BUDGET, "public weights (card)": PUBLIC_WEIGHTS}

# Which timed parts a draft's round consists of. The backbone is the same for all; DFlash2's convolutions are left out.
ROUNDS = {
    "DFlash": ("block, no injection", "scores of the vocabulary", "likeliest tokens"),
    "DSpine": ("block with injections", "scores of the vocabulary", "DSpine: candidates, cache, walk"),
    "DSpark": ("block, no injection", "scores of the vocabulary", "DSpark: Markov head"),
    "Domino": ("block, no injection", "scores of the vocabulary", "Domino: GRU head"),
    "DFlash2": ("block, no injection", "scores of the vocabulary", "DFlash2: selector"),
}
IN_EVERY_ROUND = ("context rows", "verify")
