"""The reference engines compute what whole passes compute, wherever rows end and whatever was rolled back."""

from functools import partial

import pytest
import torch
from tiny import VOCAB, prompts, tiny_draft, tiny_target
from torch import Tensor

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.decoding.reference import REFERENCE, ReferenceTarget
from dspine_probe.errors import UsageError
from dspine_probe.target import Target

TAPS, WIDTH, CAPACITY = (0, 2), 5, 64
LISTED = prompts(4)
KEPT = ([1, 5, 3, 2], [4, 1, 1, 5], [5, 5, 2, 3])


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def open_target(target: Target) -> ReferenceTarget:
    return REFERENCE.open_target(target, taps=TAPS, rows=len(LISTED), capacity=CAPACITY, width=WIDTH)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@torch.inference_mode()
def test_target_engine_reads_what_a_whole_pass_reads(kind: str):
    target = tiny_target(kind)
    engine, written = open_target(target), [list(prompt) for prompt in LISTED]
    generator = torch.Generator().manual_seed(0)
    rows = list(range(len(LISTED)))
    scores = engine.prefill(LISTED)
    for row in rows:
        whole = target.hidden_states(torch.tensor([LISTED[row]]), TAPS)
        near(scores[row], target.logits(whole.final[0, -1]))
        near(engine.taps[row, : len(LISTED[row])], whole.taps[0])
    memory = engine.keys.data_ptr()
    for turn, kept in enumerate(KEPT):
        tokens = torch.randint(3, VOCAB, (len(rows), WIDTH), generator=generator)
        scores = engine.forward(tokens)
        for at, row in enumerate(rows):
            sequence = [*written[row], *tokens[at].tolist()]
            whole = target.hidden_states(torch.tensor([sequence]), TAPS)
            near(scores[at], target.logits(whole.final[0, -WIDTH:]))
            near(engine.taps[at], whole.taps[0, -WIDTH:])
            written[row] += tokens[at, : kept[row]].tolist()
        engine.commit([kept[row] for row in rows])
        if turn == 0:
            engine.select([0, 2, 3])
            rows = [0, 2, 3]
    assert engine.keys.data_ptr() == memory, "the cache was allocated again"


@torch.inference_mode()
def test_greedy_is_the_likeliest_token_of_the_scores():
    target = tiny_target()
    one, other = open_target(target), open_target(target)
    assert torch.equal(one.prefill(LISTED), other.prefill(LISTED))
    tokens = torch.arange(20).view(4, WIDTH)
    assert torch.equal(one.forward(tokens).argmax(dim=-1), other.greedy(tokens))


@pytest.mark.parametrize("architecture", [DFLASH, DSPINE])
@torch.inference_mode()
def test_draft_engine_proposes_what_the_draft_does_for_each_row_alone(architecture: str):
    target = tiny_target()
    draft = tiny_draft(target, architecture, trimmed=40)
    engine = REFERENCE.open_draft(draft, rows=4, capacity=CAPACITY, width=WIDTH)
    generator = torch.Generator().manual_seed(0)
    marks: list[int] = []
    rows, contexts = list(range(4)), [torch.empty(0, 2 * target.hidden_size) for _ in LISTED]
    for turn, counts in enumerate(([3, 9, 1, 6], *KEPT)):
        counts = [counts[row] for row in rows]
        taps = torch.randn(len(rows), max(counts) + 1, 2 * target.hidden_size, generator=generator)
        engine.extend(taps, counts)
        anchors = torch.randint(3, VOCAB, (len(rows),), generator=generator)
        found = engine.propose(anchors, on_trunk=partial(marks.append, turn))
        assert found.q is None and marks == list(range(turn + 1))
        for at, row in enumerate(rows):
            contexts[row] = torch.cat([contexts[row], taps[at, : counts[at]]])
            context = draft.encode_context(contexts[row][None])
            alone = draft.draft_greedy(context, anchors[None, at : at + 1], torch.tensor([[context.length]]))
            assert torch.equal(found.tokens[at], alone[0])
        if turn == 1:
            engine.select([1, 3])
            rows = [1, 3]
    assert not draft.ln_final._forward_hooks


@pytest.mark.parametrize("architecture", [DFLASH, DSPINE])
@torch.inference_mode()
def test_drawn_proposals_name_what_they_were_drawn_from(architecture: str):
    target = tiny_target()
    draft = tiny_draft(target, architecture, trimmed=40)
    engine = REFERENCE.open_draft(draft, rows=2, capacity=CAPACITY, width=WIDTH)
    generator = torch.Generator().manual_seed(0)
    engine.extend(torch.randn(2, 3, 2 * target.hidden_size, generator=generator), [3, 2])
    anchors = torch.tensor([5, 6])
    noise = torch.rand(2, WIDTH - 1, generator=generator)
    drawn = engine.propose(anchors, temperature=0.7, noise=noise)
    assert drawn.q is not None
    near(drawn.q.probs.sum(dim=-1), torch.ones(2, WIDTH - 1))
    assert (drawn.q.ids == drawn.tokens[..., None]).sum(dim=-1).eq(1).all()
    assert draft.to_index(drawn.q.ids).ge(0).all(), "outside the draft's vocabulary"
    cold = engine.propose(anchors, temperature=1e-6, noise=noise)
    assert torch.equal(cold.tokens, engine.propose(anchors).tokens)


def test_rows_that_do_not_fit_are_refused():
    engine = REFERENCE.open_target(tiny_target(), taps=(), rows=1, capacity=6, width=WIDTH)
    with pytest.raises(UsageError, match="a row of 0 tokens and 7 more do not fit a cache of 6"):
        engine.prefill([[3] * 7])
    engine.prefill([[3, 4]])
    with pytest.raises(UsageError, match="a row of 2 tokens and 5 more do not fit a cache of 6"):
        engine.forward(torch.zeros(1, WIDTH, dtype=torch.long))


def test_sliding_windows_are_refused():
    target = tiny_target()
    target.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(UsageError, match="sliding-window layers"):
        open_target(target)
