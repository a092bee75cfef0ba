"""What is probed: states of every slot at every depth, and the questions asked of them.

Depth 0 is the block embedding, depth l the residual stream after layer l and what follows it, unnormed, in fp32.
Questions are for tokens of the target's own answer around the slot (its own, its predecessor, its successor), the
slot's index, and whether the slot's drafted token would be accepted. Tokens are asked for among the classes commonest
in the training prompts; rows with another label are left out, and how many is on record. Entry points: `read_rows`,
`ask`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.arena import Arena
from dspine_probe.experiments.common.linear_probe import UNASKED, class_of, commonest
from dspine_probe.experiments.patching import residual_names
from dspine_probe.hooks import HookedDraft

OWN, PREDECESSOR, SUCCESSOR, SLOT, ACCEPTED = ("own token", "predecessor", "successor", "slot index", "accepted")
QUESTIONS = (OWN, PREDECESSOR, SUCCESSOR, SLOT, ACCEPTED)


@dataclass(frozen=True)
class ProbeRows:
    """States and answers of all slots 1…T of an arena's real blocks, in its order.

    tokens: from the anchor to the successor of slot T; −1 behind the end of the answer.
    accepted: whether the slot's drafted token and all before it are right.
    """

    states: Float[Tensor, "depth block draft_slot d_model"]
    tokens: Int[Tensor, "block slot_and_next"]
    accepted: Bool[Tensor, "block draft_slot"]


@dataclass(frozen=True)
class Asked:
    """A class for every row, −1 where a row is not asked; `coverage` is the share of rows that are."""

    classes: Int[Tensor, "block draft_slot"]
    count: int
    coverage: float


@torch.no_grad()
def read_rows(draft: Draft, arena: Arena) -> ProbeRows:
    """Run the draft once over the arena and keep every slot's state at every depth.

    Raises:
        UsageError: the arena was built for other taps or another number of slots.
    """
    refuse_misfit("draft", draft, arena)
    weight, states, accepted = draft.fc.weight, [], []
    with HookedDraft(draft) as hooked:
        names = residual_names(draft)
        for raw in arena.batches():
            batch = raw.to(weight.device)
            context = draft.encode_context(batch.taps.to(weight.dtype))
            cache, caching, _ = hooked.get_caching_hooks(names)
            with hooked.hooks(caching):
                drafted = draft.draft_greedy(context, batch.anchor_tokens, batch.anchors)
            real = batch.real.flatten()
            right = (drafted == batch.tokens[:, 1:]).long().cumprod(dim=1).bool()
            states.append(torch.stack([cache[name][real, 1:].float().cpu() for name in names]))
            accepted.append(right[real].cpu())
    ahead, tokens = torch.arange(arena.slots + 2), []
    for index in arena.order:
        place, answer = arena.anchors[index][:, None] + ahead, arena.answers[index].tokens.long()
        tokens.append(torch.where(place < len(answer), answer[place.clamp(max=len(answer) - 1)], UNASKED))
    return ProbeRows(torch.cat(states, dim=1), torch.cat(tokens), torch.cat(accepted))


def ask(question: str, rows: ProbeRows, train: Bool[Tensor, "block"], most: int) -> Asked:
    """What the rows are asked for.

    Args:
        question: one of `QUESTIONS`.
        train: blocks of training prompts; token classes are the `most` commonest tokens there.

    Raises:
        UsageError: the question is unknown.
    """
    slots = rows.states.shape[2]
    if question == SLOT:
        index = torch.arange(slots).expand(len(rows.tokens), -1)
        return Asked(index, slots, 1.0)
    if question == ACCEPTED:
        return Asked(rows.accepted.long(), 2, 1.0)
    if question not in QUESTIONS:
        raise UsageError(f"there is no question {question!r}; choose from {', '.join(QUESTIONS)}.")
    first = {PREDECESSOR: 0, OWN: 1, SUCCESSOR: 2}[question]
    tokens = rows.tokens[:, first : first + slots]
    common = commonest(tokens[train], most)
    asked = class_of(tokens, common)
    return Asked(asked, len(common), float((asked != UNASKED).double().mean()))


def refuse_misfit(name: str, draft: Draft, arena: Arena) -> None:
    """Refuse a draft that the arena was not built for.

    Raises:
        UsageError: the draft reads other taps or drafts another number of slots.
    """
    taps, read, slots = list(arena.about["taps"]), list(draft.config.target_layer_ids), draft.config.num_slots
    if (read, slots) != (taps, arena.slots):
        raise UsageError(
            f"{name!r} reads taps {read} and drafts {slots} slots, but the arena holds taps {taps} and blocks of "
            f"{arena.slots}; build an arena for this draft."
        )
