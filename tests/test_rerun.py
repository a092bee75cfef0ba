"""Edited texts: a branch is the edited text run by itself, and an exchanged context row is that text's row."""

from dataclasses import replace

import pytest
import torch
from test_arena import TAPS, tiny_arena
from tiny import prompts, tiny_draft, tiny_target

from dspine_probe.config import DFLASH
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.experiments.corruption import replacements as module
from dspine_probe.experiments.corruption.blocks import Edit, rerun
from dspine_probe.experiments.corruption.passes import exchanged, stored
from dspine_probe.experiments.corruption.replacements import (
    FREQUENCY,
    MASK,
    NOTHING,
    RANK_2,
    ZERO,
    FrequencyBands,
    embed,
    replacement_tokens,
    response_counts,
)

TEXTS = [torch.tensor(ids) for ids in prompts(8) if len(ids) >= 9][:2]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_branch_is_the_edited_text_run_by_itself(kind):
    target = tiny_target(kind)
    lengths = {
        Edit(1, 3, 5): 4,
        Edit(1, 3, 6): 1,  # another edit of the same place
        Edit(1, 4, 7): 2,  # inside the first branch
        Edit(0, 2, NOTHING): 3,
        Edit(0, len(TEXTS[0]) - 1, 9): 1,
    }
    found = rerun(target, TEXTS, lengths, TAPS)
    for edit, length in lengths.items():
        text = TEXTS[edit.text][: edit.position + length].clone()
        text[edit.position] = max(edit.token, 0)
        inputs = embed(target.embedding, text)
        if edit.token == NOTHING:
            inputs[edit.position] = 0
        with target.capture(TAPS) as caught:
            final = target.model.base_model(inputs_embeds=inputs[None], use_cache=False).last_hidden_state[0]
        taps = torch.cat([caught[tap] for tap in TAPS], dim=-1)[0]
        for position in range(edit.position, edit.position + length):
            row = found.row(edit, position)
            assert int(found.positions[row]) == position
            torch.testing.assert_close(found.taps[row], taps[position], atol=2e-5, rtol=1e-4)
            assert int(found.choice[row]) == int(target.logits(final[position]).argmax())


def test_exchanged_rows_are_those_of_the_edited_text_and_go_back():
    draft = tiny_draft(tiny_target(), DFLASH)
    generator = torch.Generator().manual_seed(0)
    taps = torch.randn(2, 6, draft.fc.in_features, generator=generator)
    context = draft.encode_context(taps)
    blocks = context.select(torch.tensor([1, 0, 1]))
    before = [part.clone() for part in stored(blocks)]
    edits = torch.tensor([0, 2, 2]), torch.tensor([4, 0, 5])
    new = torch.randn(3, draft.fc.in_features, generator=generator)
    rows = [part[:, 0] for part in stored(draft.encode_context(new[:, None], start=edits[1]))]

    edited = torch.stack([taps[1], taps[0], taps[1]])
    edited[edits] = new
    expected = draft.encode_context(edited)
    with pytest.raises(RuntimeError, match="inside"), exchanged(blocks, *edits, rows):
        for found, wanted in zip(stored(blocks), stored(expected), strict=True):
            torch.testing.assert_close(found, wanted)
        raise RuntimeError("inside")
    assert all(torch.equal(*pair) for pair in zip(before, stored(blocks), strict=True))


def replacements(kinds, **changes):
    target, arena = tiny_arena(4)
    answer = replace(arena.answers[0], **changes)
    bands = FrequencyBands.of(torch.arange(64) + 1)
    generator = torch.Generator().manual_seed(0)
    return (target, answer, replacement_tokens(target, answer, kinds, mask_token=63, bands=bands, generator=generator))


def test_the_second_choice_is_the_best_token_but_the_one_that_stands_there():
    target, answer, found = replacements([RANK_2])
    assert torch.equal(found[RANK_2][: answer.prompt_length], answer.tokens[: answer.prompt_length])
    scores = target.logits(answer.final)
    for position in range(answer.prompt_length, len(answer)):
        ranked = scores[position - 1].argsort(descending=True).tolist()
        ranked.remove(int(answer.tokens[position]))
        assert int(found[RANK_2][position]) == ranked[0]


def test_mask_and_nothing_replace_every_token():
    _, answer, found = replacements([MASK, ZERO, FREQUENCY])
    response = slice(answer.prompt_length, None)
    assert (found[MASK][response] == 63).all() and (found[ZERO][response] == NOTHING).all()
    assert (found[FREQUENCY][response] != answer.tokens[response]).all()
    assert torch.equal(embed(torch.eye(3), torch.tensor([1, NOTHING])), torch.tensor([[0, 1, 0], [0, 0, 0.0]]))


def test_a_replacement_that_is_the_token_itself_is_refused():
    _, arena = tiny_arena(4)
    tokens = arena.answers[0].tokens.clone()
    tokens[arena.answers[0].prompt_length + 2] = 63
    with pytest.raises(UsageError, match="'mask' leaves token 63 .* as it is"):
        replacements([MASK], tokens=tokens)


def test_frequency_matches_stay_in_the_band_of_their_token_and_follow_its_shares():
    counts = torch.tensor([50, 30, 0, 11, 2, 3, 4])
    bands = FrequencyBands.of(counts)
    assert bands.order.tolist() == [0, 1, 3, 6, 5, 4]
    # Half of the text is one token, which gets a neighbour; what is left of a tenth joins the rest.
    assert bands.band_ends.tolist() == [80, 100]
    drawn = bands.draw(torch.tensor([0, 1, 3]).repeat(4000), torch.Generator().manual_seed(0)).view(-1, 3)
    assert (drawn[:, 0] == 1).all() and (drawn[:, 1] == 0).all(), "the only other token of the band"
    shares = torch.bincount(drawn[:, 2], minlength=7) / 4000
    torch.testing.assert_close(shares, torch.tensor([0, 0, 0, 0, 2, 3, 4]) / 9, atol=0.03, rtol=0)
    unseen = bands.draw(torch.full((4000,), 2), torch.Generator().manual_seed(1))
    shares = torch.bincount(unseen, minlength=7) / 4000
    torch.testing.assert_close(shares, torch.tensor([0, 0, 0, 11, 2, 3, 4]) / 20, atol=0.03, rtol=0)


def test_counts_that_cannot_be_used_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="two or more"):
        FrequencyBands.of(torch.tensor([0, 5, 0]))
    monkeypatch.setattr(module, "data_dir", lambda: tmp_path)
    with pytest.raises(ProbeError, match="mixed is missing or damaged"):
        response_counts(64)


def test_the_shipped_corpora_count_every_response_token():
    counts = response_counts(49_152)
    assert int(counts.sum()) == 1_415_541 + 95_012
    with pytest.raises(UsageError, match="the target has 64"):
        response_counts(64)
