"""How the lab shows what it made: sentences in a terminal; sentences, figures and tables in a notebook.

`Shown` puts a result beside its figures, which the result itself knows nothing of; `Told` is a decoded answer with its
tokens marked by who wrote them. Both are plain objects: what was measured is in `.result` and `.generation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pandas as pd
from IPython.display import display

from dspine_probe.decoding.generation import Generation
from dspine_probe.experiments.common.markup import folded, listed
from dspine_probe.target import Target

if TYPE_CHECKING:
    from dspine_probe.plots.figure_block import FigureBlock

Measured = TypeVar("Measured")
_KEPT = "border-bottom:2px solid #0072B2"
_OWN = "border-bottom:2px dotted #D55E00;font-weight:bold"


@dataclass(frozen=True, repr=False)
class Shown(Generic[Measured]):
    """What was measured, what it says, and its figures by name, in reading order."""

    result: Measured
    sentences: Sequence[str]
    figures: Mapping[str, FigureBlock]

    def __repr__(self) -> str:
        names = f"Figures: {', '.join(self.figures)}." if self.figures else "No figures."
        return "\n".join([*(f"- {sentence}" for sentence in self.sentences), names])

    def _repr_html_(self) -> str:
        """The sentences and, for each figure, its words and table: what remains where no figure can be drawn."""
        parts = (bundle.get("text/html", "") for block in self.figures.values() for bundle in block.bundles())
        return f"{listed(self.sentences)}{''.join(parts)}"

    def _ipython_display_(self) -> None:
        display({"text/html": listed(self.sentences), "text/plain": repr(self)}, raw=True)
        for block in self.figures.values():
            block._ipython_display_()


@dataclass(frozen=True, repr=False)
class Told:
    """An answer in words: which tokens the draft wrote, which the target, and what each round tried."""

    generation: Generation
    target: Target
    draft: str | None

    @property
    def text(self) -> str:
        """The answer without special tokens."""
        return self.target.decode(self.generation.tokens, skip_special=True)

    @property
    def summary(self) -> str:
        """Tokens per round and tokens per second, in a sentence."""
        made, name = self.generation, self.draft or "no draft"
        length = f"{made.acceptance_length:.2f} tokens per round" if made.rounds else "no round"
        return (
            f"{name}: {length}, {len(made.tokens)} tokens in {len(made.rounds)} rounds, "
            f"{made.tokens_per_second:.0f} tokens per second (ended by {made.finish})"
        )

    def rounds(self) -> pd.DataFrame:
        """One row a round: the block that was drafted, how many of its tokens were kept, and the target's own token."""
        rows = [
            {
                "round": number,
                "drafted": "·".join(self._word(token) for token in one.drafted),
                "kept": one.accepted,
                "target's own": "".join(self._word(token) for token in one.committed[one.accepted :]),
            }
            for number, one in enumerate(self.generation.rounds, start=1)
        ]
        return pd.DataFrame(rows, columns=["round", "drafted", "kept", "target's own"])

    def __repr__(self) -> str:
        return f"{self.text}\n[{self.summary}]"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        own = [True] + [i >= one.accepted for one in self.generation.rounds for i in range(len(one.committed))]
        spans = "".join(
            f'<span style="{_OWN if wrote else _KEPT}" title="{"the target" if wrote else "the draft"}">'
            f"{escape(self.target.decode([token]))}</span>"
            for token, wrote in zip(self.generation.tokens, own, strict=True)
        )
        table = folded(self.rounds(), f"Table: {len(self.generation.rounds)} rounds")
        html = (
            f'<p style="white-space:pre-wrap">{spans}</p><p>{escape(self.summary)}. <span style="{_KEPT}">Solid '
            f'line</span>: drafted and kept; <span style="{_OWN}">bold over dots</span>: the target\'s own.</p>'
            f"{table}"
        )
        return {"text/plain": repr(self), "text/html": html}

    def _word(self, token: int) -> str:
        return self.target.decode([token]).replace("\n", "↵")
