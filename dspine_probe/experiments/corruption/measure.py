"""What does a wrong token cost the tokens drafted behind it: right behind it, and farther away?

The claim (arXiv 2609.36173): corrupting a slot's immediate predecessor costs its successor 31.8 points even when
everything earlier is perfect. Three protocols put it to the test (`protocols.py`); in the first the draft is
used as it was trained. Labels are the true token and the target's own choice in the corrupted text, which tells
following the predecessor from breaking. The same corruption is then applied in every round of a decode.

Answers are taken a few at a time: the target is re-run once on all their edited texts, then every draft is given all
conditions. Of the usual checklist for patching, Gaussian, mean and resample corruption are left out (tokens are
replaced by tokens), and so is putting a true token back into a corrupted past; the contrast must hold against every
place at once, by paired bootstrap intervals, in place of a correction and a sign-flip test. Entry point: `corruption`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

from dspine_probe.decoding.offline import simulate_rounds
from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.arena import Arena
from dspine_probe.experiments.common.progress import Progress, Ticker
from dspine_probe.experiments.common.records import draft_record, plain
from dspine_probe.experiments.common.request import Request
from dspine_probe.experiments.corruption.blocks import Replacements, prepare
from dspine_probe.experiments.corruption.config import FARTHEST, CorruptionConfig, CorruptionOptions
from dspine_probe.experiments.corruption.passes import CorruptionRunner
from dspine_probe.experiments.corruption.protocols import (
    CLEAN,
    A,
    AnchorProtocol,
    C,
    Cell,
    CorruptionProtocol,
    Fields,
    MessageProtocol,
    PrefixProtocol,
    Sheets,
)
from dspine_probe.experiments.corruption.replacements import (
    FREQUENCY,
    RANK_2,
    FrequencyBands,
    replacement_tokens,
    response_counts,
)
from dspine_probe.experiments.corruption.result import CorruptionResult
from dspine_probe.experiments.corruption.table import CorruptionTable, slot_text
from dspine_probe.experiments.probing.questions import refuse_misfit
from dspine_probe.hooks import HookedDraft
from dspine_probe.precision import Precision
from dspine_probe.target import Target


def run(request: Request, options: CorruptionOptions) -> CorruptionResult:
    """The experiment on what a command or the main job asks for.

    Raises:
        UsageError: as for `corruption`.
    """
    return corruption(
        request.drafts,
        request.target,
        request.arena,
        fine_tuned=options.fine_tuned,
        config=replace(CorruptionConfig.fast() if options.fast else CorruptionConfig(), seed=options.seed),
        precision=request.precision,
        on_progress=lambda _what, done, total: request.on_progress("corruption", done, total),
    )


def corruption(
    drafts: Mapping[str, Draft],
    target: Target,
    arena: Arena,
    *,
    fine_tuned: Mapping[str, Draft] | None = None,
    counts: Int[Tensor, "vocab"] | None = None,
    config: CorruptionConfig | None = None,
    precision: Precision | None = None,
    on_progress: Progress | None = None,
) -> CorruptionResult:
    """Measure what a wrong predecessor costs, against a wrong token farther back.

    Args:
        drafts: by name, made for the target and taps of the arena; hooked during the call.
        target: the one that answered the arena; it is re-run on edited texts.
        arena: held-out answers, two or more of each set.
        fine_tuned: drafts trained on visible prefixes, under the name of the draft each was made from (protocol B).
        counts: how often each token id occurs in text like the answers, for the kind "frequency"; by default in the
            responses of the shipped corpora.
        precision: of fp32 products; by default what is fastest here.
        on_progress: called with (what was done, steps done, steps in all).

    Raises:
        UsageError: drafts that do not fit the arena or each other, a set with fewer than two answers, answers too
            short for the farthest distance, a fine-tuned draft without its parent, or a corruption that equals the
            clean token.
        ProbeError: something changed although it was exchanged for itself.
    """
    config, fine_tuned = config or CorruptionConfig(), fine_tuned or {}
    precision, started = precision or Precision.resolve(device=target.device), time.perf_counter()
    if most := config.anchors_per_answer:  # spread evenly
        kept = [a[torch.linspace(0, len(a) - 1, min(most, len(a))).round().long()] for a in arena.anchors]
        arena = replace(arena, anchors=tuple(kept))
    mask_token = _check(drafts, fine_tuned, arena)
    by_set = [[i for i, name in enumerate(arena.sets) if name == wanted] for wanted in arena.set_names]
    decoded = sorted(i for members in by_set for i in members[: config.decoded_per_set])
    steps = -(-len(arena.order) // config.answers_per_batch) * (1 + len(drafts) + len(fine_tuned))
    tick, table = Ticker(on_progress, steps + 2 * len(drafts)), CorruptionTable(arena, config)
    with torch.no_grad(), precision.matmul():
        replacements = _replacements(target, arena, mask_token, counts, config)
        found, tried = _measure(drafts, fine_tuned, target, arena, replacements, config, tick)
        table.add_all(found)
        answers = [arena.answers[i] for i in decoded]
        for name, draft in drafts.items():
            rounds = {}
            for kind, shown in ((CLEAN, None), (RANK_2, [replacements[RANK_2][i] for i in decoded])):
                walked = simulate_rounds(draft, answers, anchor_override=shown)
                rounds[kind] = torch.tensor([len(one.anchors) for one in walked])
                tick(f"{name}: decoded with {kind} anchors")
            table.acceptance(name, arena, decoded, rounds)
    return CorruptionResult(
        table=table.rows.table(),
        config=plain(config) | precision.record(),
        drafts={name: draft_record(draft) for name, draft in drafts.items()},
        data={
            "arena": plain(arena.about),
            "answers": len(arena.answers),
            "blocks": len(arena.prompt),
            "decoded_answers": len(decoded),
            "headline_slots": {protocol: slot_text(slots) for protocol, slots in table.headline.items()},
            "fine_tuned": list(fine_tuned),
            "exchanged_for_itself": tried,
        },
        seconds=time.perf_counter() - started,
    )


def _replacements(
    target: Target, arena: Arena, mask_token: int, counts: Int[Tensor, "vocab"] | None, config: CorruptionConfig
) -> Replacements:
    bands = None
    if FREQUENCY in config.kinds:
        counts = response_counts(target.vocab_size) if counts is None else counts.clone()
        counts[[*target.stop_ids]] = 0  # an end is no word
        bands = FrequencyBands.of(counts)
    generator = derive_generator(config.seed, "frequency")
    found = [
        replacement_tokens(target, answer, config.kinds, mask_token=mask_token, bands=bands, generator=generator)
        for answer in arena.answers
    ]
    return {kind: [one[kind] for one in found] for kind in config.kinds}


def _measure(
    drafts: Mapping[str, Draft],
    fine_tuned: Mapping[str, Draft],
    target: Target,
    arena: Arena,
    replacements: Replacements,
    config: CorruptionConfig,
    tick: Ticker,
) -> tuple[dict[str, dict[Cell, Fields]], dict[str, int]]:
    """Every condition of every draft on all blocks, in the arena's order; and how many no-ops each draft passed."""
    found: dict[str, list[Sheets]] = {name: [] for name in drafts}
    tried = dict.fromkeys(drafts, 0)
    size = config.answers_per_batch
    later_slots = bool(fine_tuned) or any(draft.codes is not None for draft in drafts.values())
    with ExitStack() as stack:
        hooked, tuned = (
            {name: stack.enter_context(HookedDraft(draft)) for name, draft in some.items()}
            for some in (drafts, fine_tuned)
        )
        for index, batch in enumerate(arena.batches(answers_per_batch=size)):
            part = arena.order[index * size : (index + 1) * size]
            group = prepare(arena, part, batch, replacements, target, config, later_slots=later_slots)
            tick("target re-run on edited texts")

            def noise(protocol: str, index: int = index) -> torch.Generator | None:
                """The same for all drafts."""
                return derive_generator(config.seed, "noise", protocol, index) if config.noise else None

            for name, draft in hooked.items():
                sheets, runner = Sheets(len(group), arena.slots), CorruptionRunner(draft, group)
                protocols: list[CorruptionProtocol] = [AnchorProtocol(runner, config, sheets, noise(A))]
                if draft.draft.codes is not None:
                    protocols.append(MessageProtocol(runner, config, sheets, noise(C)))
                if name in tuned:
                    protocols.append(PrefixProtocol(CorruptionRunner(tuned[name], group), config, sheets))
                for protocol in protocols:
                    if index == 0:
                        tried[name] += protocol.check_no_op()
                    protocol.run()
                found[name].append(sheets)
                for _ in range(1 + (name in tuned)):
                    tick(f"{name}: corrupted")
    return {
        name: {key: torch.cat([sheets[key] for sheets in groups], dim=1) for key in groups[0]}
        for name, groups in found.items()
    }, tried


