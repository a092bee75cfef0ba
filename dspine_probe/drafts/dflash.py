"""DFlash: every slot of the block predicted in parallel, each from its own marginal (arXiv 2602.06036)."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.drafts.backbone import Backbone, BlockStates, Context


@dataclass(frozen=True)
class FlashStates(BlockStates):
    """Final-normed states and, if kept, the residual stream after each layer."""

    residuals: tuple[Float[Tensor, "block slot d_model"], ...] = ()


class DFlash(Backbone):
    """The plain parallel draft; also the trunk that DSpine reduces to when its writes are zero."""

    def run(
        self,
        context: Context,
        anchor_tokens: Int[Tensor, "batch anchor"],
        anchors: Int[Tensor, "batch anchor"],
        *,
        width: int | None = None,
        visible: Int[Tensor, "block draft_slot"] | None = None,
        keep_residuals: bool = False,
    ) -> FlashStates:
        """One parallel pass over all blocks. `anchors` are the positions of `anchor_tokens`; `width` ≤ block_size.

        `visible` shows given tokens in slots 1…T (−1: the mask); `keep_residuals` keeps the stream after each layer.
        """
        width = width or self.config.block_size
        rotary, bias = self.block_inputs(context, anchors, width)
        x = self.embed_block(anchor_tokens, width, visible)
        residuals = []
        for block, keys, values in zip(self.blocks, context.keys, context.values, strict=True):
            x = block(x, keys, values, rotary, bias)
            if keep_residuals:
                residuals.append(x)
        return FlashStates(self.ln_final(x), tuple(residuals))

    def draft_greedy(
        self,
        context: Context,
        anchor_tokens: Int[Tensor, "batch anchor"],
        anchors: Int[Tensor, "batch anchor"],
        *,
        width: int | None = None,
    ) -> Int[Tensor, "block draft_slot"]:
        """The block's most likely tokens for slots 1…T, each slot on its own."""
        states = self.run(context, anchor_tokens, anchors, width=width)
        return self.to_tokens(self.logits(states.hidden[:, 1:]).argmax(dim=-1))
