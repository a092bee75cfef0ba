"""The joint experiment's result: accuracy of every arm, contrasts between depths, and what they say of the claim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pandas as pd

from dspine_probe.experiments.common.claims import Claim, published
from dspine_probe.experiments.common.schema import Result, each_row
from dspine_probe.experiments.common.verdicts import NOT_MEASURED, ClaimVerdict, Measurement, compare, judge, over_seeds
from dspine_probe.experiments.common.wording import counted, points
from dspine_probe.experiments.injection_depth.injectors import NOISE, TRANSFER
from dspine_probe.experiments.joint_injection.objective import ALL_SLOTS, ONE_SLOT

DRAFT, HELD_OUT = "causal dflash", "held out"
FACTORS = ("sites", "code", "given", "seed")
TRUE, WRONG, GUESS = "true", "second choice", "own guess"
ACCURACY, CONTRAST, OVER_NOISE, HISTORY = "accuracy", "shallow − late", "shallow − late, over noise", "all − one slot"
_COMMAND = "dspine-probe probe joint-injection --arms ARMS --features FEATURES"


@dataclass(frozen=True, eq=False)
class JointInjectionResult(Result):
    """Rows by where codes enter (`depth`), who sees them (`sites`), what they are, what is received, and the seed."""

    NAME: ClassVar[str] = "joint_injection"
    FACTORS: ClassVar[tuple[str, ...]] = FACTORS

    def contrast(self, metric: str = CONTRAST, sites: str = ALL_SLOTS, code: str = TRANSFER) -> Measurement | None:
        """A contrast over all seeds, as a share; None if it was not measured."""
        rows = self.select(metric=metric, sites=sites, code=code)
        each = [Measurement.of(row) for row in each_row(rows)]
        return over_seeds(each) if each else None

    def curve(self, sites: str = ALL_SLOTS, code: str = TRANSFER, given: str | None = None) -> pd.DataFrame:
        """Accuracy of slots 2…T by depth, over seeds, columns depth, mean, low, high."""
        rows = self.select(metric=ACCURACY, sites=sites, code=code, given=given or (NOISE if code == NOISE else TRUE))
        rows = rows[rows["slot"].str.contains("-") & rows["depth"].notna()]
        found = []
        for depth, part in rows.groupby("depth"):
            joined = over_seeds([Measurement.of(row) for row in each_row(part)])
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
        said, over_noise, alone = published("P2"), self.contrast(OVER_NOISE), self.contrast(CONTRAST, ONE_SLOT)
        specific = NOT_MEASURED if over_noise is None else judge(over_noise, said.smallest)
        readings = {"the same over noise": over_noise, "a code that only its own slot sees": alone}
        controls = [(name, NOT_MEASURED if one is None else _worded(one), None) for name, one in readings.items()]
        blocks = self.config["plan"]["training"]["blocks"]
        return [
            Claim.on(
                "P2",
                here=f"draft and injector trained together on {blocks:,} blocks, codes in all slots, depth 1 − last: "
                f"{_worded(main)}",
                controls=controls,
                verdict=ClaimVerdict(judge(main, said.smallest), specific, compare(main, said.number)),
                command=_COMMAND,
            )
        ]


def _worded(measured: Measurement) -> str:
    return f"{points(measured.estimate)}, {counted(measured.seeds, 'seed')}"
