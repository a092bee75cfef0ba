"""The arena and its contrasts: shared anchors, exact states, and estimates checked against sums by hand."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import prompts, tiny_draft, tiny_target
from torch import Tensor

from dspine_probe.decoding.continuous import Completion, generate_greedy
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.experiments.common.arena import Arena, build_arena
from dspine_probe.experiments.common.intervals import Draws, difference, macro, per_set, per_slot, set_weights
from dspine_probe.experiments.common.request import Request
from dspine_probe.prompts import Prompt
from dspine_probe.target import Target

SLOTS, TAPS = 4, (0, 2)


def answered(target: Target, count: int, new: int = 24) -> tuple[list[Prompt], list[Completion]]:
    asked = [Prompt(f"p{i}", f"set{i % 2}", "text") for i in range(count)]
    return asked, generate_greedy(target, prompts(count), max_new_tokens=new, batch_size=4)


def tiny_arena(count: int = 8, **changes: int) -> tuple[Target, Arena]:
    target = tiny_target(stop_ids=(2, 9))
    asked, answers = answered(target, count)
    return target, build_arena(target, asked, taps=TAPS, slots=SLOTS, answers=answers, **changes)


def test_every_block_has_its_labels_inside_the_response_and_the_states_of_its_answer():
    target, arena = tiny_arena(per_answer=3)
    rows = 0
    for batch in arena.batches(answers_per_batch=3):
        blocks = batch.real.flatten()
        which = arena.prompt[rows : rows + int(blocks.sum())]
        rows += len(which)
        anchors = batch.anchors.flatten()[blocks]
        for block, anchor, index in zip(batch.tokens[blocks], anchors.tolist(), which.tolist(), strict=True):
            answer = arena.answers[index]
            assert answer.prompt_length <= anchor and anchor + SLOTS < len(answer)
            assert block.tolist() == answer.tokens[anchor : anchor + SLOTS + 1].tolist()
        assert (batch.weight[blocks] == 1).all() and (batch.weight[~blocks] == 0).all()
    assert rows == len(arena.prompt) == arena.about["blocks"]
    answer = arena.answers[0]
    alone = target.hidden_states(answer.tokens[None], TAPS)
    torch.testing.assert_close(answer.taps, alone.taps[0])
    torch.testing.assert_close(answer.final, alone.final[0])


def test_short_answers_are_left_out_and_counted():
    target = tiny_target()
    asked, answers = answered(target, 4)
    answers[1] = Completion(answers[1].prompt_ids, answers[1].response_ids[:SLOTS], "length")
    arena = build_arena(target, asked, taps=TAPS, slots=SLOTS, answers=answers)
    assert "p1" not in [a.id for a in arena.answers]
    assert arena.about["too_short"] >= 1 and len(arena.answers) == 4 - arena.about["too_short"]


def test_saved_arenas_come_back_whole_and_damaged_ones_are_refused(tmp_path: Path):
    _, arena = tiny_arena()
    arena.save(tmp_path)
    again = Arena.load(tmp_path)
    assert again.about == arena.about and again.sets == arena.sets
    for old, new in zip(arena.batches(), again.batches(), strict=True):
        assert all(torch.equal(part, vars(new)[name]) for name, part in vars(old).items() if part is not None)
    file = tmp_path / "arena.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ProbeError, match="build the arena again"):
        Arena.load(tmp_path)
    with pytest.raises(UsageError, match="was not found"):
        Arena.load(tmp_path / "elsewhere")


def test_a_set_of_one_prompt_is_refused():
    target = tiny_target()
    with pytest.raises(UsageError, match="'lonely' has 1 prompt"):
        build_arena(target, [Prompt("1", "lonely", "x")], taps=TAPS, slots=SLOTS, answers=[])


def by_hand(scores: Tensor, arena: Arena) -> float:
    sets = [scores[arena.set_index == i].nanmean(0).nanmean() for i in range(len(arena.set_names))]
    return float(torch.stack(sets).mean())


def test_macro_is_the_mean_over_slots_then_sets_and_differences_are_paired():
    _, arena = tiny_arena()
    draws = Draws.of(arena, resamples=300)
    generator = torch.Generator().manual_seed(1)
    easy = torch.rand(len(arena.answers), 1, generator=generator)[arena.prompt]
    a = easy + torch.rand(len(arena.prompt), SLOTS, generator=generator)
    noise = 0.01 * torch.randn(a.shape, generator=generator)
    b = a - 0.1 + noise
    a[0, 1] = math.nan
    found, gap = macro(a, draws), difference(a, b, draws)
    assert float(found.value) == pytest.approx(by_hand(a, arena))
    assert float(gap.value) == pytest.approx(by_hand(a - b, arena))
    assert float(gap.high - gap.low) < 0.2 * float(found.high - found.low), "pairing removes what both share"
    assert float(gap.low) <= 0.1 <= float(gap.high)
    assert float(difference(a, a, draws).high) == 0.0
    torch.testing.assert_close(
        per_slot(a, draws).value.mean().float(), macro(a, draws).value.float(), atol=1e-6, rtol=0
    )
    assert per_set(a, draws).value.shape == (len(arena.set_names),)
    assert float(macro(a, draws, [2]).value) == pytest.approx(by_hand(a[:, 1:2], arena))


def test_scores_that_do_not_fit_are_refused():
    _, arena = tiny_arena()
    draws = Draws.of(arena, resamples=10)
    with pytest.raises(UsageError, match="give each block a row"):
        macro(torch.zeros(1, SLOTS), draws)
    for slots in ([], [0], [SLOTS + 1]):
        with pytest.raises(UsageError, match=rf"name some of 1…{SLOTS}"):
            macro(torch.zeros(len(arena.prompt), SLOTS), draws, slots)


def test_a_kept_arena_is_used_again_only_for_the_same_request(tmp_path: Path):
    asked, drafts = {}, {}
    for name, seed in (("A", 0), ("B", 5)):
        target, listed = tiny_target(seed=seed, stop_ids=()), prompts(8)
        target.encode_chat = lambda text, listed=listed: listed[int(text)]
        drafts[name] = tiny_draft(target)
        asked[name] = Request(
            target, {name: drafts[name]}, [Prompt(f"p{i}", f"set{i % 2}", str(i)) for i in range(8)],
            max_new_tokens=20, folder=tmp_path,
        )  # fmt: skip
    first = asked["A"].arena
    again = replace(asked["A"]).arena
    assert torch.equal(again.answers[0].taps, first.answers[0].taps)
    others = {
        "target": asked["B"],
        "prompts": replace(asked["A"], prompts=asked["A"].prompts[:6]),
        r"anchors \(8, not 2\)": replace(asked["A"], anchors=2),
        r"longest answer \(20, not 16\)": replace(asked["A"], max_new_tokens=16),
        r"seed \(0, not 1\)": replace(asked["A"], seed=1),
    }
    for named, request in others.items():
        with pytest.raises(UsageError, match=f"was made with another {named}; give --arena another folder"):
            _ = request.arena
    texts = [replace(prompt, text="7") for prompt in asked["A"].prompts]
    with pytest.raises(UsageError, match="another prompts;"):
        _ = replace(asked["A"], prompts=texts).arena
    assert replace(asked["B"], folder=None).arena.about["key"] != first.about["key"]


def test_a_set_with_one_prompt_left_has_no_interval():
    weights = set_weights(["a", "b", "b"], seed=0, resamples=5)
    assert (weights[0] == 1).all() and weights[1:].isnan().all()
    assert not set_weights(["b", "b", "a", "a"], seed=0, resamples=5).isnan().any()
