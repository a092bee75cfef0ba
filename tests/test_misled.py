"""Decoding under wrong anchors: the walk is real decoding, and the answer does not change."""

import pytest
import torch
from test_acceptance import tapped
from test_arena import tiny_arena
from tiny import VOCAB, Scripted, prompts, scripted, tiny_draft, tiny_target

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.decoding.generate import generate
from dspine_probe.decoding.offline import simulate_rounds

NEW = 24


@pytest.mark.parametrize("architecture", [DFLASH, DSPINE])
def test_own_anchors_give_the_rounds_of_ordinary_decoding(architecture):
    target, arena = tiny_arena(8)
    draft = tiny_draft(target, architecture)
    own = [answer.tokens for answer in arena.answers]
    walked = [len(rounds.anchors) for rounds in simulate_rounds(draft, arena.answers)]
    for batch_size in (1, 3, 32):
        assert rounds_needed(draft, arena.answers, own, batch_size).tolist() == walked


def rounds_needed(draft, answers, shown, batch_size=32):
    walked = simulate_rounds(draft, answers, anchor_override=shown, batch_size=batch_size)
    return torch.tensor([len(rounds.anchors) for rounds in walked])


class Trusting(Scripted):
    """Continues the answer behind the anchor it is shown if that is the true one, and something else if not."""

    def draft_greedy(self, context, anchor_tokens, anchors, *, width=None):
        shown, self.exact_context = int(anchor_tokens), False
        truth = super().draft_greedy(context, torch.tensor([[self.tokens[int(anchors)]]]), anchors, width=width)
        return truth if shown == self.tokens[int(anchors)] else (truth + 1) % VOCAB


def test_wrong_anchors_give_the_rounds_of_a_real_decode_that_is_shown_them():
    target = tiny_target(stop_ids=(2, 9))
    generator = torch.Generator().manual_seed(0)
    counts = []
    for prompt in prompts(8):
        plain = generate(target, None, prompt, max_new_tokens=NEW)
        draft = scripted(target, [*prompt, *plain.tokens], wrong={len(prompt) + 7})
        draft.__class__ = Trusting
        answer = tapped(target, draft, prompt, plain.tokens)
        lie = torch.rand(answer.tokens.shape, generator=generator) < 0.4
        shown = torch.where(lie, (answer.tokens + 5) % VOCAB, answer.tokens)
        honest = rounds_needed(draft, [answer], [answer.tokens])
        misled = rounds_needed(draft, [answer], [shown])

        trusting = draft.draft_greedy
        draft.draft_greedy = lambda context, _tokens, anchors, width=None, trusting=trusting, shown=shown: trusting(
            context, shown[anchors], anchors, width=width
        )  # fmt: skip
        real = generate(target, draft, prompt, max_new_tokens=NEW)
        assert real.tokens == plain.tokens, "the answer does not change"
        assert misled.tolist() == [len(real.rounds)]
        counts.append((int(honest), int(misled)))
    assert sum(misled > honest for honest, misled in counts) >= 3
