"""Where in a draft does a prediction become readable: by depth, and by slot?

After every layer the state of every slot is read by a small trained reader (one linear translator a depth, shared by
all slots, before the frozen norm and head), and asked for the token that the target wrote there. Labels are matched
over slots (`readings.py`); readers never see a test prompt; intervals come from resampling whole prompts. Secondary
readers and controls stand beside it in the same table. What is readable need not be used: that takes an intervention.

Entry point: `emergence`. The settings are in `conditions.py`, the readers in `readers.py`, the result in `table.py`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformer_lens.utilities.statistics import derive_generator

from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.progress import Progress, Ticker
from dspine_probe.experiments.common.records import draft_record, plain
from dspine_probe.experiments.common.request import Request
from dspine_probe.experiments.common.splits import Split, split_prompts
from dspine_probe.experiments.emergence.conditions import DraftStudy, EmergenceConfig, steps
from dspine_probe.experiments.emergence.readings import TargetSequence, Window, choose_windows
from dspine_probe.experiments.emergence.table import EmergenceResult, LabelRanks, tabulate
from dspine_probe.precision import Precision


def run(request: Request, config: EmergenceConfig) -> EmergenceResult:
    """Readability in the drafts of a request, on the answers of its arena."""
    arena = request.arena
    return emergence(
        request.drafts,
        arena.answers,
        sets=arena.sets,
        config=config,
        precision=request.precision,
        on_progress=lambda _what, done, total: request.on_progress("emergence", done, total),
    )


def emergence(
    drafts: Mapping[str, Draft],
    sequences: Sequence[TargetSequence],
    *,
    sets: Sequence[str] | None = None,
    groups: Sequence[str] | None = None,
    config: EmergenceConfig | None = None,
    precision: Precision | None = None,
    on_progress: Progress | None = None,
) -> EmergenceResult:
    """Measure readability at every depth and slot of each draft, with all readers and controls.

    Args:
        drafts: drafts by name, of one block size and the same target. They are hooked for the time of the call.
        sequences: the target's greedy responses with its tapped states; none of them may have trained the drafts.
        sets: the set each sequence belongs to; results are averaged over sets. One set by default.
        groups: what must not be split between training and test; by default sequences with the same prompt.
        precision: of the products in which translators are trained; by default what is fastest here.
        on_progress: called with (what was done, steps done, steps in all).

    Raises:
        UsageError: the drafts differ in block size, or there are fewer than three prompts in a set.
    """
    config = config or EmergenceConfig()
    slots = _common_slots(drafts)
    precision = precision or Precision.resolve(device=next(iter(drafts.values())).fc.weight.device)
    started = time.perf_counter()
    windows = choose_windows(sequences, slots, config.labels_per_prompt, derive_generator(config.seed, "windows"))
    split = split_prompts(
        sequences,
        usable=[window.sequence for window in windows],
        sets=sets,
        groups=groups,
        train_share=config.train_share,
        validation_share=config.validation_share,
        generator=derive_generator(config.seed, "split"),
    )
    tick = Ticker(on_progress, sum(steps(draft, config) for draft in drafts.values()))
    measured: list[LabelRanks] = []
    # Translators are trained whatever mode the caller is in.
    with torch.inference_mode(False), torch.enable_grad(), precision.matmul():
        for name, draft in drafts.items():
            measured += DraftStudy(name, draft, sequences, split, config, precision, tick).all(windows)
    return EmergenceResult(
        table=tabulate(measured, split, config.resamples, config.seed),
        config=plain(config) | precision.record(),
        drafts={name: draft_record(draft) for name, draft in drafts.items()},
        data=_data(drafts, sequences, windows, split),
        seconds=time.perf_counter() - started,
    )


def _common_slots(drafts: Mapping[str, Draft]) -> int:
    widths = {name: draft.config.block_size for name, draft in drafts.items()}
    if len(set(widths.values())) != 1:
        raise UsageError(f"drafts to compare need one block size and have {widths}; give one or more of one size.")
    return next(iter(drafts.values())).config.num_slots


def _data(
    drafts: Mapping[str, Draft], sequences: Sequence[TargetSequence], windows: Sequence[Window], split: Split
) -> dict[str, Any]:
    """Counts that a reader of the result needs: prompts, labels, and the share of labels each draft can propose."""
    tested = [w for w in windows if bool(split.test(torch.tensor(w.sequence)))]
    labels = torch.cat([sequences[w.sequence].tokens[w.first_label :][: w.labels].long() for w in tested])
    coverage = {name: float((draft.to_index(labels) >= 0).double().mean()) for name, draft in drafts.items()}
    return split.summary() | {
        "sequences": len(sequences),
        "too_short": len(sequences) - len(windows),
        "test_labels": len(labels),
        "proposable": coverage,
    }
