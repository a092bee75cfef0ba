"""The blocks of one batch inside a draft, and the places in them that receive an injection and are scored.

Depth 0 is the block embedding, depth l the residual stream after layer l (and after what follows it in the draft).
`BlockPass.of` runs a batch once and keeps the stream of every depth, so that whatever is injected at depth l costs the
layers above l alone. `Sites` names (block, slot) places; `one_slot` and `every_slot` are the two ways to choose them.

A bidirectional block needs `one_slot`: if all slots receive their predecessor's code at once, slot t + 1 holds the code
of slot t's own label, and any layer above the injection lets slot t read it. Shallow depths have more such layers, so
the leak looks like the very effect that is being measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.drafts import Draft
from dspine_probe.drafts.block import BlockInputs
from dspine_probe.errors import UsageError
from dspine_probe.training.anchors import Batch

FIRST_SLOT = 2
"""The first slot whose predecessor is drafted; slot 1 follows the anchor, which every draft sees."""


@dataclass(frozen=True)
class Sites:
    """Places in a batch of blocks; site i is slot `slots[i]` of block `blocks[i]`."""

    blocks: Int[Tensor, "site"]
    slots: Int[Tensor, "site"]

    def of(self, x: Float[Tensor, "block slot *rest"]) -> Float[Tensor, "site *rest"]:
        """What stands at the sites."""
        return x[self.blocks, self.slots]

    def before(self, x: Float[Tensor, "block slot *rest"]) -> Float[Tensor, "site *rest"]:
        """What stands one slot before each site."""
        return x[self.blocks, self.slots - 1]

    def put(
        self, x: Float[Tensor, "block slot d_model"], new: Float[Tensor, "site d_model"]
    ) -> Float[Tensor, "block slot d_model"]:
        """A copy of `x` with the sites replaced."""
        return x.index_put((self.blocks, self.slots), new)


def one_slot(slots: Int[Tensor, "block"]) -> Sites:
    """One site a block, at the given slots."""
    return Sites(torch.arange(len(slots), device=slots.device), slots)


def every_slot(blocks: int, width: int, device: torch.device | None = None) -> Sites:
    """Slots 2…T of every block, all at once: sound in a causal block, a label leak in a bidirectional one."""
    slots = torch.arange(FIRST_SLOT, width, device=device)
    rows = torch.arange(blocks, device=device)
    return Sites(rows.repeat_interleave(len(slots)), slots.repeat(blocks))


def refuse_leak(draft: Draft, *, all_slots: bool) -> None:
    """Refuse to inject into all slots of a bidirectional block.

    Raises:
        UsageError: explaining the leak.
    """
    if all_slots and not draft.config.is_causal:
        raise UsageError(
            "all slots of a bidirectional block cannot receive their predecessor's code at once: slot t would read its "
            "own label from slot t + 1; inject into single slots or use a causal draft (group 'leak' shows the fault)."
        )


@dataclass(frozen=True)
class BlockPass:
    """A batch in a draft: what its layers need, and the residual stream at depths 0… as far as it was run."""

    draft: Draft
    batch: Batch
    inputs: BlockInputs
    stream: tuple[Float[Tensor, "block slot d_model"], ...]

    @classmethod
    def of(cls, draft: Draft, batch: Batch, *, depth: int | None = None) -> BlockPass:
        """Run `batch` up to `depth`, by default through all layers."""
        width = draft.config.block_size
        context = draft.encode_context(batch.taps.to(draft.fc.weight.dtype))
        inputs = draft.block_inputs(context, batch.anchor_tokens, batch.anchors, width)
        x = draft.embed_block(batch.anchor_tokens, width)
        return cls(draft, batch, inputs, (x, *draft.run_layers(x, inputs, 0, depth).residuals))

    def layers(
        self, x: Float[Tensor, "block slot d_model"], start: int, stop: int
    ) -> Float[Tensor, "block slot d_model"]:
        """From the stream at depth `start` to that at depth `stop`."""
        return self.draft.run_layers(x, self.inputs, start, stop).residuals[-1] if stop > start else x

    def scores(self, x: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows draft_vocab"]:
        """Scores of last-layer states under the final norm and the target's head."""
        return self.draft.logits(self.draft.ln_final(x))

    def guesses(self) -> Int[Tensor, "block slot"]:
        """What the draft itself predicts at every slot, without injection; slot 0 holds the anchor."""
        with torch.no_grad():
            best = self.draft.to_tokens(self.scores(self.stream[-1][:, 1:]).argmax(dim=-1))
        return torch.cat([self.batch.tokens[:, :1], best], dim=1)

    def labels(self, sites: Sites) -> Int[Tensor, "site"]:
        """Places of the sites' tokens in the draft's vocabulary, −1 outside it."""
        return self.draft.to_index(sites.of(self.batch.tokens))

    def repeated(self, times: int) -> BlockPass:
        """Every block `times` times in a row, on the same context: one copy for each slot that is injected alone."""
        at = (self.batch.anchor_tokens, self.batch.anchors)
        tokens, anchors = (x.repeat_interleave(times, dim=1) for x in at)
        width = self.draft.config.block_size
        return replace(
            self,
            inputs=self.draft.block_inputs(self.inputs.context, tokens, anchors, width),
            stream=tuple(x.repeat_interleave(times, dim=0) for x in self.stream),
        )
