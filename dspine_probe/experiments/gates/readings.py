"""What a DSpine's gates do on every block of an arena, and what each injection is worth to the slot it writes to.

`read_gates` runs the draft once over the arena and keeps every gate, whether each slot's own prediction is right, and
whether its token would be kept. The gain of an injection is the log-probability of the slot's label with it minus
without it: without it at one layer (`sweep` with zero writes), or at all layers of that slot. Only the slot's own
injection is taken away, its predecessors keep theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformer_lens.hook_points import HookPoint

from dspine_probe.drafts import Context, DSpine
from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.arena import Arena
from dspine_probe.experiments.common.intervals import Scores
from dspine_probe.experiments.common.progress import Progress, silent
from dspine_probe.experiments.patching import Blocks, Site, sweep
from dspine_probe.hooks import HookedDraft
from dspine_probe.training.anchors import Batch

LAST_WRITE_GATE = "last_write.hook_gate"


@dataclass(frozen=True)
class GateReadings:
    """One draft's gates on the real blocks of an arena, in its order; NaN where something was not measured.

    gates: at [l, block, t − 1], the gate of slot t in layer l + 1, channel by channel.
    last_write: the gates of the repeated last write, one for each candidate predecessor.
    written: length of what the injection adds over the length of the stream it is added to.
    right: whether the slot's best unary token is the label, 0 or 1.
    log_prob: of the label by unary scores; NaN when the draft cannot propose it.
    kept: 1 where verification would keep the drafted token, 0 where it is the first one refused, NaN behind that.
    gain: log-probability of the label with the slot's own injection minus without it; layers 1…L, then all of them.
    labels: the tokens that slots 1…T should predict.
    """

    gates: Float[Tensor, "layer block draft_slot message"]
    last_write: Float[Tensor, "block draft_slot candidate message"]
    written: Float[Tensor, "layer block draft_slot"]
    right: Scores
    log_prob: Scores
    kept: Scores
    gain: Float[Tensor, "layer_and_all block draft_slot"]
    labels: Int[Tensor, "block draft_slot"]

    @property
    def predecessor_right(self) -> Scores:
        """Whether slot t − 1's own best token is right; NaN for slot 1, whose predecessor is given."""
        before = self.right.roll(1, dims=1)
        before[:, 0] = torch.nan
        return before


class Outcome(NamedTuple):
    """What a pass leaves right, by unary scores and by the greedy walk, and the label's log-probability."""

    right: Scores
    right_walked: Scores
    log_prob: Scores


def gate_names(layers: int) -> list[str]:
    """The gates of layers 1…L."""
    return [f"blocks.{layer}.inject.hook_gate" for layer in range(layers)]


def read_gates(
    hooked: HookedDraft, arena: Arena, *, answers_per_batch: int = 8, report: Progress = silent
) -> GateReadings:
    """Read one DSpine over the whole arena; `report("gates", blocks done, blocks in all)` is called.

    Raises:
        UsageError: the draft is no DSpine.
    """
    draft, parts, done = spine_of(hooked), [], 0
    for batch, context in contexts(draft, arena, answers_per_batch):
        parts.append(_read_batch(hooked, draft, batch, context))
        done += len(parts[-1].right)
        report("gates", done, len(arena.prompt))
    axis = {"gates": 1, "written": 1, "gain": 1}
    names = GateReadings.__dataclass_fields__
    return GateReadings(**{n: torch.cat([getattr(p, n) for p in parts], axis.get(n, 0)) for n in names})


def contexts(draft: DSpine, arena: Arena, answers_per_batch: int) -> Iterator[tuple[Batch, Context]]:
    """The arena's batches with their contexts, encoded once and good for every condition."""
    weight = draft.fc.weight
    for batch in arena.batches(answers_per_batch=answers_per_batch):
        moved = batch.to(weight.device)
        with torch.no_grad():
            yield moved, draft.encode_context(moved.taps.to(weight.dtype))


