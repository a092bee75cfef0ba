"""Speculative decoding writes exactly what plain greedy decoding writes, wherever answers and blocks end."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import VOCAB, prompts, scripted, tiny_config, tiny_draft, tiny_target
from torch import Tensor

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.decoding.engine import TargetEngine
from dspine_probe.decoding.generate import Generation, generate, generate_batch
from dspine_probe.decoding.reference import REFERENCE, ReferenceDraft, ReferenceEngines
from dspine_probe.drafts import DFlash, Draft
from dspine_probe.drafts.proposal import Proposal
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.sampling import Sampling
from dspine_probe.target import Target

NEW = 24


def plain(target: Target, prompt: list[int], **options: object) -> Generation:
    return generate(target, None, prompt, **{"max_new_tokens": NEW, **options})


def check_rounds(found: Generation) -> None:
    """Rounds tile the answer after its first token, each keeping a prefix of what it drafted."""
    position = len(found.prompt_ids)
    everything = [*found.prompt_ids, *found.tokens]
    for done in found.rounds:
        assert done.anchor == position
        assert done.committed == tuple(everything[position + 1 : position + 1 + len(done.committed)])
        assert done.committed[: done.accepted] == done.drafted[: done.accepted]
        assert len(done.committed) in (done.accepted, done.accepted + 1)
        assert done.fates[: done.accepted + 1].count("accepted") == done.accepted
        assert done.fates.count("rejected") == (done.accepted < len(done.committed) <= len(done.drafted))
        assert len(done.fates) == len(done.drafted)
        position += len(done.committed)
    assert position == len(everything) - 1
    assert all(len(done.committed) == done.accepted + 1 for done in found.rounds[:-1])


def test_plain_decoding_is_that_of_transformers():
    target = tiny_target()
    for prompt in prompts(5):
        ids = torch.tensor([prompt])
        expected = target.model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=2, pad_token_id=0)
        found = plain(target, prompt)
        assert [*found.prompt_ids, *found.tokens] == expected[0].tolist()
        assert found.finish == ("stop" if found.tokens[-1] == 2 else "length")


@pytest.mark.parametrize("architecture", [DFLASH, DSPINE])
@pytest.mark.parametrize("kind, trimmed", [("llama", None), ("qwen3", 24)])
def test_random_drafts_change_nothing(kind: str, architecture: str, trimmed: int | None):
    target = tiny_target(kind, stop_ids=(2, 9, 17))
    draft = tiny_draft(target, architecture, trimmed=trimmed)
    listed = prompts(12)
    expected = [plain(target, prompt) for prompt in listed]
    batches = [generate_batch(target, draft, listed[at : at + 4], max_new_tokens=NEW) for at in range(0, 12, 4)]
    side_by_side = [found for batch in batches for found in batch]
    alone = [generate(target, draft, prompt, max_new_tokens=NEW) for prompt in listed[:4]]
    for prompt, answer, found in zip(listed + listed[:4], expected + expected[:4], side_by_side + alone, strict=True):
        assert (found.prompt_ids, found.tokens) == (tuple(prompt), answer.tokens)
        assert found.finish == answer.finish
        check_rounds(found)
    assert [found.rounds for found in alone] == [found.rounds for found in side_by_side[:4]]
    assert {found.finish for found in side_by_side} == {"stop", "length"}


def test_plain_decoding_of_a_batch_is_that_of_each_prompt():
    target, listed = tiny_target(stop_ids=(2, 9, 17)), prompts(12)
    batch = generate_batch(target, None, listed, max_new_tokens=NEW)
    for prompt, found in zip(listed, batch, strict=True):
        alone = plain(target, prompt)
        assert (found.tokens, found.finish) == (alone.tokens, alone.finish)
        check_rounds(found)
    assert len({len(found.tokens) for found in batch}) > 2, "no row finished before another"


class Oracle:
    """A draft engine that knows every row's answer and errs at random positions."""

    def __init__(self, sequences: list[list[int]], width: int) -> None:
        self.sequences, self.width = sequences, width
        self.lengths = [0] * len(sequences)
        self.generator = torch.Generator().manual_seed(5)

    def extend(self, taps: Tensor, counts: list[int], following: list[list[int]]) -> None:
        assert len(taps) == len(counts) == len(self.lengths)
        for sequence, at, count, after in zip(self.sequences, self.lengths, counts, following, strict=True):
            assert after == sequence[at + 1 : at + count + 1], "the tokens after the states that are appended"
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def propose(self, anchor_tokens: Tensor, *, on_trunk: Callable[[], None], **_: object) -> Proposal:
        on_trunk()
        blocks = []
        for sequence, at, token in zip(self.sequences, self.lengths, anchor_tokens.tolist(), strict=True):
            assert token == sequence[at], "the context ends before the anchor"
            blocks.append([*sequence[at + 1 : at + self.width], *[7] * self.width][: self.width - 1])
        known = torch.tensor(blocks)
        return Proposal((known + (torch.rand(known.shape, generator=self.generator) < 0.15)) % VOCAB)

    def select(self, rows: list[int]) -> None:
        self.sequences, self.lengths = ([all_[row] for row in rows] for all_ in (self.sequences, self.lengths))


