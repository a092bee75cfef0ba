"""What can be read linearly from a draft's residual stream, by depth and slot, beyond what a probe brings itself?

Every question is asked at every depth with one logistic regression for all slots, on several splits of whole prompts.
Beside each stand: a control task (a random class for every anchor token type), the same probe on an untrained draft,
the slot index alone, the commonest class alone, and test rows whose anchor type no probe was trained on. For some
questions the description length is measured too, which does not depend on one size of training set. What is decodable
is not thereby used. Entry point: `probing`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.arena import Arena
from dspine_probe.experiments.common.intervals import RESAMPLES, Draws
from dspine_probe.experiments.common.linear_probe import (
    UNASKED,
    Parts,
    ProbeConfig,
    control_labels,
    fit_probe,
    online_bits,
    split_groups,
)
from dspine_probe.experiments.common.progress import Progress, Ticker
from dspine_probe.experiments.common.records import plain
from dspine_probe.experiments.common.request import Request, option
from dspine_probe.experiments.common.rows import RowBuilder
from dspine_probe.experiments.emergence.controls import untrained
from dspine_probe.experiments.probing.questions import ACCEPTED, OWN, QUESTIONS, Asked, ask, read_rows
from dspine_probe.experiments.probing.table import (
    ACCURACY,
    BITS,
    COMMONEST,
    CONTROL,
    SLOT_ALONE,
    TRAINED,
    UNSEEN,
    UNTRAINED,
    Key,
    Measurements,
    ProbingResult,
    add_rows,
)

SKIPPED = {
    "shuffled labels": "the control task asks for more: a label that is fixed for every anchor type",
    "intervention": "decodable is all that is claimed; gates and corruption intervene",
    "peak over depths": "depths are reported side by side; none is claimed to be the best",
}


@dataclass(frozen=True)
class ProbingConfig:
    """Sizes and seeds. Shares are of prompts; what is neither trained on nor chosen on is tested.

    described: questions whose description length is measured as well.
    classes: tokens are asked for among that many commonest ones of the training prompts.
    types_held_out: share of anchor token types that no probe is trained on.
    repeats: splits, each with its own subsample and control task; five or more.
    """

    questions: tuple[str, ...] = QUESTIONS
    described: tuple[str, ...] = (OWN, ACCEPTED)
    classes: int = option(24, "Among how many of the commonest tokens a probe is asked.", min=2)
    types_held_out: float = 0.2
    train_share: float = 0.5
    validation_share: float = 0.15
    repeats: int = option(5, "Splits into training, validation and test prompts.", min=5)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    resamples: int = RESAMPLES
    seed: int = 0

    def __post_init__(self) -> None:
        if self.repeats < 5:
            raise UsageError(f"{self.repeats} repeats do not show how results vary with the split; give five or more.")
        unknown = [one for one in (*self.questions, *self.described) if one not in QUESTIONS]
        if unknown or not self.questions:
            raise UsageError(f"there are no questions {unknown}; choose from {', '.join(QUESTIONS)}.")


def run(request: Request, config: ProbingConfig) -> ProbingResult:
    """Probe the drafts of a request on its arena."""
    return probing(request.drafts, request.arena, config=config, on_progress=request.on_progress)


def probing(
    drafts: Mapping[str, Draft],
    arena: Arena,
    *,
    config: ProbingConfig | None = None,
    on_progress: Progress | None = None,
) -> ProbingResult:
    """Ask every question at every depth of each draft, with all controls.

    Args:
        drafts: by name.
        arena: held-out blocks with the taps these drafts read; three prompts or more of each set.
        on_progress: called with (draft, fits done, fits in all).

    Raises:
        UsageError: no draft, an arena that does not fit, or too few prompts for three parts.
        ProbeError: a probe converged at no penalty.
    """
    config, began = config or ProbingConfig(), time.perf_counter()
    if not drafts:
        raise UsageError("there is no draft to probe; give at least one.")
    draws = Draws.of(arena, seed=config.seed, resamples=config.resamples)
    rows, found = RowBuilder(ProbingResult.FACTORS), dict[str, Measurements]()
    for name, draft in drafts.items():
        found[name] = _Study(name, draft, arena, config, on_progress).run()
        add_rows(rows, name, found[name], draws)
    return ProbingResult(
        table=rows.table(),
        config=plain(config),
        drafts={name: draft.config.to_dict() for name, draft in drafts.items()},
        data={"answers": len(arena.answers), **arena.about},
        coverage={name: {q: sum(s) / len(s) for q, s in one.coverage.items()} for name, one in found.items()},
        fits=[{"draft": name} | fit for name, one in found.items() for fit in one.fits],
        failed_codes=sum(one.failed_codes for one in found.values()),
        skipped=SKIPPED,
        seconds=time.perf_counter() - began,
    )


class _Study:
    """All probes of one draft."""

    def __init__(
        self, name: str, draft: Draft, arena: Arena, config: ProbingConfig, on_progress: Progress | None
    ) -> None:
        self.name, self.config = name, config
        self.rows = read_rows(draft, arena)
        fresh = untrained(draft, derive_generator(config.seed, "untrained draft"))
        self.fresh = read_rows(fresh, arena).states
        self.prompt, self.set_index = arena.prompt, arena.set_index
        self.found = Measurements()
        fits = config.repeats * len(config.questions) * (3 * len(self.rows.states) + 1)
        self.tick = Ticker(on_progress, fits)

    def run(self) -> Measurements:
        for repeat in range(self.config.repeats):
            parts = split_groups(
                self.prompt,
                train_share=self.config.train_share,
                validation_share=self.config.validation_share,
                stratum=self.set_index,
                generator=self._generator("split", repeat),
            )
            for question in self.config.questions:
                asked = ask(question, self.rows, parts.train, self.config.classes)
                self._probe(question, asked, parts, repeat)
        return self.found

    def _probe(self, question: str, asked: Asked, parts: Parts, repeat: int) -> None:
        slots = self.rows.states.shape[2]
        flat, types = parts.repeat(slots), self.rows.tokens[:, :1].expand(-1, slots).flatten()
        kinds = types.unique()
        shuffled = kinds[torch.randperm(len(kinds), generator=self._generator("held-out types", repeat))]
        held = torch.isin(types, shuffled[: round(self.config.types_held_out * len(kinds))])
        y = asked.classes.flatten()
        flat = flat.only(y != UNASKED)
        seen = flat.only(~held, test_too=False)
        unseen = ~torch.isin(types, types[seen.train])
        control = control_labels(types, y[seen.train], self._generator(f"control of {question}", repeat))
        control = torch.where(y == UNASKED, UNASKED, control)
        self.found.coverage[question].append(asked.coverage)
        for depth, (trained, fresh) in enumerate(zip(self.rows.states, self.fresh, strict=True)):
            for condition, states, labels in (
                (TRAINED, trained, y),
                (CONTROL, trained, control),
                (UNTRAINED, fresh, y),
            ):
                key = Key(question, condition, depth)
                right = self._fit(key, states.flatten(0, 1), labels, seen, flat.test, repeat)
                self._keep(key, right, flat.test, unseen)
            if question in self.config.described:
                self._describe(Key(question, TRAINED, depth), trained, asked, repeat)
        key = Key(question, SLOT_ALONE, None)
        index = torch.eye(slots).repeat(len(y) // slots, 1)
        self._keep(key, self._fit(key, index, y, seen, flat.test, repeat), flat.test, unseen)
        commonest = y[seen.train].mode().values
        self._keep(Key(question, COMMONEST, None), y[flat.test] == commonest, flat.test, unseen)

    def _describe(self, key: Key, states: Tensor, asked: Asked, repeat: int) -> None:
        """Description length of the labels given the states, under the penalty that validation chose most often."""
        y, group = asked.classes.flatten(), self.prompt.repeat_interleave(states.shape[1])
        rows = y != UNASKED
        bits, failed = online_bits(
            states.flatten(0, 1)[rows], y[rows], group[rows],
            classes=asked.count, penalty=self.found.usual_penalty(key), config=self.config.probe,
            generator=self._generator("portions", repeat),
        )  # fmt: skip
        scores = torch.full((len(y),), torch.nan, dtype=torch.float64)
        scores[rows] = bits
        self.found.scores[BITS][key].append(scores.view(states.shape[:2]))
        self.found.uniform[key.question].append(math.log2(asked.count))
        self.found.failed_codes += failed

    def _fit(
        self, key: Key, x: Tensor, y: Tensor, parts: Parts, test: Bool[Tensor, "row"], repeat: int
    ) -> Bool[Tensor, "tested"]:
        """Whether a probe trained on `parts` is right on the rows `test`; the fit is put on record."""
        probe = fit_probe(x, y, parts, config=self.config.probe, generator=self._generator("rows", repeat))
        about = {name: value for name, value in vars(probe).items() if name != "model"}
        self.found.fits.append(
            {**key._asdict(), "repeat": repeat, **about, "rows_per_feature": probe.rows / x.shape[1]}
        )
        self.tick(self.name)
        return probe.predict(x[test]) == y[test]

    def _keep(
        self, key: Key, right: Bool[Tensor, "tested"], test: Bool[Tensor, "row"], unseen: Bool[Tensor, "row"]
    ) -> None:
        scores = torch.full((len(test),), torch.nan)
        scores[test] = right.float()
        shape = self.rows.states.shape[1:3]
        self.found.scores[ACCURACY][key].append(scores.view(shape))
        self.found.scores[UNSEEN][key].append(torch.where(unseen, scores, torch.nan).view(shape))

    def _generator(self, purpose: str, repeat: int) -> torch.Generator:
        return derive_generator(self.config.seed, f"{purpose} {repeat}")
