"""Gates: they are read where they act, gains and clamps are what they say, and correlations ignore slots and sets."""

import math
from dataclasses import replace

import pandas as pd
import pytest
import torch
from toy import BLOCK, LAYERS, TAPS, seeded, toy_draft, toy_sequence

from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.arena import Arena
from dspine_probe.experiments.common.intervals import Draws
from dspine_probe.experiments.common.progress import silent
from dspine_probe.experiments.gates.clamps import ALL, LAST_WRITE, clamped_scores, clamps
from dspine_probe.experiments.gates.measure import GatesConfig, gates
from dspine_probe.experiments.gates.readings import read_gates
from dspine_probe.experiments.gates.table import GatesResult, correlation
from dspine_probe.experiments.gates.token_kinds import KINDS, kinds_of
from dspine_probe.hooks import HookedDraft
from dspine_probe.plots.gates import clamped, followed, heatmaps

SLOTS = BLOCK - 1


class Speller:
    """A tokenizer that spells token i as `spelling[i]`."""

    all_special_ids = [0]

    def __init__(self, spelling):
        self.spelling = spelling

    def get_added_vocab(self):
        return {"<s>": 0}

    def decode(self, ids):
        return self.spelling[ids[0]].lstrip("▁")

    def convert_ids_to_tokens(self, token):
        return self.spelling[token]


WORDS = ["<s>", " the", "ing", "7", "\n\n", "!", "{", "a1", "▁der", " don't", "().", "é\ufffd", " ", "**", "ß", "('"]
TOKENIZER = Speller(WORDS * 2)


def toy_arena(draft, sets=("one", "one", "two", "two", "two")):
    answers = tuple(replace(toy_sequence(length=18, seed=s), id=str(s)) for s in range(len(sets)))
    answers = tuple(replace(a, taps=a.taps.float()) for a in answers)
    anchors = tuple(torch.tensor([4, 6, 9, 12][: 3 + s % 2]) for s in range(len(sets)))
    # Half of the labels are what the draft itself would say, so that it is sometimes right.
    for answer, places in zip(answers, anchors, strict=True):
        with torch.no_grad():
            context = draft.encode_context(answer.taps[None])
            said = draft.draft_greedy(context, answer.tokens[places][None], places[None])
        answer.tokens[places[0] + 1 : places[0] + 3] = said[0, :2]
        answer.tokens[places[-1] + 1 : places[-1] + 4] = said[-1, :3]
    return Arena(answers, sets, anchors, SLOTS, {"target": "toy", "taps": list(range(TAPS))})


@pytest.fixture(scope="module")
def spine():
    return toy_draft("dspine")


@pytest.fixture(scope="module")
def arena(spine):
    return toy_arena(spine)


@pytest.fixture(scope="module")
def readings(spine, arena):
    with HookedDraft(spine) as hooked:
        return read_gates(hooked, arena, answers_per_batch=2)


def block_of(arena, index):
    """Answer and anchor of a row of the arena."""
    answer = int(arena.prompt[index])
    place = index - int((arena.prompt == answer).nonzero()[0])
    return arena.answers[answer], arena.anchors[answer][place]


def alone(draft, arena, index, hooks=()):
    """Label log-probabilities of one block by itself."""
    answer, anchor = block_of(arena, index)
    with HookedDraft(draft) as hooked, torch.no_grad():
        logits = hooked.run_with_hooks(
            answer.taps[None], answer.tokens[anchor].view(1, 1), anchor.view(1, 1), fwd_hooks=hooks
        )
    return logits[0].log_softmax(-1)[range(SLOTS), answer.tokens[anchor + 1 : anchor + 1 + SLOTS]]


