"""Readers: ways to turn a hidden state of a draft into a ranking of its vocabulary.

* `lens`: the draft's own final norm and the target's head, nothing trained.
* `Translator`: one linear map in front of that, trained for a depth and shared by all slots (a tuned lens).
* `code_scores`: cosine of a draft's own prediction feature with every token's transfer code.
* `count_scores`: no state at all, only how often tokens follow tokens; the floor.

Readers score; `ranks` says where the label came. A label outside the draft's vocabulary can never be proposed and
counts as a miss in every reader.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from dspine_probe.drafts import Draft
from dspine_probe.errors import ProbeError
from dspine_probe.precision import Precision

Score = Callable[[Float[Tensor, "row d_model"]], Float[Tensor, "row draft_vocab"]]
_ROWS = 1024


@dataclass(frozen=True)
class TranslatorConfig:
    """How translators are trained: Adam on cross-entropy, epochs chosen on the validation rows (0 leaves the lens)."""

    learning_rate: float = 1e-3
    batch: int = 512
    epochs: int = 4
    seed: int = 0


class Translator(nn.Module):
    """h ↦ h + W h + b with W = 0 and b = 0 at the start, so that it begins as the lens."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.change = nn.Linear(size, size)
        nn.init.zeros_(self.change.weight)
        nn.init.zeros_(self.change.bias)

    def forward(self, h: Float[Tensor, "*row d_model"]) -> Float[Tensor, "*row d_model"]:
        return h + self.change(h)


def lens(draft: Draft) -> Score:
    """The draft's final norm, recomputed for the given state, and the target's frozen head."""
    return lambda h: functional.linear(draft.ln_final.normalize(h), draft.head)


def translated(draft: Draft, translator: Translator) -> Score:
    """The lens behind a trained translator."""
    read = lens(draft)
    return lambda h: read(translator(h))


def code_scores(draft: Draft, layer: int) -> Score:
    """Cosine between the draft's own prediction feature after layer `layer` (from 0) and every token's code."""
    assert draft.codes is not None
    codes = draft.codes if draft.vocabulary is None else draft.codes[draft.vocabulary]

    def score(h: Float[Tensor, "row d_model"]) -> Float[Tensor, "row draft_vocab"]:
        feature = draft.prediction_feature(layer, h)
        assert feature is not None
        return functional.normalize(feature.float(), dim=-1) @ codes.T

    return score


def train_translator(
    draft: Draft,
    train: tuple[Float[Tensor, "row d_model"], Int[Tensor, "row"]],
    validation: tuple[Float[Tensor, "row d_model"], Int[Tensor, "row"]],
    config: TranslatorConfig,
    precision: Precision,
) -> Translator:
    """Fit a translator on (states, vocabulary indices); rows whose label the draft cannot propose (−1) are left out.

    The weights of the epoch with the lowest validation loss are kept. The same seed visits rows in the same order.
    """
    states, labels = _proposable(*train)
    translator = Translator(states.shape[-1]).to(states.device, states.dtype)
    optimiser = torch.optim.Adam(translator.parameters(), lr=config.learning_rate)
    generator = torch.Generator().manual_seed(config.seed)
    read = translated(draft, translator)
    best, kept = _loss(read, *_proposable(*validation), precision), _weights(translator)
    for _ in range(config.epochs):
        for rows in torch.randperm(len(labels), generator=generator).split(config.batch):
            optimiser.zero_grad(set_to_none=True)
            _cross_entropy(read, states[rows], labels[rows], "mean", precision).backward()
            optimiser.step()
        loss = _loss(read, *_proposable(*validation), precision)
        if loss < best:
            best, kept = loss, _weights(translator)
    translator.load_state_dict(kept)
    return translator.requires_grad_(False)


@torch.no_grad()
def ranks(score: Score, states: Float[Tensor, "*row d_model"], labels: Int[Tensor, "*row"]) -> Int[Tensor, "*row"]:
    """Place of the label in the reader's ranking, 0 being first; a label of −1 comes last.

    Raises:
        ProbeError: a score is not finite, which would otherwise pass for a hit.
    """
    found = [
        label_ranks(score(rows), wanted)
        for rows, wanted in zip(states.flatten(0, -2).split(_ROWS), labels.flatten().split(_ROWS), strict=True)
    ]
    return torch.cat(found).view(labels.shape)


def label_ranks(scores: Float[Tensor, "row draft_vocab"], labels: Int[Tensor, "row"]) -> Int[Tensor, "row"]:
    """How many tokens score higher than the label; the size of the vocabulary for a label of −1."""
    own = scores.gather(1, labels.clamp(min=0)[:, None])
    # A comparison with NaN is false, so a diverged reader would score every label first. amax passes NaN on.
    if not (scores.amax(dim=-1).isfinite().all() and own.isfinite().all()):
        raise ProbeError("a reader gave scores that are not finite; the draft or its translator has diverged.")
    higher = (scores > own).float().sum(-1).long()
    return torch.where(labels < 0, scores.shape[1], higher)


def count_scores(
    index: Callable[[Tensor], Tensor],
    vocabulary: int,
    texts: list[Int[Tensor, "n"]],
    anchors: Int[Tensor, "row"],
    distance: int | None,
) -> Float[Tensor, "row draft_vocab"]:
    """Scores from counts: how often a token comes `distance` after the anchor's token, then how often at all.

    `index` maps tokens to vocabulary positions (−1 for none). Without `distance` only the second count speaks.
    """
    often = torch.zeros(vocabulary)
    for text in texts:
        known = index(text).cpu()
        often += torch.bincount(known[known >= 0], minlength=vocabulary)
    often /= often.sum().clamp(min=1) + 1  # below 1, so that it only breaks ties between counts
    if distance is None:
        return often.expand(len(anchors), -1)
    kinds, which = anchors.unique(return_inverse=True)
    place = {int(token): row for row, token in enumerate(kinds)}
    counts = often.repeat(len(kinds), 1)
    for text in texts:
        after = index(text[distance:]).cpu()
        for first, second in zip(text.tolist(), after.tolist(), strict=False):
            if second >= 0 and first in place:
                counts[place[first], second] += 1
    return counts[which]


def _proposable(states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    known = labels >= 0
    return states[known], labels[known]


@torch.no_grad()
def _loss(read: Score, states: Tensor, labels: Tensor, precision: Precision) -> float:
    """Mean cross-entropy, 0 where there is nothing to propose."""
    pairs = zip(states.split(_ROWS), labels.split(_ROWS), strict=True)
    total = sum(float(_cross_entropy(read, rows, wanted, "sum", precision)) for rows, wanted in pairs)
    return total / max(1, len(labels))


def _cross_entropy(read: Score, states: Tensor, labels: Tensor, reduction: str, precision: Precision) -> Tensor:
    with precision.autocast(states.device):
        scores = read(states)
    return functional.cross_entropy(scores.float(), labels, reduction=reduction)


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}