class OracleEngines:
    def __init__(self, sequences: list[list[int]]) -> None:
        self.sequences = sequences

    def open_target(self, target: Target, **options: Any) -> TargetEngine:
        return REFERENCE.open_target(target, **options)

    def open_draft(self, draft: Draft, *, width: int, **_: object) -> Oracle:
        return Oracle(self.sequences, width)


@pytest.mark.parametrize("limit", [5, NEW])
def test_rows_that_accept_and_end_differently_share_a_batch(limit: int):
    target, listed = tiny_target(stop_ids=(2, 9, 17)), prompts(9)
    expected = generate_batch(target, None, listed, max_new_tokens=limit)
    whole = generate_batch(target, None, listed, max_new_tokens=2 * NEW, stop_ids=())
    engines = OracleEngines([[*one.prompt_ids, *one.tokens] for one in whole])
    streamed: dict[int, list[int]] = {}
    batch = generate_batch(
        target,
        tiny_draft(target),
        listed,
        max_new_tokens=limit,
        on_tokens=lambda row, tokens: streamed.setdefault(row, []).extend(tokens),
        engines=engines,
    )
    assert [(one.tokens, one.finish) for one in batch] == [(one.tokens, one.finish) for one in expected]
    assert [streamed[row] for row in range(len(listed))] == [list(one.tokens) for one in batch]
    for one in batch:
        check_rounds(one)
    rounds = [done for one in batch for done in one.rounds]
    assert len({done.accepted for done in rounds}) > 2
    last = [one.rounds[-1] for one in batch if one.rounds]
    assert any(done.accepted == len(done.committed) for done in last), "no answer ended inside a block"
    assert len({one.timing.total for one in batch}) > 1, "rows that end early are timed to their end"


