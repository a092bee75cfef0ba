"""What can be read linearly from a draft's residual stream, by depth and slot, beyond what a probe brings itself?

Every target is probed at every depth with one logistic regression for all slots, on several splits of whole prompts.
Beside each stand: a control task (a random class for every anchor token type), the same probe on an untrained draft,
the slot index alone, the commonest class alone, and test rows whose anchor type no probe was trained on. For some
targets the description length is measured too, which does not hang on one size of training set. What is decodable is
not thereby used. Entry point: `probing`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments.arena import Arena
from dspine_probe.experiments.contrast import Draws
from dspine_probe.experiments.emergence.controls import untrained
from dspine_probe.experiments.probing.linear_probe import (
    Parts,
    Probe,
    ProbeConfig,
    control_labels,
    fit_probe,
    online_bits,
    split_groups,
)
from dspine_probe.experiments.probing.result import ProbingResult
from dspine_probe.experiments.probing.rows import (
    ACCEPTED,
    OWN,
    TARGETS,
    UNASKED,
    Question,
    question,
    read_rows,
)
from dspine_probe.experiments.probing.table import (
    COMMONEST,
    CONTROL,
    SLOT_ALONE,
    TRAINED,
    UNTRAINED,
    Key,
    Measurements,
    tabulate,
)
from dspine_probe.experiments.progress import Progress, silent
from dspine_probe.experiments.results import plain
from dspine_probe.experiments.stats import RESAMPLES

SKIPPED = {
    "shuffled labels": "the control task asks for more: a label that is fixed for every anchor type",
    "intervention": "decodable is all that is claimed; gates and corruption intervene",
    "peak over depths": "depths are reported side by side; none is claimed to be the best",
}


@dataclass(frozen=True)
class ProbingConfig:
    """Sizes and seeds. Shares are of prompts; what is neither trained on nor chosen on is tested.

    described: targets whose description length is measured as well.
    classes: token targets are asked among that many commonest tokens of the training prompts.
    types_held_out: share of anchor token types that no probe is trained on.
    repeats: splits, each with its own subsample and control task; five or more.
    """

    targets: tuple[str, ...] = TARGETS
    described: tuple[str, ...] = (OWN, ACCEPTED)
    classes: int = 24
    types_held_out: float = 0.2
    train_share: float = 0.5
    validation_share: float = 0.15
    repeats: int = 5
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    resamples: int = RESAMPLES
    seed: int = 0

    def __post_init__(self) -> None:
        if self.repeats < 5:
            raise UsageError(
                f"{self.repeats} repeats do not show how results vary with the split; give five or more."
            )
        unknown = [target for target in (*self.targets, *self.described) if target not in TARGETS]
        if unknown or not self.targets:
            raise UsageError(f"there are no probing targets {unknown}; choose from {', '.join(TARGETS)}.")


def probing(
    drafts: Mapping[str, Draft],
    arena: Arena,
    *,
    config: ProbingConfig | None = None,
    on_progress: Progress | None = None,
) -> ProbingResult:
    """Probe every depth of each draft for every target, with all controls.

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
    found = {
        name: _Study(name, draft, arena, config, on_progress or silent).run()
        for name, draft in drafts.items()
    }
    return ProbingResult(
        table=pd.concat([tabulate(name, one, draws) for name, one in found.items()], ignore_index=True),
        config=plain(config),
        drafts={name: draft.config.to_dict() for name, draft in drafts.items()},
        data=dict(arena.about),
        coverage={name: one.mean_coverage() for name, one in found.items()},
        fits=[{"draft": name} | fit for name, one in found.items() for fit in one.fits],
        failed_codes=sum(one.failed_codes for one in found.values()),
        skipped=SKIPPED,
        seconds=time.perf_counter() - began,
    )


