"""A causal draft and an injector at one depth, trained together: what slots receive, and what they may see of it.

Slots 2…T receive the code of the token before them. Under "all slots" the ordinary block carries the codes: above the
injection a slot also attends to earlier slots that received theirs, so a shallow injection passes on the whole history.
Under "one slot" every receiving slot is a second stream beside the plain block: it sees the plain streams of the slots
before it and itself, so that its own code is all it gains. Both readings train and score the same places.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.drafts import Draft
from dspine_probe.drafts.block import BlockInputs
from dspine_probe.drafts.layers import BlockBias
from dspine_probe.errors import UsageError
from dspine_probe.experiments.injection_depth.blocks import FIRST_SLOT
from dspine_probe.experiments.injection_depth.injectors import NOISE, TRANSFER, CodeInjector, Codes
from dspine_probe.training.anchors import Batch
from dspine_probe.training.losses import head_loss
from dspine_probe.training.objectives.base import Objective, Progress, StepLoss, step_loss, supervised

ALL_SLOTS, ONE_SLOT = "all slots", "one slot"


@dataclass(frozen=True)
class JointArm:
    """One training: where its codes enter (None: nowhere), who sees them, and what they are."""

    depth: int | None
    sites: str = ALL_SLOTS
    code: str = TRANSFER
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sites not in (ALL_SLOTS, ONE_SLOT) or self.code not in (TRANSFER, NOISE):
            raise UsageError(
                f"sites {self.sites!r} and code {self.code!r} are unknown; sites are {ALL_SLOTS!r} or {ONE_SLOT!r}, "
                f"codes {TRANSFER!r} or {NOISE!r}."
            )

    @property
    def name(self) -> str:
        """Name of its folder: `depth-1-all-slots-transfer-0`, `no-injection-0`."""
        if self.depth is None:
            return f"no-injection-{self.seed}"
        return f"depth-{self.depth}-{self.sites}-{self.code}-{self.seed}".replace(" ", "-")


class JointObjective(Objective):
    """Position-weighted cross-entropy of every slot, as DFlash's, with codes injected into slots 2…T on the way."""

    draft: Draft

    def __init__(self, draft: Draft, arm: JointArm, codes: Codes, message: int, *, injector_rate: float = 1.0) -> None:
        """`message` is the injector's size; `injector_rate` its learning rate as a share of the draft's.

        Raises:
            UsageError: the draft is bidirectional, so that its slots would read their own labels, or has no such depth.
        """
        super().__init__()
        if not draft.config.is_causal:
            raise UsageError("a bidirectional block would read its own labels from the codes; give a causal draft.")
        if arm.depth is not None and not 0 <= arm.depth <= len(draft.blocks):
            raise UsageError(f"there is no depth {arm.depth}; this draft has 0…{len(draft.blocks)}.")
        self.draft, self.arm, self.codes, self._rate = draft, arm, codes, injector_rate
        self.injector = None if arm.depth is None else CodeInjector(codes.basis, message)

    @property
    def rate_factors(self) -> dict[str, float]:
        """Learning rates as shares of the run's, by parameter."""
        return {name: self._rate for name, _ in self.named_parameters() if name.startswith("injector.")}

    def forward(self, batch: Batch, progress: Progress) -> StepLoss:
        """The loss of a batch; the step's generator draws the noise of arms that are given noise."""
        labels, weight = supervised(self.draft, batch)
        hidden = self.hidden(batch, self.message(self.arm.code, batch.tokens, progress.generator))
        found = head_loss(hidden.flatten(0, 1), self.draft.head, labels.flatten(), weight.flatten())
        return step_loss(found.loss, found.cross_entropy, found.correct, {}, weight)

    def message(
        self, code: str, tokens: Int[Tensor, "block slot"], generator: torch.Generator
    ) -> Float[Tensor, "block receiving rank"] | None:
        """What slots 2…T receive if `tokens` stand in the block; None in a draft without injection."""
        if self.injector is None:
            return None
        before = tokens[:, FIRST_SLOT - 1 : -1]
        return self.codes.message(code, before.flatten(), generator).unflatten(0, before.shape)

    def hidden(
        self, batch: Batch, message: Float[Tensor, "block receiving rank"] | None
    ) -> Float[Tensor, "block draft_slot d_model"]:
        """Final-normed states of slots 1…T; without a message, those of the plain block."""
        draft, width = self.draft, self.draft.config.block_size
        context = draft.encode_context(batch.taps.to(draft.fc.weight.dtype))
        inputs = draft.block_inputs(context, batch.anchor_tokens, batch.anchors, width)
        x = draft.embed_block(batch.anchor_tokens, width)
        if self.injector is None or message is None:
            return draft.ln_final(_layers(draft, x, inputs, 0, len(draft.blocks))[:, 1:])
        receiving, depth = width - FIRST_SLOT, self.arm.depth
        assert depth is not None
        if self.arm.sites == ONE_SLOT:
            x, inputs = beside_itself(x, inputs)
        x = _layers(draft, x, inputs, 0, depth)
        received = self.injector(x[:, -receiving:].flatten(0, 1), message.flatten(0, 1)).view_as(x[:, -receiving:])
        x = _layers(draft, torch.cat([x[:, :-receiving], received], dim=1), inputs, depth, len(draft.blocks))
        return draft.ln_final(torch.cat([x[:, 1:FIRST_SLOT], x[:, -receiving:]], dim=1))


def beside_itself(
    x: Float[Tensor, "block slot d_model"], inputs: BlockInputs
) -> tuple[Float[Tensor, "block column d_model"], BlockInputs]:
    """Columns 0…T, the plain block, and behind them one more for each of slots 2…T.

    The further column of slot t stands at t's position and sees the plain columns before t and itself; no column sees
    it but itself. Until something is added to it, it is the plain column t.
    """
    width = x.shape[1]
    slot = torch.cat([torch.arange(width), torch.arange(FIRST_SLOT, width)]).to(x.device)
    plain = torch.arange(len(slot), device=x.device) < width
    visible = plain[None, :] & (slot[None, :] < slot[:, None]) | torch.eye(len(slot), dtype=torch.bool, device=x.device)
    block = torch.zeros(visible.shape, dtype=inputs.bias.block.dtype, device=x.device)
    bias = BlockBias(inputs.bias.context, block.masked_fill_(~visible, float("-inf")))
    cos, sin = (table[:, slot] for table in inputs.rotary)
    return x[:, slot], replace(inputs, rotary=(cos, sin), bias=bias)


def _layers(draft: Draft, x: Tensor, inputs: BlockInputs, start: int, stop: int) -> Tensor:
    return draft.run_layers(x, inputs, start, stop).residuals[-1] if stop > start else x
