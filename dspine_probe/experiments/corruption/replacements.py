"""What replaces a token when it is corrupted: one replacement of each kind for every token of an answer.

* "rank 2": the target's best other token at that position, a mistake a draft would make;
* "frequency": a random token about as frequent, which is seldom plausible there;
* "mask": the draft's mask token, and "zero": no embedding at all (id NOTHING), which remove and do not mislead.

Entry points: `replacement_tokens` for one answer, `response_counts` and `FrequencyBands` for what "as frequent" means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.experiments.common.answers import second_choices
from dspine_probe.files import data_dir
from dspine_probe.target import Target
from dspine_probe.training.corpus import TOKENS
from dspine_probe.training.features import Sequence as Answer

RANK_2, FREQUENCY, MASK, ZERO = "rank 2", "frequency", "mask", "zero"
KINDS = (RANK_2, FREQUENCY, MASK, ZERO)
NOTHING = -1
"""The id that `embed` takes to a zero vector."""
SHIPPED_CORPORA = ("mixed", "synth")
_BANDS = 10


def embed(table: Float[Tensor, "vocab size"], tokens: Int[Tensor, "*place"]) -> Float[Tensor, "*place size"]:
    """Rows of an embedding or code table, zero where the token is NOTHING."""
    return F.embedding(tokens.clamp(min=0), table).masked_fill((tokens == NOTHING)[..., None], 0.0)


@dataclass(frozen=True)
class FrequencyBands:
    """Token ids from common to rare, cut into at most ten bands that hold about a tenth of the counted text each.

    order: ids that were counted. ends: counts up to and including each of them. band_ends: the same at the last id of
    every band. A band has two ids or more, so that each of them has a neighbour.
    """

    order: Int[Tensor, "seen"]
    ends: Int[Tensor, "seen"]
    band_ends: Int[Tensor, "band"]

    @classmethod
    def of(cls, counts: Int[Tensor, "vocab"]) -> FrequencyBands:
        """Bands of a count for every token id.

        Raises:
            UsageError: fewer than two ids have a count.
        """
        ranked = counts.sort(descending=True, stable=True)
        seen = int((counts > 0).sum())
        if seen < 2:
            raise UsageError(f"{seen} tokens have a count; matching by frequency needs counts of two or more.")
        ends = ranked.values[:seen].cumsum(0)
        cuts = torch.searchsorted(ends, ends[-1] * torch.arange(1, _BANDS + 1) / _BANDS)
        last: list[int] = []
        for cut in cuts.clamp(max=seen - 1).tolist():
            if cut - (last[-1] if last else -1) >= 2:
                last.append(cut)
        last[-1:] = [seen - 1]
        return cls(ranked.indices[:seen], ends, ends[torch.tensor(last)])

    def draw(self, tokens: Int[Tensor, "place"], generator: torch.Generator) -> Int[Tensor, "place"]:
        """Another token of each one's band, by its share of the text; one never counted gets one of the rarest."""
        index = torch.full((int(max(tokens.max(), self.order.max())) + 1,), -1)
        index[self.order] = torch.arange(len(self.order))
        place, rarest = index[tokens], len(self.band_ends) - 1
        starts, band_starts = F.pad(self.ends, (1, 0)), F.pad(self.band_ends, (1, 0))
        start, width = starts[place.clamp(min=0)], (starts[1:] - starts[:-1])[place.clamp(min=0)]
        width = torch.where(place < 0, 0, width)
        band = torch.where(place < 0, rarest, torch.searchsorted(self.band_ends, start, right=True))
        others = self.band_ends[band] - band_starts[band] - width
        drawn = (torch.rand(len(tokens), generator=generator, dtype=torch.float64) * others).long()
        drawn = band_starts[band] + drawn.minimum(others - 1)
        # The token's own share is skipped.
        drawn += torch.where((place >= 0) & (drawn >= start), width, 0)
        return self.order[torch.searchsorted(self.ends, drawn, right=True)]


def response_counts(vocab_size: int) -> Int[Tensor, "vocab"]:
    """How often each token id occurs in the responses of the shipped corpora.

    Raises:
        UsageError: a corpus holds ids that the target does not have.
        ProbeError: a corpus is missing or damaged.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for folder in (data_dir() / "corpora" / name for name in SHIPPED_CORPORA):
        try:
            # Reading the corpus whole would ask for prompts that it may not hold.
            found = torch.bincount(load_file(folder / TOKENS)["response"].long(), minlength=vocab_size)
        except (OSError, KeyError, SafetensorError) as error:
            raise ProbeError(
                f"the corpus in {folder} is missing or damaged ({error}); pack it again, or pass counts of your own."
            ) from error
        if len(found) > vocab_size:
            raise UsageError(
                f"{folder} holds token {len(found) - 1} and the target has {vocab_size}; pass counts of its own text."
            )
        counts += found
    return counts


def replacement_tokens(
    target: Target,
    answer: Answer,
    kinds: Sequence[str],
    *,
    mask_token: int,
    bands: FrequencyBands | None,
    generator: torch.Generator,
) -> dict[str, Int[Tensor, "n"]]:
    """For every kind, what replaces each token of the response; prompt tokens stay as they are.

    Args:
        answer: with the target's final states, from which its second choices are read.
        bands: needed for the kind "frequency".

    Raises:
        UsageError: a kind would leave a token of the response as it is.
    """
    start, own = answer.prompt_length, answer.tokens[answer.prompt_length :]
    found = {}
    for kind in kinds:
        if kind == RANK_2:
            replaced = second_choices(target, answer.final[start - 1 : -1], own)
        elif kind == FREQUENCY:
            if bands is None:
                raise UsageError("the kind 'frequency' needs counts of tokens; pass `counts` or leave it out.")
            replaced = bands.draw(own, generator)
        else:
            replaced = torch.full_like(own, mask_token if kind == MASK else NOTHING)
        same = (replaced == own).nonzero().flatten().tolist()
        if same:
            raise UsageError(
                f"the corruption {kind!r} leaves token {int(own[same[0]])} of answer {answer.id!r} as it is (position "
                f"{start + same[0]}); it must differ everywhere, so choose another kind or mask token."
            )
        found[kind] = torch.cat([answer.tokens[:start], replaced])
    return found
