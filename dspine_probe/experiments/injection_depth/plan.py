"""What to train: which arms, on how many blocks, at which rates."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments.injection_depth.arms import GROUPS


@dataclass(frozen=True)
class InjectionPlan:
    """Budget and arms. Every step has `sequences` × `anchors` blocks.

    all_slots: inject into all slots of a block at once, which only a causal draft allows; by default wherever it does.
    rates: learning rates tried for each arm; pretrained and very wide parts get `slow` times as much.
    rank, message: sizes of code and message; by default a DSpine's own, else a third and two ninths of the hidden size.
    """

    blocks: int = 15_360
    trial_blocks: int = 3_072
    held_out_blocks: int = 1_024
    sequences: int = 8
    anchors: int = 8
    rates: tuple[float, ...] = (2e-3, 5e-3, 1.2e-2)
    slow: float = 0.05
    groups: tuple[str, ...] = GROUPS
    depths: tuple[int | str, ...] | None = None
    control_depths: tuple[int, ...] | None = None
    all_slots: bool | None = None
    rank: int | None = None
    message: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("blocks", "trial_blocks", "held_out_blocks"):
            if getattr(self, name) < self.step_blocks:
                raise UsageError(
                    f"{name} is {getattr(self, name)}, less than one step of {self.sequences} × {self.anchors} blocks."
                )
        if not self.rates or min(self.rates) <= 0:
            raise UsageError(f"rates are {list(self.rates)}; give one or more positive learning rates.")

    @property
    def step_blocks(self) -> int:
        """Blocks of one step."""
        return self.sequences * self.anchors

    def steps(self, blocks: int) -> int:
        """Steps that spend a budget of blocks."""
        return math.ceil(blocks / self.step_blocks)

    def sizes(self, draft: Draft) -> tuple[int, int]:
        """Rank of the codes and size of the message."""
        spine, width = draft.config.dspine, draft.config.hidden_size
        rank = self.rank or (spine.transfer_rank if spine else width // 3)
        return rank, self.message or (spine.message_size if spine else width * 2 // 9)
