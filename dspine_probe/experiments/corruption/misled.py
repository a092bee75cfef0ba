"""Rounds of greedy decoding when the draft is shown wrong anchors and the target checks it with the true ones.

The answer does not change: the target still keeps only what it would have written, and the context still holds the true
text. Only the block's first token is another one, in every round, so what rises is the number of rounds. Like
`decoding.offline` this walks over known answers and is exact. Entry point: `rounds_needed`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from dspine_probe.decoding.offline import Answer
from dspine_probe.drafts import Context, Draft


@torch.no_grad()
def rounds_needed(
    draft: Draft, answers: Sequence[Answer], shown: Sequence[Int[Tensor, "n"]], *, batch_size: int = 32
) -> Int[Tensor, "answer"]:
    """How many rounds each answer takes if the draft sees `shown[i][a]` wherever the anchor of answer i is at a.

    Args:
        draft: any draft, hooked or not; states are cast to its dtype.
        answers: the target's greedy answers with the states that the draft reads.
        shown: token ids, as many as each answer has; its own tokens give the rounds of ordinary decoding.
        batch_size: answers walked side by side.
    """
    order = sorted(range(len(answers)), key=lambda i: len(answers[i].tokens) - answers[i].prompt_length)
    rounds = torch.zeros(len(answers), dtype=torch.long)
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        rounds[part] = _walk(draft, [answers[i] for i in part], [shown[i] for i in part])
    return rounds


def _walk(draft: Draft, answers: Sequence[Answer], shown: Sequence[Tensor]) -> Int[Tensor, "answer"]:
    weight, slots = draft.fc.weight, draft.config.num_slots
    # Behind an answer stands a token that no draft proposes.
    tokens = pad_sequence([answer.tokens for answer in answers], batch_first=True, padding_value=-1)
    tokens = F.pad(tokens, (0, slots), value=-1).to(weight.device)
    anchors_shown = pad_sequence(list(shown), batch_first=True).to(weight.device)
    taps = pad_sequence([answer.taps for answer in answers], batch_first=True)
    context = draft.encode_context(taps.to(weight.device, weight.dtype))
    last = torch.tensor([len(answer.tokens) - 1 for answer in answers], device=weight.device)
    anchor = torch.tensor([answer.prompt_length for answer in answers], device=weight.device).minimum(last)
    rounds, ahead = torch.zeros_like(last), torch.arange(1, slots + 1, device=weight.device)
    while len(live := (anchor < last).nonzero().flatten()):
        at = anchor[live, None]
        drafted = draft.draft_greedy(_rows(context, live), anchors_shown[live].gather(1, at), at)
        accepted = (drafted == tokens[live].gather(1, at + ahead)).long().cumprod(dim=1).sum(dim=1)
        anchor[live] = (anchor[live] + accepted + 1).minimum(last[live])
        rounds[live] += 1
    return rounds.cpu()


def _rows(context: Context, rows: Int[Tensor, "live"]) -> Context:
    if len(rows) == len(context.keys[0]):
        return context
    return Context(tuple(k[rows] for k in context.keys), tuple(v[rows] for v in context.values))
