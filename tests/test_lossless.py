"""Rejection sampling against full enumeration: every kind's answers have the target's joint distribution.

Of a target of eight tokens all answers of three tokens are enumerated; each kind drafts and is verified, a round after
another, 400,000 times. A kind is added by a line in `CASES`.
"""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
import torch
from chance import chi_square
from tiny import PARTS, SIZES, tiny_draft
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dspine_probe.decoding.verify import target_probs, verify_sampled
from dspine_probe.drafts import Backbone, Draft
from dspine_probe.drafts.dspark import HEADS
from dspine_probe.drafts.proposal import Proposal
from dspine_probe.drafts.registry import KINDS
from dspine_probe.sampling import Sampling
from dspine_probe.target import Target

VOCAB, LENGTH, DRAWS, CHUNK = 8, 3, 400_000, 100_000
PROMPT = [5, 1, 3]
CASES = {
    "dflash": ("dflash", None),
    "dspine": ("dspine", dataclasses.replace(PARTS["dspine"], transfer_rank=6)),
    "dflash2": ("dflash2", PARTS["dflash2"]),
    **{f"dspark {h}": ("dspark", dataclasses.replace(PARTS["dspark"], markov_head_type=h)) for h in HEADS},
    "domino": ("domino", dataclasses.replace(PARTS["domino"], pure_draft_prefix_len=0)),
    "domino unshifted": ("domino", dataclasses.replace(PARTS["domino"], shift_label=False)),
    "eagle3": ("eagle3", PARTS["eagle3"]),
}
RULES = {"drawn": Sampling(1.0), "one-hot": Sampling(1.0, draft_temperature=0.0), "nucleus": Sampling(1.0, top_p=0.8)}


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": VOCAB}, tie_word_embeddings=True))
    return Target.from_model(model, stop_ids=())


def test_every_kind_is_here() -> None:
    assert {kind for kind, _ in CASES.values()} == set(KINDS)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", CASES)
def test_answers_have_the_targets_joint_distribution(target: Target, case: str, rule: str) -> None:
    kind, part = CASES[case]
    draft = tiny_draft(target, KINDS[kind].architecture, part=part, mask_token_id=VOCAB - 1)
    p, distance = compare(target, draft, RULES[rule])
    print(f"{case}, {rule}: p = {p:.3f}, TV = {distance:.4f}")
    assert p > 1e-3 and distance < 0.01


@pytest.mark.parametrize("case", ["dflash", "dflash2", "dspark vanilla"])
def test_a_wrong_q_is_found(target: Target, case: str) -> None:
    kind, part = CASES[case]
    draft = tiny_draft(target, KINDS[kind].architecture, part=part, mask_token_id=VOCAB - 1)
    p, distance = compare(target, draft, RULES["drawn"], boastful=True)
    assert p < 1e-4 and distance > 0.01


@torch.no_grad()
def compare(target: Target, draft: Draft, sampling: Sampling, *, boastful: bool = False) -> tuple[float, float]:
    """The chi-square p-value and total-variation distance of answers; `boastful` drafts claim a q they did not use."""
    scores, states = {}, {}
    for size in range(LENGTH + 1):
        ahead = list(product(range(VOCAB), repeat=size))
        found = target.hidden_states(torch.tensor([[*PROMPT, *one] for one in ahead]), draft.config.target_layer_ids)
        for one, final, taps in zip(ahead, found.final, found.taps, strict=True):
            scores[one] = target.logits(final[-1])
            if size < LENGTH:
                at = torch.tensor([[len(PROMPT) + size - 1]])
                anchor = torch.tensor([[[*PROMPT, *one][-1]]])
                following = torch.tensor([[*PROMPT, *one][1:]])
                context = draft.encode_context(taps[None, : int(at)], following=following)
                states[one] = _run(draft, context, anchor, at, LENGTH - size + 1), anchor
    joint = torch.zeros(VOCAB**LENGTH, dtype=torch.double)
    for number, one in enumerate(product(range(VOCAB), repeat=LENGTH)):
        joint[number] = torch.stack([target_probs(scores[one[:i]], sampling)[one[i]] for i in range(LENGTH)]).prod()
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(VOCAB**LENGTH, dtype=torch.long)
    for _ in range(DRAWS // CHUNK):
        todo = {(): CHUNK}
        for size in range(LENGTH):
            for one in [one for one in todo if len(one) == size]:
                for answer, times in _round(
                    draft, *states[one], one, todo.pop(one), scores, sampling, generator, boastful
                ):
                    todo[answer] = todo.get(answer, 0) + times
        for answer, times in todo.items():
            counts[sum(t * VOCAB ** (LENGTH - 1 - i) for i, t in enumerate(answer))] += times
    distance = float((counts / counts.sum() - joint).abs().sum() / 2)
    return chi_square(counts, joint), distance


def _run(draft, context, anchor, at, width):  # type: ignore[no-untyped-def]
    """From a number of rows to the states of as many copies of a block."""
    if not isinstance(draft, Backbone):

        def again(rows: int):  # type: ignore[no-untyped-def]
            copies = context.select(torch.zeros(rows, dtype=torch.long))
            return draft.run(copies, anchor.expand(rows, 1), at.expand(rows, 1), width=width)

        return again
    states = draft.run(context, anchor, at, width=width)
    return lambda rows: dataclasses.replace(
        states, hidden=states.hidden.expand(rows, -1, -1), last_layer=states.last_layer.expand(rows, -1, -1)
    )


def _round(draft, states, anchor, known, rows, scores, sampling, generator, boastful):  # type: ignore[no-untyped-def]
    """What one round makes of `rows` copies of an answer that is known so far, at most LENGTH tokens each."""
    slots = LENGTH - len(known)
    several = states(rows)
    noise = torch.rand(rows, slots, generator=generator)
    several_anchor = anchor.expand(rows, 1)
    if sampling.drafting == 0:
        proposal = draft.propose(several, several_anchor)
    else:
        proposal = draft.propose(several, several_anchor, temperature=sampling.drafting, noise=noise)
        if boastful:
            proposal = Proposal(draft.propose(several, several_anchor).tokens, proposal.q)
    places, inverse = proposal.tokens.unique(dim=0, return_inverse=True)
    table = torch.stack(
        [torch.stack([scores[(*known, *path[:i])] for i in range(slots + 1)]) for path in places.tolist()]
    )
    test = torch.rand(rows, slots + 1, generator=generator)
    verdict = verify_sampled(proposal, table[inverse], sampling, test)
    padded: Tensor = torch.cat([proposal.tokens, verdict.bonus_token[:, None]], dim=1)
    padded[torch.arange(rows), verdict.accepted] = verdict.bonus_token
    kept = padded.masked_fill(torch.arange(slots + 1) > verdict.accepted[:, None], -1)[:, :slots]
    answers, times = kept.unique(dim=0, return_counts=True)
    for answer, many in zip(answers.tolist(), times.tolist(), strict=True):
        yield (*known, *(token for token in answer if token >= 0)), many
