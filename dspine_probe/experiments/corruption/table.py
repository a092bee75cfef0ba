"""From scores per block to the table of the corruption experiment: means, paired changes, contrasts, intervals.

One row is one (draft, protocol, site, edit, kind, subset, metric) over one slot or several, averaged unweighted.
Metrics: `clean` and `top1`, the share of true tokens picked before and after; `change` = top1 − clean; `logp_change` of
the true token and `kl` (clean ‖ corrupted), in nats; `moved`, how often the target itself would now write something
else; `followed`, how often the draft picks just that, and `followed_change` against before. Subsets: all; "clean
correct"; "answer changes" and "answer stays", by what the target would now write. A label "a − b" is a paired
difference on what both measured. Protocol "decode" holds acceptance lengths (`al`, `al_change`); n counts rounds there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.experiments.common.arena import Arena
from dspine_probe.experiments.common.intervals import (
    Draws,
    Estimate,
    Scores,
    estimate,
    macro,
    per_slot,
    ratio_samples,
    set_weights,
)
from dspine_probe.experiments.common.rows import RowBuilder
from dspine_probe.experiments.common.schema import MINUS
from dspine_probe.experiments.corruption.config import FARTHEST, CorruptionConfig
from dspine_probe.experiments.corruption.protocols import CLEAN, FIELDS, NAN, TOKEN, A, B, C, Cell, Fields, site
from dspine_probe.experiments.corruption.replacements import RANK_2

FACTORS = ("protocol", "site", "edit", "kind", "subset")
ALL, CORRECT, CHANGES, STAYS = "all", "clean correct", "answer changes", "answer stays"
DECODE, TUNED = "decode", "fine-tuned − parent"
PREDECESSOR = site(1)
_IN_SUBSET = {
    ALL: ("clean", "top1", "change", "logp_change", "kl", "moved", "followed", "followed_change"),
    CORRECT: ("change",),
    CHANGES: ("clean", "top1", "change", "followed", "followed_change"),
    STAYS: ("clean", "top1", "change"),
}
_CONTRASTED = ("change", "logp_change")


def metrics(fields: Fields) -> dict[tuple[str, str], Scores]:
    """Scores by (subset, metric), NaN outside the subset and where a metric was not measured."""
    of = dict(zip(FIELDS, fields, strict=True))
    every = {
        "clean": of["clean_hit"],
        "top1": of["hit"],
        "change": of["hit"] - of["clean_hit"],
        "logp_change": of["logp"] - of["clean_logp"],
        "kl": of["kl"],
        "moved": of["moved"],
        "followed": of["follow"],
        "followed_change": of["follow"] - of["clean_follow"],
    }
    inside = {ALL: of["hit"] >= 0, CORRECT: of["clean_hit"] == 1, CHANGES: of["moved"] == 1, STAYS: of["moved"] == 0}
    return {
        (subset, name): every[name].masked_fill(~inside[subset], NAN)
        for subset, names in _IN_SUBSET.items()
        for name in names
    }


class CorruptionTable:
    """Collects the rows of one arena; `rows.table()` gives them.

    headline: of every protocol, the slots over which places are compared: slot 1 in A; in B and C those before which
    every place exists.
    """

    def __init__(self, arena: Arena, config: CorruptionConfig) -> None:
        self.draws = Draws.of(arena, seed=config.seed, resamples=config.resamples)
        self.slots, self.config, self.rows = arena.slots, config, RowBuilder(FACTORS)
        later = range(min(FARTHEST + 1, arena.slots), arena.slots + 1)
        self.headline = {A: range(1, 2), B: later, C: later}

    def add_all(self, found: Mapping[str, Mapping[Cell, Fields]]) -> None:
        """Every draft's conditions and contrasts, and each draft beside the first one."""
        for name, conditions in found.items():
            for key, fields in conditions.items():
                self.condition(name, key, fields)
            self.contrasts(name, conditions)
            alone = Cell(B, "none", TOKEN, CLEAN)
            if alone in conditions:  # a fine-tuned draft with nothing shown, against the draft it was made from
                parent = conditions[Cell(A, PREDECESSOR, TOKEN, RANK_2)][FIELDS.index("clean_hit")]
                change = conditions[alone][FIELDS.index("hit")] - parent
                for slots in (range(1, 2), range(1, self.slots + 1)):
                    self._span(name, alone._replace(kind=TUNED), ALL, "change", change, slots)
        first, *others = found
        for name in others:
            for key, fields in found[name].items():
                if key.protocol == A and key.site == PREDECESSOR and key in found[first]:
                    self._difference(name + MINUS + first, key, fields, found[first][key])

    def condition(self, draft: str, key: Cell, fields: Fields) -> None:
        """All metrics and subsets of a condition: slot by slot, and in protocols B and C over several slots."""
        spans = () if key.protocol == A else dict.fromkeys([range(2, self.slots + 1), self.headline[key.protocol]])
        for (subset, metric), scores in metrics(fields).items():
            by_slot, counts = per_slot(scores, self.draws), (~scores.isnan()).sum(0).tolist()
            for slot, n in enumerate(counts, start=1):
                if n:
                    self._add(draft, key, subset, metric, by_slot.at(slot - 1), range(slot, slot + 1), n)
            for span in spans:
                if len(span) > 1:
                    self._span(draft, key, subset, metric, scores, span)

    def contrasts(self, draft: str, found: Mapping[Cell, Fields]) -> None:
        """The predecessor against every other place, and a rank-2 token against every other kind."""
        for base in (key for key in found if key.site == PREDECESSOR):
            for other in (key for key in found if key.protocol == base.protocol):
                if other.kind == base.kind and other.site not in (PREDECESSOR, "none"):
                    key = base._replace(site=base.site + MINUS + other.site, edit=other.edit)
                elif other.kind != base.kind and other.site == PREDECESSOR and base.kind == RANK_2:
                    key = base._replace(kind=base.kind + MINUS + other.kind)
                else:
                    continue
                self._difference(draft, key, found[base], found[other])

    def acceptance(
        self, draft: str, arena: Arena, decoded: Sequence[int], rounds: Mapping[str, Int[Tensor, "answer"]]
    ) -> None:
        """AL with true and with wrong anchors, tokens committed over rounds, mean of sets; and the paired change.

        Args:
            decoded: which answers of the arena were decoded. rounds: by kind of anchors, how many each of them took.
        """
        sets = [arena.sets[i] for i in decoded]
        committed = torch.tensor([len(arena.answers[i]) - 1 - arena.answers[i].prompt_length for i in decoded])
        weights = set_weights(sets, seed=self.config.seed, resamples=self.config.resamples)
        members = [torch.tensor([of == name for of in sets]) for name in arena.set_names]

        def samples(needed: Tensor) -> Float[Tensor, "one_and_resample"]:
            return torch.stack([ratio_samples(committed[m], needed[m], weights[:, m]) for m in members]).nanmean(0)

        clean = samples(rounds[CLEAN])
        for kind, needed in rounds.items():
            found, key = samples(needed), Cell(DECODE, PREDECESSOR, TOKEN, kind)
            for metric, values in (("al", found), ("al_change", found - clean)):
                one, n = estimate(values[0], values[1:]), int(needed.sum())
                self._add(draft, key, ALL, metric, one, range(1, self.slots + 1), n)

    def _difference(self, draft: str, key: Cell, a: Fields, b: Fields) -> None:
        left, right = metrics(a), metrics(b)
        for metric in _CONTRASTED:
            scores = left[ALL, metric] - right[ALL, metric]
            self._span(draft, key, ALL, metric, scores, self.headline[key.protocol])

    def _span(self, draft: str, key: Cell, subset: str, metric: str, scores: Scores, slots: range) -> None:
        """A row over several slots, if every one of them was measured."""
        measured = ~scores[:, slots[0] - 1 : slots[-1]].isnan()
        if bool(measured.any(0).all()):
            self._add(draft, key, subset, metric, macro(scores, self.draws, slots), slots, int(measured.sum()))

    def _add(self, draft: str, key: Cell, subset: str, metric: str, found: Estimate, slots: range, n: int) -> None:
        self.rows.add(found, draft=draft, metric=metric, slot=slot_text(slots), n=n, subset=subset, **key._asdict())


def slot_text(slots: range) -> str:
    """Slots as the table names them: "1", or "2-7"."""
    return str(slots[0]) if len(slots) == 1 else f"{slots[0]}-{slots[-1]}"
