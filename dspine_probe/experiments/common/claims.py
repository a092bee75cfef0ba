"""One line of the claims ledger: what the paper says, what was measured here, and which controls stand behind it.

Results offer `.claims() -> list[Claim]`, every word and number of it computed from the result. `Claim.on` takes the
paper's side from `PUBLISHED`, so that it is written once. `experiments.ledger` makes `docs/claims.md` of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Self

from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.verdicts import ClaimVerdict


class Published(NamedTuple):
    """A statement of the DSpine publication (arXiv 2609.36173) and its number with the setting it was measured in.

    smallest: the smallest effect that counts here. number: what our estimate is compared with, in its unit, where the
    paper has one. Both as fixed in `docs/protocols.md`.
    """

    id: str
    claim: str
    paper: str
    smallest: float
    number: float | None = None


OUTCOMES = {True: "passed", False: "failed", None: "open"}
"""The ledger's words for a control."""
PUBLISHED = (
    Published(
        "faster",
        "decoding with a draft is faster than plain decoding, and writes the same tokens",
        "up to 4.01 times (Qwen3-8B) and 3.80 times (Qwen3-4B)",
        smallest=0.05,
    ),
    Published(
        "P0",
        "at the same shallow layer, earlier slots predict their token better than later ones",
        "curves, no single figure",
        smallest=0.02,
    ),
    Published(
        "P1",
        "corrupting the immediate predecessor, earlier context intact, lowers the successor's accuracy",
        "−31.8 points, average (Qwen3-4B or 8B)",
        smallest=0.05,
        number=-0.318,
    ),
    Published(
        "P2",
        "the same reliable predecessor feature is worth more when it is injected in shallow layers than late",
        "+14.8 points (Qwen3-4B or 8B)",
        smallest=0.02,
        number=0.148,
    ),
    Published(
        "P3",
        "full-vocabulary CE at intermediate layers lowers acceptance, cosine on codes raises it",
        "AL 3.67 (CE) < 3.75 (none) < 3.85 (cosine), MATH-500",
        smallest=0.010,
    ),
    Published(
        "AL",
        "DSpine over DFlash at an equal training budget, greedy",
        "4.82 / 3.77 = 1.28 (Qwen3-8B, mean of seven sets)",
        smallest=0.02,
        number=0.28,
    ),
    Published(
        "speed",
        "five injection modules cost little time",
        "+0.15 ms a step (GPU, operator fusion, CUDA graph)",
        smallest=0.02,
    ),
)


class Control(NamedTuple):
    """A check that could have overturned the claim: its outcome in words, and whether it was passed (None: open)."""

    name: str
    outcome: str
    passed: bool | None


@dataclass(frozen=True)
class Claim:
    """One claim beside what was measured here.

    here: our number with its interval, n and setting, in words.
    verdict: effect, specificity and size, by the rules of `docs/protocols.md`.
    command: what makes the result again.
    """

    id: str
    claim: str
    paper: str
    here: str
    controls: tuple[Control, ...]
    verdict: ClaimVerdict
    command: str

    @classmethod
    def on(
        cls,
        id: str,
        *,
        here: str,
        controls: Iterable[tuple[str, str, bool | None]] = (),
        verdict: ClaimVerdict,
        command: str,
    ) -> Self:
        """A measurement on the published claim `id`.

        Raises:
            UsageError: the publication makes no claim of that name.
        """
        said = published(id)
        checks = tuple(Control(*control) for control in controls)
        return cls(id, said.claim, said.paper, here, checks, verdict, command)


def published(id: str) -> Published:
    """The published claim of that name.

    Raises:
        UsageError: the publication makes no claim of that name.
    """
    found = next((one for one in PUBLISHED if one.id == id), None)
    if found is None:
        known = ", ".join(one.id for one in PUBLISHED)
        raise UsageError(f"there is no published claim {id!r}; those in the ledger are {known}")
    return found