def test_readings_are_those_of_single_blocks(spine, arena, readings):
    assert readings.gates.shape == (LAYERS, len(arena.prompt), SLOTS, spine.spine.message_size)
    for index in (0, 4, len(arena.prompt) - 1):
        answer, anchor = block_of(arena, index)
        with HookedDraft(spine) as hooked:
            logits, cache = hooked.run_with_cache(
                answer.taps[None], answer.tokens[anchor].view(1, 1), anchor.view(1, 1)
            )
        labels = answer.tokens[anchor + 1 : anchor + 1 + SLOTS]
        assert torch.equal(readings.labels[index], labels)
        for layer in range(LAYERS):
            assert torch.allclose(readings.gates[layer, index], cache[f"blocks.{layer}.inject.hook_gate"][0], atol=1e-5)
        assert torch.equal(readings.right[index], (logits[0].argmax(-1) == labels).float())
        assert torch.allclose(readings.log_prob[index], alone(spine, arena, index), atol=1e-4)


def test_kept_follows_verification(spine, arena, readings):
    seen = set()
    for index in range(len(arena.prompt)):
        answer, anchor = block_of(arena, index)
        with torch.no_grad():
            context = spine.encode_context(answer.taps[None])
            said = spine.draft_greedy(context, answer.tokens[anchor].view(1, 1), anchor.view(1, 1))[0]
        good = (said == answer.tokens[anchor + 1 : anchor + 1 + SLOTS]).long().cumprod(0).sum()
        expected = [1.0] * int(good) + ([0.0] if good < SLOTS else [])
        seen.add(int(good))
        row = readings.kept[index]
        assert row[: len(expected)].tolist() == expected and row[len(expected) :].isnan().all()
    assert len(seen) > 1


def test_predecessor_of_slot_one_is_not_asked_about(readings):
    before = readings.predecessor_right
    assert before[:, 0].isnan().all() and torch.equal(before[:, 1:], readings.right[:, :-1])
    assert not readings.right[:, 0].isnan().any()


@pytest.mark.parametrize("layers", [[0], [1], [LAYERS - 1], list(range(LAYERS))])
def test_gain_is_the_slots_own_injection_at_that_layer(spine, arena, readings, layers):
    """By hand: one block, one slot, its gate shut; also where the successor's gain must not include it."""
    place = layers[0] if len(layers) == 1 else LAYERS
    for index, slot in ((1, 0), (5, 1), (9, SLOTS - 1)):

        def shut(gate, hook, slot=slot):
            return gate.index_fill(1, torch.tensor([slot]), 0.0)

        hooks = [(f"blocks.{layer}.inject.hook_gate", shut) for layer in layers]
        gain = alone(spine, arena, index)[slot] - alone(spine, arena, index, hooks)[slot]
        assert float(readings.gain[place, index, slot]) == pytest.approx(float(gain), abs=1e-4)
    assert readings.gain[place].abs().max() > 1e-3


def test_a_draft_that_never_writes_gains_nothing(arena):
    mute = toy_draft("dspine", writes=False)
    for write in mute.injection.writes:
        torch.nn.init.zeros_(write.weight)
    with HookedDraft(mute) as hooked:
        found = read_gates(hooked, arena)
        assert found.gain.abs().max() < 1e-5 and found.written.abs().max() == 0
        for scores in clamped_scores(hooked, arena, clamps(found, ("0", "1"), 0), 8, silent):
            assert torch.allclose(scores.log_prob, found.log_prob, atol=1e-4)


def under(draft, arena, readings, place, value):
    with HookedDraft(draft) as hooked:
        held = [c for c in clamps(readings, (value,), 0) if (c.place, c.value) == (place, value)]
        (scores,) = clamped_scores(hooked, arena, held, 2, silent)
    return scores.right, scores.right_walked, scores.log_prob


def test_clamps_hold_their_place_only(spine, arena, readings):
    plain = readings.log_prob
    for value in ("0", "1", "mean", "drawn"):
        for place in ("1", str(LAYERS), ALL):
            assert (under(spine, arena, readings, place, value)[2] - plain).abs().max() > 1e-4
        _, walked, log_prob = under(spine, arena, readings, LAST_WRITE, value)
        assert torch.equal(log_prob, under(spine, arena, readings, LAST_WRITE, "1")[2])  # unary scores stay
        assert torch.allclose(log_prob, plain, atol=1e-5)
    shut = under(spine, arena, readings, "2", "0")[2]
    hooks = [("blocks.1.inject.hook_out", lambda x, hook: torch.zeros_like(x))]
    assert torch.allclose(shut[3], alone(spine, arena, 3, hooks), atol=1e-4)