def _check(drafts: Mapping[str, Draft], fine_tuned: Mapping[str, Draft], arena: Arena) -> int:
    """The mask token of all drafts, which must fit the arena and each other."""
    if not drafts:
        raise UsageError("no draft was given; name one or more.")
    for name in fine_tuned:
        if name not in drafts:
            raise UsageError(
                f"the fine-tuned {name!r} has no parent among the drafts {list(drafts)}; give both one name."
            )
    for name, draft in [*drafts.items(), *fine_tuned.items()]:
        refuse_misfit(name, draft, arena)
    masks = {draft.config.mask_token_id for draft in (*drafts.values(), *fine_tuned.values())}
    if len(masks) > 1:
        raise UsageError(f"the drafts have different mask tokens {sorted(masks)}; compare drafts that share one.")
    for name in arena.set_names:
        if arena.sets.count(name) < 2:
            raise UsageError(
                f"the set {name!r} has 1 answer; intervals need two or more, so add one or leave the set out."
            )
    pairs = zip(arena.answers, arena.anchors, strict=True)
    reach = max(int(anchors.max()) + 1 - answer.prompt_length for answer, anchors in pairs)
    if reach < FARTHEST:
        raise UsageError(
            f"no answer has a token {FARTHEST} places before a successor; the longest way back is {reach}, so give "
            "longer answers or later anchors."
        )
    return masks.pop()
