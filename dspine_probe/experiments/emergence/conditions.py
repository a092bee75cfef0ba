"""The emergence experiment on one draft: every reader and control, in the order of the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.linear_probe import (
    Parts,
    ProbeConfig,
    class_of,
    commonest,
    control_labels,
    fit_probe,
)
from dspine_probe.experiments.common.progress import Ticker
from dspine_probe.experiments.common.request import option
from dspine_probe.experiments.common.splits import Split
from dspine_probe.experiments.emergence import controls
from dspine_probe.experiments.emergence.controls import (
    ATTENTION_CUT,
    BLOCK_CUT,
    SHUFFLED,
    TRAINED,
    TRANSLATOR,
    UNTRAINED,
)
from dspine_probe.experiments.emergence.readers import (
    TranslatorConfig,
    code_scores,
    count_scores,
    label_ranks,
    lens,
    ranks,
    train_translator,
    translated,
)
from dspine_probe.experiments.emergence.readings import Hooks, SlotReadings, TargetSequence, Window, read_draft
from dspine_probe.experiments.emergence.table import LabelRanks
from dspine_probe.hooks import HookedDraft
from dspine_probe.precision import Precision

COUNTS, CONTROL_TASK = "counts", "control task"


@dataclass(frozen=True)
class EmergenceConfig:
    """Sizes and seeds. Shares are of prompts; what is neither trained on nor validated on is tested.

    probe: also read with linear probes over that many of the commonest labels (`probe_classes`); None leaves them out.
    """

    labels_per_prompt: int = option(16, "Tokens that every slot is asked for, of each answer.", min=1)
    train_share: float = 0.4
    validation_share: float = 0.1
    train_rows: int = 4096
    validation_rows: int = 1024
    translator: TranslatorConfig = field(default_factory=TranslatorConfig)
    probe: ProbeConfig | None = None
    probe_classes: int = 64
    controls: bool = option(True, "Also the controls, which take most of the time.")
    resamples: int = 2000
    seed: int = 0


@dataclass(frozen=True)
class DraftStudy:
    """All settings and readers of one draft."""

    name: str
    draft: Draft
    sequences: Sequence[TargetSequence]
    split: Split
    config: EmergenceConfig
    precision: Precision
    tick: Ticker

    def all(self, windows: list[Window]) -> Iterator[LabelRanks]:
        """What every reader finds, in the order of the table."""
        readings = self._read(self.draft, windows)
        yield from self._translator(TRAINED, self.draft, readings)
        yield from self._untrained_readers(readings)
        if self.config.probe is not None:
            yield from self._probes(readings, self.config.probe)
        yield from self._counts(readings)
        if not self.config.controls:
            return
        shuffled = controls.shuffle_within(readings.labels, readings.sequence, self._generator("shuffle"))
        yield from self._translator(SHUFFLED, self.draft, readings, shuffled)
        del readings
        cut = controls.cut_attention(self.draft.config.num_hidden_layers)
        yield from self._translator(ATTENTION_CUT, self.draft, self._read(self.draft, windows, cut))
        if added := controls.cut_injection(self.draft):
            cut = [*cut, *added]
            yield from self._translator(BLOCK_CUT, self.draft, self._read(self.draft, windows, cut))
        fresh = controls.untrained(self.draft, self._generator("untrained"))
        yield from self._translator(UNTRAINED, fresh, self._read(fresh, windows))

    def _read(self, draft: Draft, windows: list[Window], hooks: Hooks = ()) -> SlotReadings:
        with HookedDraft(draft) as hooked:
            readings = read_draft(hooked, self.sequences, windows, fwd_hooks=hooks)
        self.tick(f"{self.name}: states read")
        return readings

    def _translator(
        self, setting: str, draft: Draft, readings: SlotReadings, labels: Int[Tensor, "label"] | None = None
    ) -> Iterator[LabelRanks]:
        """A translator for every depth, trained and tested in this setting."""
        wanted = self._index(readings.labels if labels is None else labels, readings)
        train = self._rows(self.split.train(readings.sequence), self.config.train_rows, "train", readings)
        check = self._rows(self.split.validation(readings.sequence), self.config.validation_rows, "check", readings)
        test = self.split.test(readings.sequence)
        found = []
        for depth, states in enumerate(readings.states):
            flat, flat_labels = states.flatten(0, 1), wanted.flatten()
            fitted = train_translator(
                draft,
                (flat[train], flat_labels[train]),
                (flat[check], flat_labels[check]),
                self.config.translator,
                self.precision,
            )
            found.append(ranks(translated(draft, fitted), states[test], wanted[test]))
            self.tick(f"{self.name}, {setting}: depth {depth} read")
        yield self._found(setting, TRANSLATOR, torch.stack(found), readings)

    def _untrained_readers(self, readings: SlotReadings) -> Iterator[LabelRanks]:
        wanted, test = self._index(readings.labels, readings), self.split.test(readings.sequence)
        found = [ranks(lens(self.draft), states[test], wanted[test]) for states in readings.states]
        yield self._found(TRAINED, "lens", torch.stack(found), readings)
        if self.draft.codes is not None:
            found = [
                ranks(code_scores(self.draft, layer), states[test], wanted[test])
                for layer, states in enumerate(readings.states[1:])
            ]
            yield self._found(TRAINED, "nearest code", torch.stack(found), readings, first_depth=1)

    def _counts(self, readings: SlotReadings) -> Iterator[LabelRanks]:
        """Floors that look at no state: the commonest token, and the commonest at this distance from the anchor."""
        every = torch.arange(len(self.sequences))
        fit = self.split.train(every) | self.split.validation(every)
        texts = [s.tokens[s.prompt_length :].long() for s, keep in zip(self.sequences, fit, strict=True) if keep]
        test = self.split.test(readings.sequence)
        anchors, wanted = readings.anchors[test], self.draft.to_index(readings.labels).cpu()[test]
        size = self.draft.head.shape[0]
        for reader, distances in (("unigram", [None]), ("skip-gram", range(1, anchors.shape[1] + 1))):
            columns = [
                label_ranks(count_scores(self.draft.to_index, size, texts, anchors[:, (d or 1) - 1], d), wanted)
                for d in distances
            ]
            ranked = torch.stack(columns, dim=1).expand(-1, anchors.shape[1])
            yield self._found(COUNTS, reader, ranked[None], readings)

    def _probes(self, readings: SlotReadings, config: ProbeConfig) -> Iterator[LabelRanks]:
        """A linear probe a depth, shared by all slots, for the label and for a random class of the anchor's token."""
        slots, sequence = readings.anchors.shape[1], readings.sequence
        masks = (self.split.train(sequence), self.split.validation(sequence), self.split.test(sequence))
        classes = commonest(readings.labels[masks[0]], self.config.probe_classes)
        asked = torch.isin(readings.labels, classes)
        if not all((mask & asked).any() for mask in masks):
            raise UsageError(
                f"no label of one part is among the {len(classes)} commonest; give more classes or more prompts."
            )
        parts = Parts(self.split.group[sequence], *(mask & asked for mask in masks)).repeat(slots)
        task = class_of(readings.labels, classes).repeat_interleave(slots)
        drawn = control_labels(readings.anchors.flatten(), task[parts.train], self._generator(CONTROL_TASK))
        for setting, wanted in ((TRAINED, task), (CONTROL_TASK, drawn)):
            ranked = torch.full((len(readings.states), int(masks[2].sum()), slots), len(classes))
            for depth, states in enumerate(readings.states):
                flat = states.flatten(0, 1)
                probe = fit_probe(flat, wanted, parts, config=config, generator=self._generator("probe"))
                places = probe.ranks(flat[parts.test], wanted[parts.test])
                ranked[depth, asked[masks[2]]] = places.view(-1, slots)
            yield self._found(setting, "linear probe", ranked, readings, rows=asked[masks[2]])
            self.tick(f"{self.name}: linear probes, {setting}")

    def _found(
        self,
        setting: str,
        reader: str,
        found: Int[Tensor, "depth label draft_slot"],
        readings: SlotReadings,
        *,
        first_depth: int = 0,
        rows: Bool[Tensor, "label"] | None = None,
    ) -> LabelRanks:
        sequence = readings.sequence[self.split.test(readings.sequence)]
        rows = torch.ones(len(sequence), dtype=torch.bool) if rows is None else rows
        size = self.draft.head.shape[0]
        return LabelRanks(self.name, setting, reader, found.cpu(), sequence, rows, first_depth, size)

    def _index(self, labels: Int[Tensor, "label"], readings: SlotReadings) -> Int[Tensor, "label draft_slot"]:
        index = self.draft.to_index(labels.to(readings.states.device))
        return index[:, None].expand(-1, readings.states.shape[2]).contiguous()

    def _rows(self, part: Bool[Tensor, "label"], most: int, purpose: str, readings: SlotReadings) -> Int[Tensor, "row"]:
        """Up to `most` (label, slot) rows of a part, the same for every depth, setting and draft."""
        slots = readings.states.shape[2]
        rows = part[:, None].expand(-1, slots).flatten().nonzero().squeeze(1)
        chosen = torch.randperm(len(rows), generator=self._generator(purpose))[:most]
        return rows[chosen].to(readings.states.device)

    def _generator(self, purpose: str) -> torch.Generator:
        return derive_generator(self.config.seed, purpose)


def steps(draft: Draft, config: EmergenceConfig) -> int:
    """How many steps a study of one draft takes."""
    depths, also_cut = draft.config.num_hidden_layers + 1, bool(controls.cut_injection(draft))
    translators = 1 + config.controls * (3 + also_cut)
    readings = 1 + config.controls * (2 + also_cut)
    return depths * translators + readings + (0 if config.probe is None else 2)
