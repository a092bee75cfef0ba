"""The joint experiment's result: accuracy of every arm, contrasts between depths, and what they say of the claim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pandas as pd

from dspine_probe.experiments.common.claims import Claim
from dspine_probe.experiments.common.schema import Result, each_row
from dspine_probe.experiments.common.verdicts import Judgement, Measurement, compare, judge, over_seeds
from dspine_probe.experiments.common.wording import points
from dspine_probe.experiments.injection_depth.injectors import NOISE, TRANSFER
from dspine_probe.experiments.joint_injection.objective import ALL_SLOTS, ONE_SLOT

DRAFT, HELD_OUT = "causal dflash", "held out"
FACTORS = ("sites", "code", "given", "seed")
TRUE, WRONG, GUESS = "true", "second choice", "own guess"
ACCURACY, CONTRAST, OVER_NOISE, HISTORY = "accuracy", "shallow − late", "shallow − late, over noise", "all − one slot"
PUBLISHED, SMALLEST = 0.148, 0.02
"""The paper's gain of early over late injection, and the smallest that counts here (docs/protocols.md, P2)."""
_HOLDS = {"shown": True, "negligible": False, "reversed": False, "undecided": None}
_COMMAND = "dspine-probe probe joint-injection --arms ARMS --features FEATURES"


@dataclass(frozen=True, eq=False)
class JointInjectionResult(Result):
    """Rows by where codes enter (`depth`), who sees them (`sites`), what they are, what is received, and the seed."""

    NAME: ClassVar[str] = "joint_injection"
    FACTORS: ClassVar[tuple[str, ...]] = FACTORS

    def contrast(self, metric: str = CONTRAST, sites: str = ALL_SLOTS, code: str = TRANSFER) -> Measurement | None:
        """A contrast over all seeds, as a share; None if it was not measured."""
        rows = self.select(metric=metric, sites=sites, code=code)
        each = [Measurement.from_interval(row["mean"], row["low"], row["high"]) for row in each_row(rows)]
        return over_seeds(each) if each else None

    def curve(self, sites: str = ALL_SLOTS, code: str = TRANSFER, given: str | None = None) -> pd.DataFrame:
        """Accuracy of slots 2…T by depth, over seeds, columns depth, mean, low, high."""
        rows = self.select(metric=ACCURACY, sites=sites, code=code, given=given or (NOISE if code == NOISE else TRUE))
        rows = rows[rows["slot"].str.contains("-") & rows["depth"].notna()]
        found = []
        for depth, part in rows.groupby("depth"):
            joined = over_seeds(
                [Measurement.from_interval(row["mean"], row["low"], row["high"]) for row in each_row(part)]
            )
            low, high = joined.interval()
            found.append({"depth": int(depth), "mean": joined.value, "low": low, "high": high})
        return pd.DataFrame(found, columns=["depth", "mean", "low", "high"])

    def findings(self) -> list[str]:
        """The contrast in each reading, and what history adds."""
        sentences = {
            "shallow minus late injection, codes in all slots": (CONTRAST, ALL_SLOTS, TRANSFER),
            "the same beyond what noise in place of codes gives": (OVER_NOISE, ALL_SLOTS, TRANSFER),
            "with a code that only its own slot sees": (CONTRAST, ONE_SLOT, TRANSFER),
            "what all slots together gain over one alone": (HISTORY, ALL_SLOTS, TRANSFER),
        }
        found = {text: self.contrast(*wanted) for text, wanted in sentences.items()}
        return [f"{text}: {_worded(one)}." for text, one in found.items() if one is not None]

    def claims(self) -> list[Claim]:
        """P2 in the reading that decides it: draft and injector trained together, codes in all slots."""
        main = self.contrast()
        if main is None:
            return []
        over_noise, alone = self.contrast(OVER_NOISE), self.contrast(CONTRAST, ONE_SLOT)
        controls = []
        for name, one in {"the same over noise": over_noise, "a code that only its own slot sees": alone}.items():
            word: Judgement = "undecided" if one is None else judge(one, SMALLEST)
            controls.append((name, "not measured" if one is None else f"{_worded(one)}, {word}", _HOLDS[word]))
        blocks, size = self.config["plan"]["training"]["blocks"], compare(main, PUBLISHED)
        return [
            Claim.on(
                "P2",
                here=f"draft and injector trained together on {blocks:,} blocks, codes in all slots, depth 1 − last: "
                f"{_worded(main)}; size: {size}",
                controls=controls,
                holds=_HOLDS[judge(main, SMALLEST)],
                command=_COMMAND,
            )
        ]


def _worded(measured: Measurement) -> str:
    low, high = measured.interval()
    row = pd.Series({"mean": measured.value, "low": low, "high": high})
    return f"{points(row)}, {measured.seeds} seed{'s' * (measured.seeds != 1)}"
