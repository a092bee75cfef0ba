"""What does a wrong token cost the tokens drafted behind it: right behind it, and farther away?

The claim (arXiv 2609.36173): corrupting a slot's immediate predecessor costs its successor 31.8 points even when
everything earlier is perfect. Three protocols put it to the test (`protocols.py`); in the first the draft is
used as it was trained. Labels are the true token and the target's own answer to the corrupted text, which tells
following the predecessor from breaking. The same corruption is then applied in every round of a decode.

Entry point: `corruption`. The result type is in `result.py`, its columns in `table.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

from dspine_probe.drafts import Draft, DSpine
from dspine_probe.errors import UsageError
from dspine_probe.experiments.arena import Arena
from dspine_probe.experiments.contrast import Draws
from dspine_probe.experiments.corruption.config import CorruptionConfig
from dspine_probe.experiments.corruption.protocols import CLEAN, TOKEN, A, B, C
from dspine_probe.experiments.corruption.result import CorruptionResult
from dspine_probe.experiments.corruption.run import CorruptionRun, StandIns
from dspine_probe.experiments.corruption.scores import Fields, Key
from dspine_probe.experiments.corruption.substitutes import (
    FREQUENCY,
    RANK_2,
    FrequencyBands,
    response_counts,
    substitutes,
)
from dspine_probe.experiments.corruption.table import PREDECESSOR, Row, Tabulator, acceptance_rows
from dspine_probe.experiments.progress import Progress
from dspine_probe.experiments.results import draft_record, plain
from dspine_probe.precision import fast_matmul
from dspine_probe.target import Target

_SKIPPED = {
    "Gaussian, mean and resample corruption": "tokens are replaced by tokens; mask, zero and noise stand beside them",
    "both directions": "a true token was not put back into a corrupted past",
    "correction for several places": "the contrast of t−1 must hold against every place at once",
    "sign-flip test": "paired bootstrap intervals over prompts take its place",
}


def corruption(
    drafts: Mapping[str, Draft],
    target: Target,
    arena: Arena,
    *,
    fine_tuned: Mapping[str, Draft] | None = None,
    counts: Int[Tensor, "vocab"] | None = None,
    config: CorruptionConfig | None = None,
    on_step: Progress | None = None,
) -> CorruptionResult:
    """Measure what a wrong predecessor costs, against a wrong token farther back.

    Args:
        drafts: by name, several seeds or kinds, made for the target and taps of the arena; hooked during the call.
        target: the one that answered the arena; it is re-run on edited texts.
        arena: held-out answers, two or more of each set.
        fine_tuned: drafts trained on visible prefixes, under the name of the draft each was made from (protocol B).
        counts: how often each token id occurs in text like the answers, for the kind "frequency"; by default in the
            responses of the shipped corpora.
        on_step: called with (what was done, steps done, steps in all).

    Raises:
        UsageError: drafts that do not fit the arena or each other, a set with fewer than two answers, a distance that
            leads out of every answer, a fine-tuned draft without its parent, or a corruption that equals the clean
            token.
        ProbeError: something changed although it was exchanged for itself.
    """
    config, fine_tuned = config or CorruptionConfig(), fine_tuned or {}
    started = time.perf_counter()
    arena = _thinned(arena, config.anchors_per_answer)
    mask_token = _common_mask(drafts, fine_tuned, arena)
    _refuse_arena(arena, config.farthest)
    walked = _walked(arena, config.walked_per_set)
    with torch.no_grad(), nullcontext() if config.precise else fast_matmul():
        stand_ins = _stand_ins(target, arena, mask_token, counts, config)
        run = CorruptionRun(drafts, fine_tuned, target, arena, stand_ins, config, on_step)
        found, rounds = run.measure(), run.decode(walked)
    tabulator = Tabulator(
        Draws.of(arena, seed=config.seed, resamples=config.resamples), arena.slots, config.farthest
    )
    rows = [*_rows(tabulator, found), *_decode_rows(_part(arena, walked), rounds, config)]
    return CorruptionResult(
        table=pd.DataFrame(rows),
        config=plain(config),
        drafts={name: draft_record(draft) for name, draft in drafts.items()},
        data=_data(arena, walked, tabulator, run) | {"fine_tuned": list(fine_tuned)},
        checks=run.checks,
        skipped=_SKIPPED | _left_out(drafts, fine_tuned, config),
        seconds=time.perf_counter() - started,
    )


# ---- what is measured on


def _thinned(arena: Arena, most: int | None) -> Arena:
    """The arena with at most so many anchors an answer, spread evenly."""
    if most is None:
        return arena
    kept = [a[torch.linspace(0, len(a) - 1, min(most, len(a))).round().long()] for a in arena.anchors]
    return replace(arena, anchors=tuple(kept))


def _walked(arena: Arena, most: int | None) -> list[int]:
    """The answers that are decoded: the first few of every set."""
    by_set = [[i for i, name in enumerate(arena.sets) if name == wanted] for wanted in arena.set_names]
    return sorted(i for members in by_set for i in members[:most])


def _part(arena: Arena, answers: Sequence[int]) -> Arena:
    return replace(
        arena,
        answers=tuple(arena.answers[i] for i in answers),
        sets=tuple(arena.sets[i] for i in answers),
        anchors=tuple(arena.anchors[i] for i in answers),
    )


def _stand_ins(
    target: Target,
    arena: Arena,
    mask_token: int,
    counts: Int[Tensor, "vocab"] | None,
    config: CorruptionConfig,
) -> StandIns:
    bands = None
    if FREQUENCY in config.kinds:
        counts = response_counts(target.vocab_size) if counts is None else counts.clone()
        counts[[*target.stop_ids]] = 0  # an end is no word
        bands = FrequencyBands.of(counts)
    generator = derive_generator(config.seed, "frequency")
    found = [
        substitutes(target, answer, config.kinds, mask_token=mask_token, bands=bands, generator=generator)
        for answer in arena.answers
    ]
    return {kind: [one[kind] for one in found] for kind in config.kinds}


# ---- tables and records


def _rows(tabulator: Tabulator, found: Mapping[str, Mapping[Key, Fields]]) -> Iterator[Row]:
    names = list(found)
    for name, conditions in found.items():
        for key, fields in conditions.items():
            yield from tabulator.condition(name, key, fields)
        yield from tabulator.contrasts(name, conditions)
        alone = Key(B, "none", TOKEN, CLEAN)
        if alone in conditions:
            parent = conditions[Key(A, PREDECESSOR, TOKEN, RANK_2)]
            yield from tabulator.parent(name, alone, conditions[alone], parent)
    for name in names[1:]:
        yield from tabulator.between(name, names[0], found[name], found[names[0]])


def _decode_rows(
    walked: Arena, rounds: Mapping[str, Mapping[str, Tensor]], config: CorruptionConfig
) -> Iterator[Row]:
    draws = Draws.of(walked, seed=config.seed, resamples=config.resamples)
    for name, needed in rounds.items():
        yield from acceptance_rows(name, walked, draws, needed, walked.slots)


def _data(arena: Arena, walked: Sequence[int], tabulator: Tabulator, run: CorruptionRun) -> dict[str, Any]:
    counted = {
        "answers": len(arena.answers),
        "blocks": len(arena.prompt),
        "walked_answers": len(walked),
        "headline_slots": {protocol: list(tabulator.headline(protocol)) for protocol in (A, B, C)},
        "rerun_unedited": run.reruns,
    }
    return {"arena": plain(arena.about)} | counted


def _left_out(
    drafts: Mapping[str, Draft], fine_tuned: Mapping[str, Draft], config: CorruptionConfig
) -> dict[str, str]:
    """Parts of the experiment that this run could not or was told not to do."""
    reasons = {}
    if not fine_tuned:
        reasons["protocol B"] = "no draft trained on visible prefixes was given"
    if not any(isinstance(draft, DSpine) for draft in drafts.values()):
        reasons["protocol C"] = "no DSpine was given"
    if not config.noise:
        reasons["norm-matched noise"] = "left out by the configuration"
    return reasons


# ---- refusals


def _common_mask(drafts: Mapping[str, Draft], fine_tuned: Mapping[str, Draft], arena: Arena) -> int:
    """The mask token of all drafts, which must be made for the arena's blocks and taps."""
    if not drafts:
        raise UsageError("no draft was given; name one or more.")
    orphans = [name for name in fine_tuned if name not in drafts]
    if orphans:
        raise UsageError(
            f"the fine-tuned {orphans[0]!r} has no parent among the drafts {list(drafts)}; give both one name."
        )
    taps = list(arena.about["taps"])
    for name, draft in [*drafts.items(), *fine_tuned.items()]:
        config = draft.config
        if list(config.target_layer_ids) != taps or config.num_slots != arena.slots:
            raise UsageError(
                f"{name!r} reads taps {list(config.target_layer_ids)} and drafts {config.num_slots} slots, but the "
                f"arena holds taps {taps} and blocks of {arena.slots}; build an arena for this draft."
            )
    masks = {draft.config.mask_token_id for draft in (*drafts.values(), *fine_tuned.values())}
    if len(masks) > 1:
        raise UsageError(
            f"the drafts have different mask tokens {sorted(masks)}; compare drafts that share one."
        )
    return masks.pop()


def _refuse_arena(arena: Arena, farthest: int) -> None:
    for name in arena.set_names:
        count = arena.sets.count(name)
        if count < 2:
            raise UsageError(
                f"the set {name!r} has {count} answer; intervals need two or more, so add one or leave the set out."
            )
    pairs = zip(arena.answers, arena.anchors, strict=True)
    reach = max(int(anchors.max()) + 1 - answer.prompt_length for answer, anchors in pairs)
    if farthest > reach:
        raise UsageError(
            f"no answer has a token {farthest} places before a successor; the longest way back is {reach}, so give "
            f"distances up to that."
        )