@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_right_and_wrong_drafts_change_nothing(width: int, share: float):
    target = tiny_target(stop_ids=(2, 9))
    generator = torch.Generator().manual_seed(4)
    for number, prompt in enumerate(prompts(5)):
        expected = plain(target, prompt, max_new_tokens=NEW - number)
        flips = torch.rand(256, generator=generator) < share
        draft = scripted(target, [*prompt, *expected.tokens], set(flips.nonzero().flatten().tolist()))
        found = generate(target, draft, prompt, max_new_tokens=NEW - number, width=width)
        assert (found.tokens, found.finish) == (expected.tokens, expected.finish)
        check_rounds(found)
        accepted = [done.accepted for done in found.rounds]
        if share == 1.0:
            assert not any(accepted)
        if share == 0.0:
            assert all(a == width - 1 for a in accepted[:-1])
            assert len(accepted) == -(-(len(expected.tokens) - 1) // width)


def test_stop_inside_a_block_ends_the_answer_there():
    target, prompt = tiny_target(stop_ids=()), prompts(1)[0]
    free = plain(target, prompt)
    first = {token: at for at, token in reversed(list(enumerate(free.tokens)))}
    for stop, at in first.items():
        found = generate(
            target,
            scripted(target, [*prompt, *free.tokens], set()),
            prompt,
            max_new_tokens=NEW,
            stop_ids=(stop, VOCAB + 5),
        )
        assert found.tokens == free.tokens[: at + 1] and found.finish == "stop"
        check_rounds(found)
        if at and at % 5:  # neither the prefill's token nor a bonus
            assert found.rounds[-1].accepted == len(found.rounds[-1].committed) == at % 5


def test_length_limit_inside_a_block_is_kept():
    target, prompt = tiny_target(stop_ids=()), prompts(1)[0]
    free = plain(target, prompt)
    for limit in range(1, 14):
        found = generate(target, scripted(target, [*prompt, *free.tokens], set()), prompt, max_new_tokens=limit)
        assert found.tokens == free.tokens[:limit] and found.finish == "length"
        check_rounds(found)
    assert not generate(target, None, prompt, max_new_tokens=1).rounds


def test_stop_as_the_first_token_needs_no_round():
    target, prompt = tiny_target(stop_ids=()), prompts(1)[0]
    stop = plain(target, prompt).tokens[0]
    found = generate(target, tiny_draft(target), prompt, max_new_tokens=NEW, stop_ids=(stop,))
    assert found.tokens == (stop,) and found.finish == "stop" and not found.rounds
    assert found.acceptance_length != found.acceptance_length  # NaN


def test_one_pass_of_the_target_a_round_and_logits_of_the_block_alone():
    target, prompt = tiny_target(stop_ids=()), prompts(1)[0]
    rows, passes = [], []
    score = target.logits
    target.logits = lambda final: (rows.append(final.shape[:-1].numel()), score(final))[1]
    handle = target.model.base_model.register_forward_hook(lambda *_: passes.append(1))
    found = generate(target, tiny_draft(target), prompt, max_new_tokens=NEW)
    handle.remove()
    assert len(passes) == len(rows) == len(found.rounds) + 1
    assert rows == [1, *[5] * len(found.rounds)]


def test_no_hook_stays_on_the_target_even_when_a_draft_fails():
    target = tiny_target()

    class Broken(DFlash):
        def draft_greedy(self, *_: object, **__: object) -> Tensor:
            raise RuntimeError("broken draft")

    broken = Broken(tiny_config(target, DFLASH), target.embedding, target.head)
    with pytest.raises(RuntimeError, match="broken draft"):
        generate(target, broken, [3, 4, 5], max_new_tokens=NEW, stop_ids=())
    assert not any(module._forward_hooks for module in target.model.modules())


def test_times_add_up():
    target = tiny_target(stop_ids=())
    found = generate(target, tiny_draft(target), prompts(1)[0], max_new_tokens=NEW)
    spent = found.timing
    parts = [spent.prefill, spent.draft, spent.head, spent.verify, spent.bookkeeping]
    assert min(parts) > 0 and spent.total == pytest.approx(sum(parts))
    assert found.tokens_per_second == pytest.approx((NEW - 1) / (spent.total - spent.prefill))


def test_tokens_are_streamed_as_they_are_committed():
    target, prompt = tiny_target(stop_ids=()), prompts(1)[0]
    seen: list[tuple[int, ...]] = []
    found = generate(target, tiny_draft(target), prompt, max_new_tokens=NEW, on_tokens=seen.append)
    assert seen == [found.tokens[:1], *(done.committed for done in found.rounds)]


def test_requests_that_cannot_be_met():
    target = tiny_target()
    draft = tiny_draft(target)
    cases = [
        (dict(prompt_ids=[]), "the prompt is empty"),
        (dict(max_new_tokens=0), "max_new_tokens is 0"),
        (dict(width=1), "drafts nothing"),
        (dict(width=6), "wider than the 5"),
        (dict(max_new_tokens=254), "holds 256"),
        (dict(sampling=Sampling(1.0)), "given 0 generators"),
        (dict(draft=tiny_draft(target, DSPINE, trimmed=3)), "ranks 4 candidates a slot but proposes only 3"),
    ]
    for changes, message in cases:
        request = {"draft": draft, "prompt_ids": [3, 4, 5], "max_new_tokens": 8, "stop_ids": (), **changes}
        with pytest.raises(UsageError, match=message):
            generate(target, **request)
    with pytest.raises(UsageError, match="prompt 1 is empty"):
        generate_batch(target, draft, [[3], [], [4]], max_new_tokens=8)
    assert generate_batch(target, draft, [], max_new_tokens=8) == []


def test_memory_that_runs_out_leaves_no_answer():
    class Full(ReferenceEngines):
        def open_draft(self, draft: Draft, **_: object) -> ReferenceDraft:
            raise torch.OutOfMemoryError("CUDA out of memory")

    target = tiny_target()
    with pytest.raises(ProbeError, match="ran out of memory while decoding 2 prompts of up to 4 tokens"):
        generate_batch(target, tiny_draft(target), [[3], [3, 4, 5, 6]], max_new_tokens=8, engines=Full())
