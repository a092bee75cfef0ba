"""One block of one answer, looked into: what every depth would write, and where a wrong anchor token does its harm.

`read_depths` reads each slot of a block after every layer through the draft's own norm and the target's head (a logit
lens). `patch_block` replaces the anchor token, then puts the stream of the undisturbed run back, one slot at one depth
at a time, and says how much of the damage each place repairs. One block is an illustration: it has no interval.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.answers import answer_prompts, read_states, second_choices
from dspine_probe.experiments.emergence.readers import label_ranks, lens
from dspine_probe.experiments.patching import Blocks, recovered, residual_names, residual_sites, sweep
from dspine_probe.hooks import HookedDraft
from dspine_probe.prompts import Prompt
from dspine_probe.target import Target
from dspine_probe.training.features import Sequence as Answer

LEAST_GAP = 0.05
"""Nats; where the wrong token costs less, there is nothing to repair."""


@dataclass(frozen=True, eq=False)
class DepthReading:
    """What each depth would write in each slot of one block.

    table: draft, depth (0: block embedding), slot, token (the lens's first choice), probability (of it), label (the
        target's token), rank (of the label, 0 is first; the vocabulary's size if the draft cannot propose it).
    anchor: the token that the block starts from, and `before` the text up to it.
    """

    table: pd.DataFrame
    anchor: str
    before: str

    def findings(self) -> list[str]:
        """For every draft, in how many slots the last depth has the label, and from which depth on each is held."""
        return [self._finding(draft, rows) for draft, rows in self.table.groupby("draft", sort=False)]

    def _finding(self, draft: str, rows: pd.DataFrame) -> str:
        right = rows.assign(right=rows["rank"] == 0).pivot(index="depth", columns="slot", values="right")
        held = right[::-1].cummin()[::-1]
        since = [f"slot {slot} from depth {held[slot].idxmax()}" for slot in held if held[slot].iloc[-1]]
        kept = f"held {', '.join(since)}" if since else "none is held"
        last = f"{int(right.iloc[-1].sum())} of {right.shape[1]} slots read the target's token after the last layer"
        return f"{draft}, after “…{self.before}”: {last}; {kept}."


@dataclass(frozen=True, eq=False)
class BlockPatch:
    """What each patched place repairs of a wrong anchor token.

    table: depth, slot (0 is the anchor's), recovered (1: all of the loss in log-probability, 0: none).
    token: what the undisturbed draft puts in `slot`; right, wrong: log-probability of it behind the true anchor token
        and behind the false one.
    """

    table: pd.DataFrame
    draft: str
    slot: int
    token: str
    anchor: str
    replacement: str
    right: float
    wrong: float

    def findings(self) -> list[str]:
        """The damage, and which place repairs most of it at each depth."""
        damage = (
            f"{self.draft}: with {self.replacement!r} in place of the anchor {self.anchor!r}, the log-probability of "
            f"{self.token!r} in slot {self.slot} goes from {self.right:.2f} to {self.wrong:.2f}"
        )
        if self.table["recovered"].isna().all():
            return [f"{damage}: less than {LEAST_GAP} nats, so there is nothing to repair."]
        best = self.table.loc[self.table.groupby("depth")["recovered"].idxmax()]
        places = [f"depth {row.depth} slot {row.slot} ({100 * row.recovered:.0f} %)" for row in best.itertuples()]
        return [f"{damage}; the clean stream undoes most of it at {', '.join(places)}."]


def answer_with_states(target: Target, prompt: str, draft: Draft, *, max_new_tokens: int) -> Answer:
    """The target's greedy answer to one prompt, with the states that `draft` reads.

    Raises:
        UsageError: the prompt is empty or does not fit the target.
    """
    prompts = [Prompt("prompt", "prompt", prompt)]
    answers = answer_prompts(target, prompts, max_new_tokens=max_new_tokens)
    return read_states(target, prompts, answers, draft.config.target_layer_ids)[0]


@torch.no_grad()
def read_depths(target: Target, drafts: Mapping[str, tuple[Draft, Answer]], *, at: int = 0) -> DepthReading:
    """What every depth of each draft would write in the block behind token `at` (from 0) of the answer.

    Args:
        drafts: by name, each with the answer and the states it reads (`answer_with_states`).

    Raises:
        UsageError: there is no draft, or the answer has no whole block behind `at`.
    """
    if not drafts:
        raise UsageError("there is no draft to read; give at least one.")
    rows: list[dict[str, object]] = []
    for name, (draft, answer) in drafts.items():
        anchor, labels = _block(draft, answer, at)
        streams, _ = _cached(draft, answer, anchor, answer.tokens[anchor])
        for depth, states in enumerate(streams.values()):
            scores = lens(draft)(states[0, 1:])
            top = scores.softmax(-1).max(-1)
            ranks = label_ranks(scores, draft.to_index(labels)).tolist()
            for slot, index in enumerate(draft.to_tokens(top.indices).tolist()):
                row = {"draft": name, "depth": depth, "slot": slot + 1, "token": target.decode([index])}
                row |= {"probability": float(top.values[slot]), "label": target.decode(labels[slot : slot + 1])}
                rows.append(row | {"rank": ranks[slot]})
    before = target.decode(answer.tokens[max(answer.prompt_length, anchor - 7) : anchor + 1])
    return DepthReading(pd.DataFrame(rows), target.decode(answer.tokens[anchor : anchor + 1]), before)


@torch.no_grad()
def patch_block(
    target: Target, name: str, draft: Draft, answer: Answer, *, at: int = 0, slot: int = 1, token: int | None = None
) -> BlockPatch:
    """Replace the anchor token of one block, and patch the clean stream back place by place.

    Args:
        at: which token of the answer is the anchor, from 0. slot: whose token is scored, 1…T.
        token: id of the wrong anchor token; by default the target's second choice there.

    Raises:
        UsageError: the answer has no whole block behind `at`, there is no such slot, or `token` is the anchor itself.
    """
    anchor, labels = _block(draft, answer, at)
    if not 1 <= slot <= len(labels):
        raise UsageError(f"slot is {slot}; this draft has slots 1…{len(labels)}.")
    true = answer.tokens[anchor]
    if token is None:
        token = int(second_choices(target, answer.final[anchor - 1], true))
    target.check_ids([token], "the replacement")
    if token == int(true):
        raise UsageError(f"the replacement {target.decode([token])!r} is the anchor token itself; give another.")
    clean, scores = _cached(draft, answer, anchor, true)
    label = scores[0, slot - 1].argmax()

    def score(hidden: Float[Tensor, "row draft_slot d_model"], _block: Int[Tensor, "row"]) -> Float[Tensor, "row"]:
        return functional.linear(hidden[:, slot - 1], draft.head).log_softmax(-1)[:, label]

    device = draft.head.device
    context = draft.encode_context(answer.taps[None].to(draft.head))
    anchors, sites = torch.tensor([[anchor]], device=device), residual_sites(draft)
    found = sweep(draft, Blocks(context, torch.tensor([[token]], device=device), anchors), sites, clean, score)
    right = scores[0, slot - 1].log_softmax(-1)[label]
    shares = recovered(found.patched, found.unpatched, right[None], least=LEAST_GAP)[:, 0]
    depths = {hook: depth for depth, hook in enumerate(residual_names(draft))}
    table = pd.DataFrame(
        {
            "depth": [depths[site.name] for site in sites],
            "slot": [site.slot for site in sites],
            "recovered": shares.tolist(),
        }
    )
    scored, shown, false = (target.decode([int(one)]) for one in (draft.to_tokens(label), true, token))
    return BlockPatch(table, name, slot, scored, shown, false, right=float(right), wrong=float(found.unpatched))


def _block(draft: Draft, answer: Answer, at: int) -> tuple[int, Int[Tensor, "draft_slot"]]:
    """The anchor's position and the labels behind it."""
    slots, anchor = draft.config.num_slots, answer.prompt_length + at
    most = len(answer) - answer.prompt_length - slots - 1
    if not 0 <= at <= most:
        raise UsageError(
            f"at is {at}; this answer has {len(answer) - answer.prompt_length} tokens, and whole blocks of {slots} "
            f"stand behind tokens 0…{most}."
            if most >= 0
            else f"the answer has {len(answer) - answer.prompt_length} tokens and a block needs {slots + 1}; "
            "give a prompt with a longer answer, or more new tokens."
        )
    return anchor, answer.tokens[anchor + 1 : anchor + 1 + slots]


def _cached(
    draft: Draft, answer: Answer, anchor: int, token: Int[Tensor, ""]
) -> tuple[dict[str, Float[Tensor, "one slot d_model"]], Float[Tensor, "one draft_slot draft_vocab"]]:
    """The stream of one block at every depth, by hook point, and the scores of its slots."""
    names, device = residual_names(draft), draft.head.device
    place, shown = torch.tensor([[anchor]], device=device), token.view(1, 1).to(device)
    with HookedDraft(draft) as hooked:
        scores, cache = hooked.run_with_cache(answer.taps[None].to(draft.head), shown, place, names_filter=names)
    return {name: cache[name] for name in names}, scores
