"""The work of the emergence experiment on one draft: every reader and control, in the order of the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

from dspine_probe.drafts import Draft, DSpine
from dspine_probe.experiments.emergence import controls, probes
from dspine_probe.experiments.emergence.config import EmergenceConfig
from dspine_probe.experiments.emergence.readers import (
    code_scores,
    count_scores,
    label_ranks,
    lens,
    ranks,
    train_translator,
    translated,
)
from dspine_probe.experiments.emergence.readings import Readings, TargetSequence, Window, read_draft
from dspine_probe.experiments.emergence.result import Measured
from dspine_probe.experiments.progress import Ticker
from dspine_probe.experiments.splits import Split
from dspine_probe.hooks import HookedDraft

TRAINED, SHUFFLED, UNTRAINED, ATTENTION_CUT, BLOCK_CUT = (
    "trained",
    "shuffled labels",
    "untrained draft",
    "attention cut",
    "attention and injection cut",
)


@dataclass(frozen=True)
class EmergenceRun:
    """All conditions and readers of one draft."""

    name: str
    draft: Draft
    sequences: Sequence[TargetSequence]
    split: Split
    config: EmergenceConfig
    tick: Ticker

    def all(self, windows: list[Window]) -> Iterator[Measured]:
        layers = self.draft.config.num_hidden_layers
        readings = self._read(self.draft, windows)
        yield from self._translator(TRAINED, self.draft, readings)
        yield from self._untrained_readers(readings)
        if self.config.linear_probes is not None:
            yield from self._probes(readings)
        yield from self._counts(readings)
        if not self.config.controls:
            return
        generator = derive_generator(self.config.seed, "shuffle")
        shuffled = controls.shuffle_within(readings.labels, readings.sequence, generator)
        yield from self._translator(SHUFFLED, self.draft, readings, shuffled)
        del readings
        cut = controls.cut_attention(layers)
        yield from self._translator(ATTENTION_CUT, self.draft, self._read(self.draft, windows, cut))
        if isinstance(self.draft, DSpine):
            cut = [*cut, *controls.cut_injection(layers)]
            yield from self._translator(BLOCK_CUT, self.draft, self._read(self.draft, windows, cut))
        fresh = controls.untrained(self.draft, derive_generator(self.config.seed, "untrained"))
        yield from self._translator(UNTRAINED, fresh, self._read(fresh, windows))

    def _read(self, draft: Draft, windows: list[Window], hooks: controls.Hooks = ()) -> Readings:
        with HookedDraft(draft) as hooked:
            readings = read_draft(hooked, self.sequences, windows, fwd_hooks=hooks)
        self.tick(f"{self.name}: states read")
        return readings

    def _translator(
        self, condition: str, draft: Draft, readings: Readings, labels: Int[Tensor, "label"] | None = None
    ) -> Iterator[Measured]:
        """A translator for every depth, trained and tested under this condition."""
        wanted = self._index(readings.labels if labels is None else labels, readings)
        train = self._rows(self.split.train(readings.sequence), self.config.train_rows, "train", readings)
        check = self._rows(
            self.split.validation(readings.sequence), self.config.validation_rows, "check", readings
        )
        test = self.split.test(readings.sequence)
        found = []
        for depth, states in enumerate(readings.states):
            flat, flat_labels = states.flatten(0, 1), wanted.flatten()
            fitted = train_translator(
                draft,
                (flat[train], flat_labels[train]),
                (flat[check], flat_labels[check]),
                self.config.translator,
            )
            found.append(ranks(translated(draft, fitted), states[test], wanted[test]))
            self.tick(f"{self.name}, {condition}: depth {depth} read")
        yield self._measured(condition, "translator", torch.stack(found), readings)

    def _untrained_readers(self, readings: Readings) -> Iterator[Measured]:
        wanted, test = self._index(readings.labels, readings), self.split.test(readings.sequence)
        found = [ranks(lens(self.draft), states[test], wanted[test]) for states in readings.states]
        yield self._measured(TRAINED, "lens", torch.stack(found), readings)
        if isinstance(self.draft, DSpine):
            found = [
                ranks(code_scores(self.draft, layer), states[test], wanted[test])
                for layer, states in enumerate(readings.states[1:])
            ]
            yield self._measured(TRAINED, "nearest code", torch.stack(found), readings, first_depth=1)

    def _counts(self, readings: Readings) -> Iterator[Measured]:
        """Floors that look at no state: the commonest token, and the commonest at this distance from the anchor."""
        every = torch.arange(len(self.sequences))
        fit = self.split.train(every) | self.split.validation(every)
        texts = [
            s.tokens[s.prompt_length :].long() for s, keep in zip(self.sequences, fit, strict=True) if keep
        ]
        test = self.split.test(readings.sequence)
        anchors, wanted = readings.anchors[test], self.draft.to_index(readings.labels).cpu()[test]
        size = self.draft.head.shape[0]
        for reader, distances in (("unigram", [None]), ("skip-gram", range(1, anchors.shape[1] + 1))):
            columns = [
                label_ranks(
                    count_scores(self.draft.to_index, size, texts, anchors[:, (d or 1) - 1], d), wanted
                )
                for d in distances
            ]
            ranked = torch.stack(columns, dim=1).expand(-1, anchors.shape[1])
            yield self._measured("counts", reader, ranked[None], readings)

    def _probes(self, readings: Readings) -> Iterator[Measured]:
        assert self.config.linear_probes is not None
        masks = [
            part(readings.sequence) for part in (self.split.train, self.split.validation, self.split.test)
        ]
        for condition, outcome in probes.linear_probes(readings, masks, self.config.linear_probes):
            yield self._measured(condition, "linear probe", outcome.ranks, readings, rows=outcome.rows)
            self.tick(f"{self.name}: linear probes, {condition}")

    def _measured(
        self,
        condition: str,
        reader: str,
        found: Int[Tensor, "depth label draft_slot"],
        readings: Readings,
        *,
        first_depth: int = 0,
        rows: Bool[Tensor, "label"] | None = None,
    ) -> Measured:
        sequence = readings.sequence[self.split.test(readings.sequence)]
        rows = torch.ones(len(sequence), dtype=torch.bool) if rows is None else rows
        return Measured(
            self.name, condition, reader, found.cpu(), sequence, rows, first_depth, self.draft.head.shape[0]
        )

    def _index(self, labels: Int[Tensor, "label"], readings: Readings) -> Int[Tensor, "label draft_slot"]:
        index = self.draft.to_index(labels.to(readings.states.device))
        return index[:, None].expand(-1, readings.states.shape[2]).contiguous()

    def _rows(
        self, part: Bool[Tensor, "label"], most: int, purpose: str, readings: Readings
    ) -> Int[Tensor, "row"]:
        """Up to `most` (label, slot) rows of a part, the same for every depth, condition and draft."""
        slots = readings.states.shape[2]
        rows = part[:, None].expand(-1, slots).flatten().nonzero().squeeze(1)
        generator = derive_generator(self.config.seed, purpose)
        return rows[torch.randperm(len(rows), generator=generator)[:most]].to(readings.states.device)


def steps(draft: Draft, config: EmergenceConfig) -> int:
    """How many steps a run of one draft takes."""
    depths = draft.config.num_hidden_layers + 1
    translators = 1 + config.controls * (3 + isinstance(draft, DSpine))
    readings = 1 + config.controls * (2 + isinstance(draft, DSpine))
    return depths * translators + readings + (0 if config.linear_probes is None else 2)
