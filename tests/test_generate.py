"""Speculative decoding writes exactly what plain greedy decoding writes, wherever answers and blocks end."""

import pytest
import torch
from tiny import VOCAB, prompts, scripted, tiny_config, tiny_draft, tiny_target
from torch import Tensor
from transformers import DynamicCache

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.decoding.batch import generate_greedy
from dspine_probe.decoding.generate import Generation, generate
from dspine_probe.drafts import DFlash
from dspine_probe.errors import UsageError
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
        position += len(done.committed)
    assert position == len(everything) - 1
    assert all(len(done.committed) == done.accepted + 1 for done in found.rounds[:-1])


def test_plain_decoding_is_that_of_transformers():
    target = tiny_target()
    for prompt in prompts(5):
        ids = torch.tensor([prompt])
        expected = target.model.generate(
            ids, max_new_tokens=NEW, do_sample=False, eos_token_id=2, pad_token_id=0
        )
        found = plain(target, prompt)
        assert [*found.prompt_ids, *found.tokens] == expected[0].tolist()
        assert found.finish == ("stop" if found.tokens[-1] == 2 else "length")


@pytest.mark.parametrize("architecture", [DFLASH, DSPINE])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_random_drafts_change_nothing(kind: str, architecture: str):
    target = tiny_target(kind, stop_ids=(2, 9, 17))
    draft = tiny_draft(target, architecture)
    listed = prompts(30)
    batched = generate_greedy(target, listed, max_new_tokens=NEW, batch_size=8)
    finishes = set()
    for prompt, completion in zip(listed, batched, strict=True):
        expected, found = plain(target, prompt), generate(target, draft, prompt, max_new_tokens=NEW)
        assert (found.tokens, found.finish) == (expected.tokens, expected.finish)
        assert (completion.response_ids, completion.finish) == (expected.tokens, expected.finish)
        check_rounds(found)
        finishes.add(found.finish)
    assert finishes == {"stop", "length"}


@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_right_and_wrong_drafts_change_nothing(width: int, share: float):
    target = tiny_target(stop_ids=(2, 9))
    generator = torch.Generator().manual_seed(4)
    for number, prompt in enumerate(prompts(12)):
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
        found = generate(
            target, scripted(target, [*prompt, *free.tokens], set()), prompt, max_new_tokens=limit
        )
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


def test_requests_that_cannot_be_met():
    target = tiny_target()
    draft = tiny_draft(target)
    cases = [
        (dict(prompt_ids=[]), "the prompt is empty"),
        (dict(max_new_tokens=0), "max_new_tokens is 0"),
        (dict(width=1), "drafts nothing"),
        (dict(width=6), "wider than the 5"),
        (dict(max_new_tokens=254), "holds 256"),
    ]
    for changes, message in cases:
        with pytest.raises(UsageError, match=message):
            generate(
                target, draft, **{"prompt_ids": [3, 4, 5], "max_new_tokens": 8, "stop_ids": (), **changes}
            )


def test_cache_rollback_leaves_the_committed_rows():
    """What the loop relies on: a negative crop takes that many rows off the end."""
    target = tiny_target()
    cache = DynamicCache(config=target.model.config)
    target.model.base_model(input_ids=torch.tensor([[3, 4, 5, 6]]), cache=cache, use_cache=True)
    keys = cache.layers[0].keys.clone()
    cache.crop(-2)
    assert cache.get_seq_length() == 2 and torch.equal(cache.layers[0].keys, keys[:, :, :2])