def test_gates_that_never_move_lose_nothing_at_their_mean(arena):
    """With gate weights at zero a gate is σ(b) everywhere: its mean and any other block's gate are the gate itself."""
    constant = toy_draft("dspine")
    with torch.no_grad():
        constant.injection.receiver_gate.weight.zero_()
        constant.injection.predecessor_gate.weight.zero_()
        constant.injection.bias.copy_(torch.randn(constant.injection.bias.shape, generator=seeded(1)))
    with HookedDraft(constant) as hooked:
        found = read_gates(hooked, arena)
    for value in ("mean", "drawn"):
        right, _, log_prob = under(constant, arena, found, ALL, value)
        assert torch.allclose(log_prob, found.log_prob, atol=1e-4) and torch.equal(right, found.right)


# ---- statistics


def wide_draws(blocks=600, prompts=60):
    prompt = torch.arange(blocks) % prompts
    answers = tuple(toy_sequence(seed=i) for i in range(prompts))
    anchors = tuple((prompt == i).nonzero()[:, 0] for i in range(prompts))
    arena = Arena(answers, tuple("ab"[i % 2] for i in range(prompts)), anchors, 2, {})
    return Draws.of(arena, resamples=200)


def test_correlation_is_pearsons_within_slot_and_set():
    draws = wide_draws()
    generator = seeded(3)
    x, noise = (torch.randn(600, 2, generator=generator) for _ in range(2))
    y = torch.stack([x[:, 0], -x[:, 1]], 1) + 0.5 * noise
    found = correlation(x, y, draws)[0]
    for set_index in range(2):
        for slot in range(2):
            rows = draws.set_index == set_index
            byhand = torch.corrcoef(torch.stack([x[rows, slot], y[rows, slot]]))[0, 1]
            assert float(found[set_index, slot]) == pytest.approx(float(byhand), abs=1e-5)
    # Offsets between slots and sets would correlate everything with everything; here they must not.
    unrelated = torch.randn(600, 2, generator=generator)
    shift = torch.tensor([0.0, 50.0]) + 100 * draws.set_index[:, None]
    pooled = torch.corrcoef(torch.stack([(x + shift).flatten(), (unrelated + shift).flatten()]))[0, 1]
    assert pooled > 0.9 and correlation(x + shift, unrelated + shift, draws)[0].abs().max() < 0.2
    assert correlation(x, torch.ones(600, 2), draws)[0].isnan().all()


def test_correlation_uses_rows_where_both_are_measured():
    draws = wide_draws()
    x, y = torch.randn(600, 2, generator=seeded(4)), torch.randn(600, 2, generator=seeded(5))
    holes = torch.rand(600, 2, generator=seeded(6)) < 0.3
    spoilt = torch.where(holes, 1e6, x)
    a = correlation(torch.where(holes, torch.nan, x), y, draws)
    b = correlation(spoilt, torch.where(holes, torch.nan, y), draws)
    assert torch.allclose(a, b, atol=1e-5, equal_nan=True)


# ---- the whole


CONFIG = GatesConfig(walked_per_set=2, resamples=20)


@pytest.fixture(scope="module")
def result(spine, arena):
    return gates({"a": spine}, arena, TOKENIZER, config=CONFIG)


