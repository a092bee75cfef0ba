"""The blocks of one batch inside a draft, layer by layer, with places where something may be added on the way.

Depth 0 is the block embedding, depth l the residual stream after layer l (and after a DSpine's own injection there).
`BlockPass.of` runs a batch once and keeps the stream of every depth, so that whatever is injected at depth l costs the
layers above l alone. `Sites` names the (block, slot) places that receive an injection and are scored; `one_slot` and
`every_slot` are the two ways to choose them.

A bidirectional block needs `one_slot`: if all slots receive their predecessor's code at once, slot t + 1 holds the code
of slot t's own label, and any layer above the injection lets slot t read it. Shallow depths have more such layers, so
the leak looks like the very effect that is being measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.drafts import Context, Draft, DSpine
from dspine_probe.drafts.layers import BlockBias, Rotary
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
    """A batch in a draft: what its layers need, and the stream without injection.

    stream: the residual stream at depths 0…, as far as it was run.
    anchor_code: for a DSpine, the code its slot 1 receives.
    """

    draft: Draft
    taps: Float[Tensor, "batch ctx taps_d_model"]
    context: Context
    rotary: Rotary
    bias: BlockBias
    anchor_code: Float[Tensor, "block 1 rank"] | None
    stream: tuple[Float[Tensor, "block slot d_model"], ...]

    @classmethod
    def of(cls, draft: Draft, batch: Batch, *, depth: int | None = None) -> BlockPass:
        """Run `batch` up to `depth`, by default through all layers."""
        width, taps = draft.config.block_size, batch.taps.to(draft.fc.weight.dtype)
        context = draft.encode_context(taps)
        rotary, bias = draft.block_inputs(context, batch.anchors, width)
        x = draft.embed_block(batch.anchor_tokens, width)
        code = None
        if isinstance(draft, DSpine):
            code = draft.scaled_codes(batch.anchor_tokens.flatten(), x.dtype)[:, None]
        found = cls(draft, taps, context, rotary, bias, code, (x,))
        for layer in range(draft.config.num_hidden_layers if depth is None else depth):
            found = replace(found, stream=(*found.stream, found.layer(layer, found.stream[-1])))
        return found

    def layer(
        self, index: int, x: Float[Tensor, "block slot d_model"]
    ) -> Float[Tensor, "block slot d_model"]:
        """From depth `index` to the next."""
        keys, values = self.context.keys[index], self.context.values[index]
        x = self.draft.blocks[index](x, keys, values, self.rotary, self.bias)
        if isinstance(self.draft, DSpine) and self.anchor_code is not None:
            x = self.draft.inject(index, x, self.anchor_code)
        return x

    def scores(self, x: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows draft_vocab"]:
        """Scores of last-layer states under the final norm and the target's head."""
        return self.draft.logits(self.draft.ln_final(x))

    def repeated(self, times: int) -> BlockPass:
        """Every block `times` times in a row, on the same context: one copy for each slot that is injected alone."""
        cos, sin = (part.repeat_interleave(times, dim=0) for part in self.rotary)
        bias = BlockBias(self.bias.context.repeat_interleave(times, dim=2), self.bias.block)
        code = self.anchor_code
        return replace(
            self,
            rotary=(cos, sin),
            bias=bias,
            anchor_code=None if code is None else code.repeat_interleave(times, dim=0),
            stream=tuple(x.repeat_interleave(times, dim=0) for x in self.stream),
        )
