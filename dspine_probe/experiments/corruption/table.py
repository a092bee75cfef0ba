"""From scores per block to the table of the corruption experiment: means, paired changes, contrasts, intervals.

One row is one (draft, protocol, site, edit, kind, subset, metric) over slots `first_slot`…`last_slot`, averaged
unweighted. Metrics: `clean` and `top1`, the share of true tokens picked before and after; `change` = top1 − clean;
`logp_change` of the true token and `kl` (clean ‖ corrupted), in nats; `moved`, how often the target itself would now
write something else; `followed`, how often the draft picks just that, and `followed_change` against before.
Subsets: all; "clean correct"; "answer changes" and "answer stays", by what the target would now write. A label
"a − b" is a paired difference on what both measured. Protocol "decode" holds acceptance lengths (`al`, `al_change`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.experiments.arena import Arena
from dspine_probe.experiments.contrast import Draws, Scores, macro, per_slot
from dspine_probe.experiments.corruption.protocols import CLEAN, TOKEN, A, site
from dspine_probe.experiments.corruption.scores import FIELDS, Fields, Key
from dspine_probe.experiments.corruption.substitutes import RANK_2
from dspine_probe.experiments.stats import Estimate, estimate, ratio_samples

MINUS = " − "
ALL, CORRECT, CHANGES, STAYS = "all", "clean correct", "answer changes", "answer stays"
DECODE = "decode"
_IN_SUBSET = {
    ALL: ("clean", "top1", "change", "logp_change", "kl", "moved", "followed", "followed_change"),
    CORRECT: ("change",),
    CHANGES: ("clean", "top1", "change", "followed", "followed_change"),
    STAYS: ("clean", "top1", "change"),
}
_CONTRASTED = ("change", "logp_change")
PREDECESSOR = site(1)
Row = dict[str, Any]


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
    inside = {
        ALL: of["hit"] >= 0,
        CORRECT: of["clean_hit"] == 1,
        CHANGES: of["moved"] == 1,
        STAYS: of["moved"] == 0,
    }
    return {
        (subset, name): every[name].masked_fill(~inside[subset], float("nan"))
        for subset, names in _IN_SUBSET.items()
        for name in names
    }


@dataclass(frozen=True)
class Tabulator:
    """Rows of one arena under one set of draws. `farthest` is the largest distance measured."""

    draws: Draws
    slots: int
    farthest: int

    def condition(self, draft: str, key: Key, fields: Fields) -> Iterator[Row]:
        """All metrics and subsets of a condition: slot by slot, and in protocols B and C over several slots."""
        for (subset, metric), scores in metrics(fields).items():
            labels = _labels(draft, key, subset, metric)
            slots = per_slot(scores, self.draws)
            for slot in range(1, self.slots + 1):
                one = Estimate(*(part[slot - 1] for part in (slots.value, slots.low, slots.high)))
                yield from self._row(labels, scores, one, slot, slot)
            for first, last in self._spans(key.protocol):
                yield from self.span(labels, scores, first, last)

    def contrasts(self, draft: str, found: Mapping[Key, Fields]) -> Iterator[Row]:
        """The predecessor against every other place, and a rank-2 token against every other kind."""
        for base in (key for key in found if key.site == PREDECESSOR):
            for other in found:
                if other.protocol != base.protocol or (other.site, other.kind) == (base.site, base.kind):
                    continue
                elsewhere = other.kind == base.kind and other.site not in (PREDECESSOR, "none")
                if elsewhere:
                    key = base._replace(site=base.site + MINUS + other.site, edit=other.edit)
                elif other.site == PREDECESSOR and base.kind == RANK_2:
                    key = base._replace(kind=base.kind + MINUS + other.kind)
                else:
                    continue
                yield from self._difference(
                    draft, key, found[base], found[other], self.headline(base.protocol)
                )

    def between(
        self, name: str, other: str, a: Mapping[Key, Fields], b: Mapping[Key, Fields]
    ) -> Iterator[Row]:
        """One draft against another where the predecessor is corrupted in protocol A."""
        for key in a:
            if key.protocol == A and key.site == PREDECESSOR and key in b:
                yield from self._difference(name + MINUS + other, key, a[key], b[key], self.headline(A))

    def parent(self, draft: str, key: Key, tuned: Fields, parent: Fields) -> Iterator[Row]:
        """Accuracy of a fine-tuned draft with nothing shown, against the draft it was made from."""
        scores = tuned[FIELDS.index("hit")] - parent[FIELDS.index("clean_hit")]
        labels = _labels(draft, key._replace(kind="fine-tuned − parent"), ALL, "change")
        for first, last in ((1, 1), (1, self.slots)):
            yield from self.span(labels, scores, first, last)

    def headline(self, protocol: str) -> tuple[int, int]:
        """Slots by which places are compared: slot 1 in A; in B and C those before which every place exists."""
        return (1, 1) if protocol == A else (min(self.farthest + 1, self.slots), self.slots)

    def span(self, labels: Row, scores: Scores, first: int, last: int) -> Iterator[Row]:
        """A row over several slots, if every one of them was measured."""
        part = scores[:, first - 1 : last]
        if bool((~part.isnan()).any(0).all()):
            found = macro(scores, self.draws, range(first, last + 1))
            yield from self._row(labels, scores, found, first, last)

    def _spans(self, protocol: str) -> Sequence[tuple[int, int]]:
        spans = dict.fromkeys([(2, self.slots), self.headline(protocol)])
        return [] if protocol == A else [(first, last) for first, last in spans if first < last]

    def _difference(
        self, draft: str, key: Key, a: Fields, b: Fields, slots: tuple[int, int]
    ) -> Iterator[Row]:
        left, right = metrics(a), metrics(b)
        for metric in _CONTRASTED:
            scores = left[ALL, metric] - right[ALL, metric]
            yield from self.span(_labels(draft, key, ALL, metric), scores, *slots)

    def _row(self, labels: Row, scores: Scores, found: Estimate, first: int, last: int) -> Iterator[Row]:
        measured = ~scores[:, first - 1 : last].isnan()
        if not measured.any():
            return
        yield labels | {
            "first_slot": first,
            "last_slot": last,
            "mean": float(found.value),
            "low": float(found.low),
            "high": float(found.high),
            "n": int(measured.sum()),
            "prompts": len(self.draws.prompt[measured.any(1)].unique()),
        }


def acceptance_rows(
    draft: str, arena: Arena, draws: Draws, rounds: Mapping[str, Int[Tensor, "answer"]], slots: int
) -> Iterator[Row]:
    """AL with true anchors and under each kind, tokens committed over rounds, mean of sets; and the paired change."""
    committed = torch.tensor([len(answer) - 1 - answer.prompt_length for answer in arena.answers])
    clean = _acceptance(arena, draws, committed, rounds[CLEAN])
    for kind, needed in rounds.items():
        found = _acceptance(arena, draws, committed, needed)
        for metric, samples in (("al", found), ("al_change", found - clean)):
            one = estimate(samples[0], samples[1:])
            yield _labels(draft, Key(DECODE, PREDECESSOR, TOKEN, kind), ALL, metric) | {
                "first_slot": 1,
                "last_slot": slots,
                "mean": float(one.value),
                "low": float(one.low),
                "high": float(one.high),
                "n": int(needed.sum()),
                "prompts": len(arena.answers),
            }


def _acceptance(
    arena: Arena, draws: Draws, committed: Tensor, rounds: Tensor
) -> Float[Tensor, "one_and_resample"]:
    by_set = []
    for name in arena.set_names:
        members = torch.tensor([i for i, of in enumerate(arena.sets) if of == name])
        pair = committed[members].double(), rounds[members].double()
        by_set.append(ratio_samples(*pair, draws.weights[:, members]))
    return torch.stack(by_set).nanmean(0)


def _labels(draft: str, key: Key, subset: str, metric: str) -> Row:
    return {"draft": draft, **key._asdict(), "subset": subset, "metric": metric}