def test_gates_end_to_end(spine, arena, result, tmp_path):
    frame = result.frame()
    assert set(result.select(metric="al")["place"]) == {"1", "2", "3", "last write", "all"}
    untouched = result.select(metric="al", group="untouched")["mean"].item()
    assert untouched >= 1
    assert len(result.select(metric="top1", slot="")) == 1 + 5 * 4
    gate = result.select(metric="gate", group="every block", slot="")
    assert gate["mean"].between(0, 1).all() and (gate["low"] <= gate["mean"]).all()
    assert gate["n"].eq(len(arena.prompt) * SLOTS).all() and gate["depth"].tolist() == [1, 2, 3]
    by_slot = result.select(metric="gate", group="every block", depth=1)
    assert float(by_slot[by_slot["slot"] != ""]["mean"].mean()) == pytest.approx(gate["mean"].iloc[0])
    change, walked = (
        result.select(metric=f"{metric} change", place="all", group="0", slot="")["mean"].item()
        for metric in ("top1", "top1 walked")
    )
    clean = result.select(metric="top1", group="untouched", slot="")["mean"].item()
    shut = result.select(metric="top1", place="all", group="0", slot="")["mean"].item()
    assert change == pytest.approx(shut - clean, abs=1e-6)
    assert result.select(metric="correlation with gate", group="predecessor right", slot="1").empty
    result.save(tmp_path)
    again = GatesResult.load(tmp_path)
    pd.testing.assert_frame_equal(again.frame(), frame)
    assert again.findings() == result.findings() and again.data["skipped"] == result.data["skipped"]
    sentences = " ".join(result.findings())
    assert f"top-1 of the greedy walk {walked * 100:+.1f} points" in sentences and "held shut" in sentences
    repeated = gates({"a": spine}, arena, TOKENIZER, config=replace(CONFIG, walked_per_set=0)).frame()
    assert len(repeated) and repeated["metric"].str.startswith("al").sum() == 0
    unwalked = frame[~frame["metric"].str.startswith("al")].reset_index(drop=True)
    pd.testing.assert_frame_equal(repeated, unwalked)


def test_what_has_no_gates_or_does_not_fit_is_refused(spine, arena):
    with pytest.raises(UsageError, match="no draft"):
        gates({}, arena, TOKENIZER)
    with pytest.raises(UsageError, match="a DFlash has no gates"):
        gates({"b": toy_draft("dflash")}, arena, TOKENIZER)
    with pytest.raises(UsageError, match=r"cannot be clamped to \['2'\]"):
        gates({"a": spine}, arena, TOKENIZER, config=GatesConfig(clamps=("0", "2")))
    with pytest.raises(UsageError, match="drafts 3 slots, but .* blocks of 2"):
        gates({"a": spine}, replace(arena, slots=2), TOKENIZER)
    with pytest.raises(UsageError, match="walked_per_set is 1, but intervals need two"):
        GatesConfig(walked_per_set=1)
    taps = replace(arena, about={**arena.about, "taps": [0, 2]})
    with pytest.raises(UsageError, match=r"'a' reads taps \[0, 1\] .* the arena holds taps \[0, 2\]"):
        gates({"a": spine}, taps, TOKENIZER)


def test_kinds_follow_the_spelling():
    names = [KINDS[i] for i in kinds_of(TOKENIZER, torch.arange(len(WORDS)))]
    assert names == [
        "special", "word start", "word continuation", "digit", "white space", "punctuation", "code symbol", "other",
        "word start", "word start", "punctuation", "other", "white space", "code symbol", "word continuation",
        "punctuation",
    ]  # fmt: skip
    assert kinds_of(TOKENIZER, torch.tensor([[1, 3], [3, 1]])).tolist() == [[0, 2], [2, 0]]
    assert math.prod(kinds_of(TOKENIZER, torch.zeros(2, 2).long()).shape) == 4


def test_figures_say_in_words_what_they_show(result):
    grid = heatmaps(result)
    cells = grid.figure.data[0].z
    assert cells.shape == (LAYERS, SLOTS) and f"to {cells.max():.2f} at layer" in grid.alt
    assert len(heatmaps(result, metric="gain").table) == LAYERS * SLOTS
    shut = result.select(metric="top1 walked change", place="all", group="0", slot="")["mean"].item()
    block = clamped(result)
    assert f"held shut {100 * shut:+.1f}" in block.alt and len(block.figure.data) == 4
    assert block.figure.data[0].y[-1] == pytest.approx(100 * shut, abs=1e-3)
    assert list(block.figure.data[0].x) == ["1", "2", "3", "last write", "all"]
    assert len(followed(result).figure.data) == 3 and "predecessor" in followed(result).alt