@torch.no_grad()
def outcome(draft: DSpine, batch: Batch, context: Context) -> Outcome:
    """Predictions for the real blocks of a batch, under whatever hooks are on."""
    states = draft.run(context, batch.anchor_tokens, batch.anchors)
    labels = batch.tokens[:, 1:]
    logits = draft.logits(states.hidden[:, 1:])
    right = draft.to_tokens(logits.argmax(-1)) == labels
    walked = draft.transition_cache(states, batch.anchor_tokens).walk_greedy() == labels
    found, real = (right.float(), walked.float(), _label_log_prob(draft, logits, labels)), batch.real.flatten()
    return Outcome(*(scores[real].cpu() for scores in found))


def _read_batch(hooked: HookedDraft, draft: DSpine, batch: Batch, context: Context) -> GateReadings:
    layers, gates, real = range(len(draft.blocks)), gate_names(len(draft.blocks)), batch.real.flatten()
    writes = [f"blocks.{layer}.inject.hook_out" for layer in layers]
    streams = [f"blocks.{layer}.hook_resid_post" for layer in layers]
    cache, caching, _ = hooked.get_caching_hooks([*gates, LAST_WRITE_GATE, *writes, *streams])
    with hooked.hooks(caching):
        found = outcome(draft, batch, context)
    pairs = zip(writes, streams, strict=True)
    written = [cache[write].norm(dim=-1) / cache[stream][:, 1:].norm(dim=-1) for write, stream in pairs]
    alone = _without_own_injection(hooked, draft, batch, context)[:, real].cpu()
    reached = F.pad(found.right_walked[:, :-1].cumprod(1), (1, 0), value=1.0)
    return GateReadings(
        gates=torch.stack([cache[name][real] for name in gates]).cpu(),
        last_write=cache[LAST_WRITE_GATE][real].cpu(),
        written=torch.stack(written)[:, real].cpu(),
        right=found.right,
        log_prob=found.log_prob,
        kept=torch.where(reached.bool(), found.right_walked, torch.nan),
        gain=found.log_prob - alone,
        labels=batch.tokens[real, 1:].cpu(),
    )


def _without_own_injection(
    hooked: HookedDraft, draft: DSpine, batch: Batch, context: Context
) -> Float[Tensor, "layer_and_all block draft_slot"]:
    """Log-probability of every slot's label when that slot alone receives no message: per layer, then at all."""
    layers, slots, blocks = len(draft.blocks), draft.config.num_slots, batch.anchors.numel()
    writes = [f"blocks.{layer}.inject.hook_out" for layer in range(layers)]
    sites = [Site(name, slot) for name in writes for slot in range(1, slots + 1)]
    nothing = torch.zeros(blocks, slots, draft.config.hidden_size, device=context.keys[0].device)
    labels = batch.tokens[:, 1:]

    def score(hidden: Tensor, block: Tensor) -> Tensor:
        return _label_log_prob(draft, draft.logits(hidden), labels[block])

    run = Blocks(context, batch.anchor_tokens, batch.anchors)
    one = sweep(draft, run, sites, dict.fromkeys(writes, nothing), score).patched
    one = one.view(layers, slots, blocks, slots).diagonal(dim1=1, dim2=3)
    every = []
    for slot in range(slots):

        def silence(written: Tensor, hook: HookPoint, slot: int = slot) -> Tensor:
            return written.index_fill(1, torch.tensor([slot], device=written.device), 0.0)

        with hooked.hooks([(writes, silence)]):
            states = draft.run(context, batch.anchor_tokens, batch.anchors)
        hidden = states.hidden[:, 1 + slot : 2 + slot]
        every.append(_label_log_prob(draft, draft.logits(hidden), labels[:, slot : slot + 1]))
    return torch.cat([one, torch.cat(every, dim=1)[None]])


def _label_log_prob(
    draft: DSpine, logits: Float[Tensor, "*block draft_vocab"], labels: Int[Tensor, "*block"]
) -> Float[Tensor, "*block"]:
    index = draft.to_index(labels)
    chosen = logits.float().gather(-1, index.clamp(min=0)[..., None]).squeeze(-1)
    return torch.where(index < 0, torch.nan, chosen - logits.float().logsumexp(-1))


def spine_of(hooked: HookedDraft) -> DSpine:
    """The hooked draft, which must be a DSpine."""
    if not isinstance(hooked.draft, DSpine):
        raise UsageError(f"a {type(hooked.draft).__name__} has no gates; give a DSpine.")
    return hooked.draft