class _Study:
    """All probes of one draft."""

    def __init__(
        self, name: str, draft: Draft, arena: Arena, config: ProbingConfig, report: Progress
    ) -> None:
        self.name, self.config, self.report = name, config, report
        self.rows = read_rows(draft, arena)
        fresh = untrained(draft, derive_generator(config.seed, "untrained draft"))
        self.fresh = read_rows(fresh, arena).states
        self.prompt, self.set_index = arena.prompt, arena.set_index
        self.found = Measurements()
        self.done = 0

    def run(self) -> Measurements:
        for repeat in range(self.config.repeats):
            parts = split_groups(
                self.prompt,
                train_share=self.config.train_share,
                validation_share=self.config.validation_share,
                stratum=self.set_index,
                generator=self._generator("split", repeat),
            )
            for target in self.config.targets:
                asked = question(target, self.rows, parts.train, self.config.classes)
                self._probe_target(target, asked, parts, repeat)
        return self.found

    def _probe_target(self, target: str, asked: Question, parts: Parts, repeat: int) -> None:
        flat = parts.repeat(self.rows.states.shape[2])
        types = self.rows.anchors.flatten()
        held = _held_types(types, self.config.types_held_out, self._generator("held-out types", repeat))
        y = asked.classes.flatten()
        flat = flat.only(y != UNASKED)
        seen = flat.only(~held, test_too=False)
        unseen = ~torch.isin(types, types[seen.train])
        control = control_labels(types, y[seen.train], self._generator(f"control of {target}", repeat))
        control = torch.where(y == UNASKED, UNASKED, control)
        self.found.coverage[target].append(asked.coverage)
        for depth, (trained, fresh) in enumerate(zip(self.rows.states, self.fresh, strict=True)):
            for condition, states, labels in (
                (TRAINED, trained, y), (CONTROL, trained, control), (UNTRAINED, fresh, y),
            ):  # fmt: skip
                key = Key(target, condition, depth)
                probe = self._fit(key, states.flatten(0, 1), labels, seen, repeat)
                right = probe.predict(states.flatten(0, 1)[flat.test]) == labels[flat.test]
                self._keep(key, right, flat.test, unseen)
            if target in self.config.described:
                self._describe(Key(target, TRAINED, depth), trained, asked, repeat)
        self._baselines(target, y, seen, flat, unseen, repeat)

    def _baselines(
        self, target: str, y: Tensor, seen: Parts, flat: Parts, unseen: Bool[Tensor, "row"], repeat: int
    ) -> None:
        slots = self.rows.states.shape[2]
        index = torch.eye(slots).repeat(len(y) // slots, 1)
        key = Key(target, SLOT_ALONE, None)
        probe = self._fit(key, index, y, seen, repeat)
        self._keep(key, probe.predict(index[flat.test]) == y[flat.test], flat.test, unseen)
        commonest = y[seen.train].mode().values
        self._keep(Key(target, COMMONEST, None), y[flat.test] == commonest, flat.test, unseen)

    def _describe(self, key: Key, states: Tensor, asked: Question, repeat: int) -> None:
        """Description length of the labels given the states, under the penalty that validation chose most often."""
        y, group = asked.classes.flatten(), self._groups()
        rows = y != UNASKED
        bits, failed = online_bits(
            states.flatten(0, 1)[rows], y[rows], group[rows],
            classes=asked.count, penalty=self.found.usual_penalty(key), config=self.config.probe,
            generator=self._generator("portions", repeat),
        )  # fmt: skip
        scores = torch.full((len(y),), torch.nan, dtype=torch.float64)
        scores[rows] = bits
        self.found.bits[key].append(scores.view(self.rows.states.shape[1:3]))
        self.found.uniform[key.target].append(math.log2(asked.count))
        self.found.failed_codes += failed

    def _fit(self, key: Key, x: Tensor, y: Tensor, parts: Parts, repeat: int) -> Probe:
        generator = self._generator("rows", repeat)
        probe = fit_probe(x, y, parts, config=self.config.probe, generator=generator)
        self.found.note(key, repeat, probe, x.shape[1])
        self.done += 1
        self.report(self.name, self.done, self._total())
        return probe

    def _keep(
        self, key: Key, right: Bool[Tensor, "tested"], test: Bool[Tensor, "row"], unseen: Bool[Tensor, "row"]
    ) -> None:
        scores = torch.full((len(test),), torch.nan)
        scores[test] = right.float()
        shape = self.rows.states.shape[1:3]
        self.found.right[key].append(scores.view(shape))
        self.found.right_unseen[key].append(torch.where(unseen, scores, torch.nan).view(shape))

    def _groups(self) -> Int[Tensor, "row"]:
        return self.prompt.repeat_interleave(self.rows.states.shape[2])

    def _generator(self, purpose: str, repeat: int) -> torch.Generator:
        return derive_generator(self.config.seed, f"{purpose} {repeat}")

    def _total(self) -> int:
        return self.config.repeats * len(self.config.targets) * (3 * len(self.rows.states) + 1)


def _held_types(types: Int[Tensor, "row"], share: float, generator: torch.Generator) -> Bool[Tensor, "row"]:
    """Rows whose token type is among those withheld from training."""
    kinds = types.unique()
    held = kinds[torch.randperm(len(kinds), generator=generator)[: round(share * len(kinds))]]
    return torch.isin(types, held)
