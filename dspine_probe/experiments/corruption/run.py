"""The work of the corruption experiment: every protocol on every draft, and decodes under wrong anchors.

Answers are taken a few at a time. For each such group the target is re-run once, on all edited texts; then every draft
is given all conditions. Nothing is averaged here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F
from transformer_lens.utilities.statistics import derive_generator

from dspine_probe.decoding.offline import Rounds, walk
from dspine_probe.drafts import Draft, DSpine
from dspine_probe.experiments.arena import Arena
from dspine_probe.experiments.corruption.bench import Bench, hide
from dspine_probe.experiments.corruption.blocks import OWN, BlockGroup, Reach, prepare
from dspine_probe.experiments.corruption.config import CorruptionConfig
from dspine_probe.experiments.corruption.protocols import (
    CLEAN,
    A,
    AnchorProtocol,
    C,
    MessageProtocol,
    PrefixProtocol,
)
from dspine_probe.experiments.corruption.scores import Fields, Key, Sheets, join
from dspine_probe.experiments.corruption.substitutes import ZERO
from dspine_probe.experiments.progress import Progress, Ticker
from dspine_probe.hooks import HookedDraft
from dspine_probe.target import Target

StandIns = Mapping[str, Sequence[Int[Tensor, "n"]]]


class CorruptionRun:
    """Drafts, answers and stand-ins; `measure` and `decode` do the work.

    checks: of every draft, what was tried and found unchanged. reruns: of the target on unedited text, how many tokens
    came out as before, and how far its states lay from those of the arena (largest, relative to their length).
    """

    def __init__(
        self,
        drafts: Mapping[str, Draft],
        fine_tuned: Mapping[str, Draft],
        target: Target,
        arena: Arena,
        stand_ins: StandIns,
        config: CorruptionConfig,
        on_step: Progress | None,
    ) -> None:
        self.drafts, self.fine_tuned, self.target = drafts, fine_tuned, target
        self.arena, self.stand_ins, self.config = arena, stand_ins, config
        self.checks: dict[str, dict[str, Any]] = {name: {"exchanged_for_itself": 0} for name in drafts}
        self.reruns: dict[str, float] = {"tokens": 0, "reproduced": 0, "largest_error": 0.0}
        groups = -(-len(arena.order) // config.answers_per_batch)
        walks = len(drafts) * (1 + len(config.walk_kinds))
        self._tick = Ticker(on_step, groups * (1 + len(drafts) + len(fine_tuned)) + walks)

    def measure(self) -> dict[str, dict[Key, Fields]]:
        """Every condition of every draft on all blocks, in the arena's order."""
        spines = any(isinstance(draft, DSpine) for draft in self.drafts.values())
        config = self.config
        reach = Reach(config.kinds, config.earlier, config.rerun_kinds, spines or bool(self.fine_tuned))
        found: dict[str, list[Sheets]] = {name: [] for name in self.drafts}
        size = config.answers_per_batch
        with ExitStack() as stack:
            hooked, tuned = (
                {name: stack.enter_context(HookedDraft(draft)) for name, draft in some.items()}
                for some in (self.drafts, self.fine_tuned)
            )
            for index, batch in enumerate(self.arena.batches(answers_per_batch=size)):
                part = self.arena.order[index * size : (index + 1) * size]
                group = prepare(self.arena, part, batch, self.stand_ins, self.target, reach)
                self._compare_reruns(group)
                self._tick("target re-run on edited texts")
                for name, draft in hooked.items():
                    sheets = Sheets(len(group), self.arena.slots)
                    self._apply(name, Bench(draft, group), sheets, index)
                    if name in tuned:
                        self._apply_prefixes(name, Bench(tuned[name], group), sheets, index)
                    found[name].append(sheets)
        return {name: join(groups) for name, groups in found.items()}

    def decode(self, walked: Sequence[int]) -> dict[str, dict[str, Int[Tensor, "answer"]]]:
        """Rounds that the answers `walked` take with true anchors and with each kind of wrong ones."""
        answers = [self.arena.answers[i] for i in walked]
        rounds: dict[str, dict[str, Tensor]] = {}
        for name, draft in self.drafts.items():
            rounds[name] = {CLEAN: _rounds(walk(draft, answers))}
            self._tick(f"{name}: decoded with true anchors")
            for kind in self.config.walk_kinds:
                shown = [self.stand_ins[kind][i].clamp(min=0) for i in walked]
                with HookedDraft(draft) as hooked, hooked.hooks(hide(draft, 0) if kind == ZERO else ()):
                    rounds[name][kind] = _rounds(walk(draft, answers, shown=shown))
                self._tick(f"{name}: decoded with {kind} anchors")
        return rounds

    def _apply(self, name: str, bench: Bench, sheets: Sheets, index: int) -> None:
        """Protocol A, and C where there are messages; the first group is also used for checks."""
        protocols: list[AnchorProtocol | MessageProtocol] = []
        protocols.append(AnchorProtocol(bench, self.config, sheets, self._noise(A, index)))
        if isinstance(bench.draft, DSpine):
            protocols.append(MessageProtocol(bench, self.config, sheets, self._noise(C, index)))
        for protocol in protocols:
            if index == 0:
                self.checks[name]["exchanged_for_itself"] += protocol.check_no_op()
            protocol.run()
        self._tick(f"{name}: corrupted")

    def _apply_prefixes(self, name: str, bench: Bench, sheets: Sheets, index: int) -> None:
        protocol = PrefixProtocol(bench, self.config, sheets)
        checks = self.checks[name]
        if index == 0:
            checks["exchanged_for_itself"] += protocol.check_no_op()
        protocol.run()
        checks["moves_earlier_slots"] = max(protocol.backwards, checks.get("moves_earlier_slots", 0.0))
        self._tick(f"{name}, fine-tuned: corrupted")

    def _noise(self, protocol: str, index: int) -> torch.Generator | None:
        """The same for all drafts."""
        return derive_generator(self.config.seed, "noise", protocol, index) if self.config.noise else None

    def _compare_reruns(self, group: BlockGroup) -> None:
        """How well the target, re-run on unedited text, comes out where it was."""
        farthest = self.config.farthest
        block, position, row = group.rows(OWN, farthest, whole=True)
        clean, again = group.taps[group.text[block], position], group.reruns.taps[row]
        error = (again - clean).norm(dim=-1) / clean.norm(dim=-1)
        measurable = group.measurable(farthest)
        same = group.choices(OWN, farthest) == group.tokens[:, 1]
        self.reruns["tokens"] += int(measurable.sum())
        self.reruns["reproduced"] += int((same & measurable).sum())
        self.reruns["largest_error"] = max(self.reruns["largest_error"], float(F.pad(error, (0, 1)).max()))


def _rounds(walked: Sequence[Rounds]) -> Int[Tensor, "answer"]:
    """How many rounds each answer took."""
    return torch.tensor([len(one.anchors) for one in walked])
