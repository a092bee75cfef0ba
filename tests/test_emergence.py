"""Emergence: matched labels, readers, controls, statistics, and the result on disk."""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import MASK, VOCAB, tiny_draft, tiny_target
from torch import Tensor
from torch.nn import functional

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.experiments.common.linear_probe import ProbeConfig
from dspine_probe.experiments.common.progress import Ticker
from dspine_probe.experiments.common.schema import COLUMNS
from dspine_probe.experiments.common.splits import split_prompts
from dspine_probe.experiments.emergence import EmergenceConfig, controls, emergence, readers
from dspine_probe.experiments.emergence.conditions import DraftStudy
from dspine_probe.experiments.emergence.readers import TranslatorConfig
from dspine_probe.experiments.emergence.readings import SlotReadings, choose_windows, read_draft
from dspine_probe.experiments.emergence.table import EmergenceResult, LabelRanks, _trend, tabulate
from dspine_probe.experiments.patching import residual_names
from dspine_probe.hooks import HookedDraft
from dspine_probe.precision import EXACT

SLOTS = 4
TARGET = tiny_target()


@dataclass(frozen=True)
class Row:
    tokens: Tensor
    prompt_length: int
    taps: Tensor


def make_rows(count=12, seed=0, shortest=9, longest=30, prompt=5):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in torch.randint(shortest, longest, (count,), generator=generator).tolist():
        tokens = torch.randint(3, MASK, (prompt + length,), generator=generator)
        taps = TARGET.hidden_states(tokens[None], (0, 2)).taps[0]
        rows.append(Row(tokens, prompt, taps.bfloat16()))
    return rows


ROWS = make_rows()
SMALL = EmergenceConfig(labels_per_prompt=6, resamples=50, translator=TranslatorConfig(epochs=2, batch=64))


@pytest.fixture(params=[DFLASH, DSPINE])
def draft(request):
    return tiny_draft(TARGET, request.param, trimmed=40)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# ---- readings


def test_windows_lie_in_the_response():
    rows = [*ROWS, *make_rows(6, seed=1, shortest=1, longest=8)]
    for seed in range(20):
        windows = choose_windows(rows, SLOTS, 6, generator(seed))
        for window in windows:
            row = rows[window.sequence]
            assert row.prompt_length <= window.anchors[0] and window.anchors[-1] <= len(row.tokens) - 2
            assert window.first_label + window.labels <= len(row.tokens)
            assert window.labels == min(6, len(row.tokens) - row.prompt_length - SLOTS)
        long_enough = [i for i, row in enumerate(rows) if len(row.tokens) - row.prompt_length > SLOTS]
        assert [window.sequence for window in windows] == long_enough


def test_labels_are_matched_and_states_are_those_of_their_own_block(draft):
    windows = choose_windows(ROWS, SLOTS, 6, generator())
    with HookedDraft(draft) as hooked:
        readings = read_draft(hooked, ROWS, windows, batch=5)
        names = residual_names(hooked.draft)
        at = 0
        for window in windows[:4]:
            row = ROWS[window.sequence]
            for label in range(window.labels):
                position = window.first_label + label
                assert readings.labels[at] == row.tokens[position]
                assert readings.sequence[at] == window.sequence
                for slot in range(1, SLOTS + 1):
                    anchor = torch.tensor([[position - slot]])
                    assert readings.anchors[at, slot - 1] == row.tokens[anchor]
                    _, cache = hooked.run_with_cache(
                        row.taps.float()[None, :anchor], row.tokens[anchor], anchor, names_filter=names
                    )
                    alone = torch.stack([cache[name][0, slot] for name in names])
                    assert torch.allclose(readings.states[:, at, slot - 1], alone, atol=1e-4)
                at += 1


def test_depths_follow_the_injection():
    with HookedDraft(tiny_draft(TARGET, DSPINE)) as hooked:
        assert residual_names(hooked.draft) == [
            "hook_embed",
            "blocks.0.inject.hook_resid",
            "blocks.1.inject.hook_resid",
        ]
    with HookedDraft(tiny_draft(TARGET, DFLASH)) as hooked:
        assert residual_names(hooked.draft) == ["hook_embed", "blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]


def test_foreign_taps_and_short_answers_are_refused(draft):
    windows = choose_windows(ROWS, SLOTS, 6, generator())
    with HookedDraft(draft) as hooked:
        with pytest.raises(UsageError, match="tap values"):
            read_draft(hooked, [Row(r.tokens, r.prompt_length, r.taps[:, :32]) for r in ROWS], windows)
        with pytest.raises(UsageError, match="longer responses"):
            read_draft(hooked, ROWS, [])


# ---- splits


def test_split_keeps_prompts_together_and_sets_balanced():
    rows = make_rows(40)
    twins = [Row(r.tokens.flip(0), r.prompt_length, r.taps) for r in rows[:10]]
    twins = [Row(torch.cat([a.tokens[:5], b.tokens[5:]]), 5, b.taps) for a, b in zip(rows, twins, strict=False)]
    every, sets = [*rows, *twins], ["a", "b"] * 25
    split = split_prompts(every, usable=range(50), sets=sets, groups=None, train_share=0.4, validation_share=0.1,
                          generator=generator())  # fmt: skip
    assert torch.equal(split.part[:10], split.part[40:])
    tested = split.summary()
    assert tested["train_prompts"] + tested["validation_prompts"] + tested["test_prompts"] == 40
    assert tested["train_prompts"] == 16 and tested["test_prompts_by_set"] == {"a": 10, "b": 10}
    index = torch.arange(50)
    assert ((split.train(index).int() + split.validation(index).int() + split.test(index).int()) == 1).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_share": 0.9, "validation_share": 0.1}, "shares"),
        ({"sets": ["a"] * 5}, "sets"),
        ({"sets": ["a"] * 10 + ["b"] * 2}, "'b' has 2 prompts"),
    ],
)
def test_impossible_splits_are_refused(changes, message):
    wanted = dict(usable=range(12), sets=None, groups=None, train_share=0.4, validation_share=0.1)
    with pytest.raises(UsageError, match=message):
        split_prompts(ROWS, **{**wanted, **changes}, generator=generator())


# ---- readers


def test_lens_at_the_last_depth_is_the_draft_itself(draft):
    windows = choose_windows(ROWS, SLOTS, 6, generator())
    with HookedDraft(draft) as hooked:
        readings = read_draft(hooked, ROWS, windows)
    window = windows[0]
    position = window.first_label
    anchors = torch.tensor([[position - slot for slot in range(1, SLOTS + 1)]])
    logits = draft(ROWS[0].taps.float()[None], ROWS[0].tokens[anchors], anchors)
    own = torch.stack([logits[slot - 1, slot - 1] for slot in range(1, SLOTS + 1)])
    read = readers.lens(draft)
    assert torch.allclose(read(readings.states[-1, 0]), own, atol=1e-4)
    assert torch.equal(
        readers.translated(draft, readers.Translator(32))(readings.states[1, 0]), read(readings.states[1, 0])
    )


def test_ranks_agree_with_sorting(draft):
    states = torch.randn(7, 3, 32, generator=generator())
    labels = torch.randint(-1, 40, (7, 3), generator=generator(1))
    read = readers.lens(draft)
    order = read(states).argsort(dim=-1, descending=True)
    expected = [
        (o == w).nonzero().item() if w >= 0 else 40 for o, w in zip(order.flatten(0, 1), labels.flatten(), strict=True)
    ]
    assert readers.ranks(read, states, labels).flatten().tolist() == expected


def test_scores_that_are_not_finite_do_not_pass_for_hits():
    for bad in (float("nan"), float("inf")):
        scores = torch.zeros(2, 5)
        scores[1, 3] = bad
        with pytest.raises(ProbeError, match="not finite"):
            readers.label_ranks(scores, torch.tensor([0, 1]))


def test_translator_learns_a_hidden_rotation_and_only_on_proposable_rows(draft):
    rows = torch.randn(3000, 32, generator=generator())
    turn = torch.linalg.qr(torch.randn(32, 32, generator=generator(1))).Q
    labels = readers.lens(draft)(rows).argmax(-1)
    labels[::10] = -1
    hidden = rows @ turn
    config = TranslatorConfig(epochs=20, batch=100, learning_rate=0.01)
    fitted = readers.train_translator(
        draft, (hidden[:2500], labels[:2500]), (hidden[2500:2700], labels[2500:2700]), config, EXACT
    )
    before = (readers.ranks(readers.lens(draft), hidden[2700:], labels[2700:]) == 0).float().mean()
    after = (readers.ranks(readers.translated(draft, fitted), hidden[2700:], labels[2700:]) == 0).float().mean()
    assert before < 0.2 and after > 0.55
    again = readers.train_translator(
        draft, (hidden[:2500], labels[:2500]), (hidden[2500:2700], labels[2500:2700]), config, EXACT
    )
    assert torch.equal(fitted.change.weight, again.change.weight)


def test_translator_that_only_gets_worse_stays_the_lens(draft):
    rows, labels = torch.randn(50, 32, generator=generator()), torch.randint(40, (50,), generator=generator())
    own = readers.lens(draft)(rows).argmax(-1)
    fitted = readers.train_translator(
        draft, (rows, labels), (rows, own), TranslatorConfig(epochs=3, learning_rate=0.5), EXACT
    )
    assert not fitted.change.weight.any()


def test_nearest_code_ranks_by_cosine():
    draft = tiny_draft(TARGET, DSPINE, trimmed=40)
    state = torch.randn(5, 32, generator=generator())
    feature = draft.injection.readouts[1](state)
    cosine = functional.cosine_similarity(feature[:, None], draft.codes[draft.vocabulary][None], dim=-1)
    assert torch.allclose(readers.code_scores(draft, 1)(state), cosine, atol=1e-5)


def test_counts():
    texts = [torch.tensor([1, 2, 3, 1, 2, 4, 1, 2])]
    anchors = torch.tensor([1, 9])
    after_one = readers.count_scores(lambda t: t, 10, texts, anchors, 1)
    assert after_one[0].argmax() == 2 and after_one[0, 2] > 3 and after_one[1].argmax() in (1, 2)
    after_two = readers.count_scores(lambda t: t, 10, texts, anchors, 2)
    assert set(after_two[0].topk(2).indices.tolist()) == {3, 4}
    assert torch.equal(
        readers.count_scores(lambda t: t, 10, texts, anchors, None)[0].topk(2).indices.sort().values,
        anchors.new_tensor([1, 2]),
    )
    trimmed = readers.count_scores(lambda t: torch.where(t == 2, -1, t), 10, texts, anchors, 1)
    assert trimmed[0, 2] == 0


# ---- controls


def test_attention_cut_leaves_a_slot_alone(draft):
    """Under the cut, changing what another slot holds changes nothing, unless the injection carries it."""
    row, anchors = ROWS[0], torch.tensor([[9]])
    inputs = row.taps.float()[None], row.tokens[anchors], anchors
    layers = draft.config.num_hidden_layers

    def swap(slots):
        def change(embedding, hook):
            changed = embedding.clone()
            changed[:, slots] += 1
            return changed

        return ("hook_embed", change)

    cut = list(controls.cut_attention(layers))
    if draft.config.architecture == DSPINE:
        cut += controls.cut_injection(draft)
    with HookedDraft(draft) as hooked:
        for slot in range(1, SLOTS + 1):
            others = [s for s in range(SLOTS + 1) if s != slot]
            free = hooked(*inputs)[0, slot - 1]
            assert not torch.equal(hooked.run_with_hooks(*inputs, fwd_hooks=[swap(others)])[0, slot - 1], free)
            with hooked.hooks(cut):
                alone = hooked(*inputs)[0, slot - 1]
                assert torch.equal(hooked.run_with_hooks(*inputs, fwd_hooks=[swap(others)])[0, slot - 1], alone)
                assert not torch.equal(hooked.run_with_hooks(*inputs, fwd_hooks=[swap([slot])])[0, slot - 1], alone)
        _, cache = hooked.run_with_cache(*inputs)
        with hooked.hooks(cut):
            _, cut_cache = hooked.run_with_cache(*inputs)
    pattern = cut_cache["blocks.0.attn.hook_pattern"]
    own = pattern[..., -(SLOTS + 1) :]
    assert (own.diagonal(dim1=-2, dim2=-1) > 0).all() and torch.equal(own, own.diagonal(dim1=-2, dim2=-1).diag_embed())
    assert not torch.equal(cache["blocks.0.attn.hook_pattern"], pattern)


def test_without_the_injection_cut_a_dspine_still_hears_its_predecessor():
    draft = tiny_draft(TARGET, DSPINE)
    row, anchors = ROWS[0], torch.tensor([[9]])
    other = (row.tokens[anchors] + 1) % VOCAB
    with HookedDraft(draft) as hooked, hooked.hooks(controls.cut_attention(2)):
        a, b = (hooked(row.taps.float()[None], token, anchors)[0] for token in (row.tokens[anchors], other))
    assert not torch.equal(a[0], b[0]) and torch.equal(a[2:], b[2:])


def test_untrained_draft_is_fresh_and_shares_the_target(draft):
    fresh = controls.untrained(draft, generator())
    again = controls.untrained(draft, generator())
    for name, parameter in draft.named_parameters():
        assert not torch.equal(fresh.state_dict()[name], parameter)
        assert torch.equal(fresh.state_dict()[name], again.state_dict()[name])
    assert fresh.head.data_ptr() == draft.head.data_ptr() and fresh.embedding.data_ptr() == draft.embedding.data_ptr()
    assert (fresh.ln_final.weight == 1).all()


def test_shuffling_stays_inside_prompts():
    labels, sequence = torch.arange(30), torch.arange(30) // 10
    shuffled = controls.shuffle_within(labels, sequence, generator())
    assert not torch.equal(shuffled, labels)
    assert torch.equal(shuffled.view(3, 10).sort().values, labels.view(3, 10))


# ---- the whole


@pytest.fixture(scope="module")
def result():
    drafts = {"dflash": tiny_draft(TARGET, DFLASH, trimmed=40), "dspine": tiny_draft(TARGET, DSPINE, trimmed=40)}
    steps = []
    config = EmergenceConfig(
        labels_per_prompt=6, resamples=50, translator=TranslatorConfig(epochs=2, batch=64),
        probe=ProbeConfig(rows=200, penalties=(1e-4, 1e-3, 3e-3, 1e-2, 1e-1)), probe_classes=30,
    )  # fmt: skip
    found = emergence(drafts, make_rows(30), sets=["a", "b", "c"] * 10, config=config,
                      on_progress=lambda *step: steps.append(step))  # fmt: skip
    assert [done for _, done, _ in steps] == list(range(1, len(steps) + 1)) and steps[-1][1] == steps[-1][2]
    assert not any(module._forward_hooks for draft in drafts.values() for module in draft.modules())
    return found


def test_result_is_tidy_and_complete(result):
    table = result.frame()
    assert list(table.drop(columns=["setting", "reader"])) == list(COLUMNS) == list(result.table)
    assert not table.duplicated(["draft", "condition", "depth", "slot", "metric"]).any()
    plain_rows = table[~table["setting"].str.contains("−") & ~table["draft"].str.contains("−")]
    values = plain_rows[plain_rows["metric"].isin(["top1", "recall16", "mrr"])]
    assert ((values["mean"] >= 0) & (values["mean"] <= 1)).all()
    assert (values["low"] <= values["mean"] + 1e-9).all() and (values["mean"] <= values["high"] + 1e-9).all()
    assert set(plain_rows["setting"]) == {
        "trained", "shuffled labels", "untrained draft", "attention cut", "attention and injection cut", "counts",
        "control task",
    }  # fmt: skip
    assert result.grid("dspine").shape == (3, SLOTS) and result.grid("dspine", reader="nearest code").shape == (
        2,
        SLOTS,
    )
    assert len(result.select(draft="dspine − dflash", metric="top1")) == 3 * SLOTS
    assert len(result.select(setting="trained − attention cut", draft="dflash", metric="top1")) == 3 * SLOTS
    assert set(table["slot"]) == {"", "1", "2", "3", "4", "2-4"} and set(table["set"]) == {"mean"}
    assert result.data["test_prompts"] == 15 and set(result.data["proposable"]) == {"dflash", "dspine"}


def test_random_drafts_know_nothing(result):
    """Random labels: no reader may do better than the commonest token."""
    ceiling = result.select(draft="dflash", setting="counts", reader="unigram", metric="top1")["high"].max() + 0.15
    for reader in ("translator", "lens", "nearest code"):
        assert (result.select(reader=reader, metric="top1")["mean"] < ceiling).all()


def test_depth_zero_reads_the_same_at_every_slot(result):
    for draft in ("dflash", "dspine"):
        row = result.grid(draft).loc[0]
        assert (row == row.iloc[0]).all()
        assert (
            result.select(draft=draft, setting="trained", reader="translator", depth=0, metric="top1_fall")[
                "mean"
            ].item()
            == 0
        )


def test_differences_are_paired(result):
    a, b = result.grid("dspine"), result.grid("dflash")
    assert np.allclose(result.grid("dspine − dflash"), a - b)
    cut = result.grid("dspine", "attention cut")
    assert np.allclose(result.grid("dspine", "trained − attention cut"), a - cut)


def test_findings_are_sentences(result):
    text = result.findings()
    assert any(t.startswith("dflash: with matched labels") for t in text) and all(t.endswith(".") for t in text)
    assert "nan" not in " ".join(text).lower()


def test_round_trip(result, tmp_path):
    result.save(tmp_path)
    back = EmergenceResult.load(tmp_path)
    pd.testing.assert_frame_equal(back.frame(), result.frame())
    assert back.data == result.data and back.drafts == result.drafts and back.config == result.config
    assert back.findings() == result.findings()


def test_same_seed_same_table():
    drafts = {"dflash": tiny_draft(TARGET, DFLASH, trimmed=40)}
    one, two = (emergence(drafts, ROWS, config=SMALL).frame() for _ in range(2))
    pd.testing.assert_frame_equal(one, two)


def test_drafts_of_different_width_are_refused():
    drafts = {"a": tiny_draft(TARGET, DFLASH), "b": tiny_draft(TARGET, DFLASH, block_size=4)}
    with pytest.raises(UsageError, match="one block size"):
        emergence(drafts, ROWS, config=SMALL)


def test_a_planted_gradient_is_found(draft):
    """A draft whose stream carries the label with noise that grows with the slot."""
    embed = TARGET.head[draft.vocabulary]
    labels = torch.randint(40, (300,), generator=generator())
    noise = torch.randn(3, 300, SLOTS, 32, generator=generator(1)) * torch.arange(1, SLOTS + 1)[:, None]
    states = embed[labels][:, None] + 0.25 * noise
    found = torch.stack([readers.ranks(readers.lens(draft), s, labels[:, None].expand(-1, SLOTS)) for s in states])
    sequence = torch.arange(300) // 10
    split = split_prompts([Row(torch.tensor([i, i, 9]), 2, None) for i in range(30)], usable=range(30), sets=None,
                          groups=None, train_share=0.1, validation_share=0.1, generator=generator())  # fmt: skip
    test = split.test(sequence)
    item = LabelRanks(
        "d",
        "trained",
        "translator",
        found[:, test],
        sequence[test],
        torch.ones(int(test.sum()), dtype=torch.bool),
        0,
        40,
    )
    table = tabulate([item], split, 200, 0)
    falls = table[table["metric"] == "top1_fall"]
    assert (falls["low"] > 0.1).all() and (table[table["metric"] == "top1_trend"]["high"] < -0.7).all()
    means = table[(table["metric"] == "top1") & (table["depth"] == 0)]["mean"].tolist()
    assert np.allclose(means, (found[0, test] == 0).double().mean(0))


def test_trend_is_spearman():
    from scipy.stats import spearmanr

    rows = torch.tensor([[0.9, 0.5, 0.5, 0.1], [0.1, 0.3, 0.2, 0.4]], dtype=torch.double)
    expected = [spearmanr(range(4), row).statistic for row in rows.tolist()]
    assert np.allclose(_trend(rows), expected) and _trend(torch.ones(4)).isnan()


def test_a_set_with_one_tested_prompt_has_no_interval():
    drafts = {"dflash": tiny_draft(TARGET, DFLASH, trimmed=40)}
    config = replace(SMALL, controls=False)
    found = emergence(drafts, make_rows(8), sets=["a", "b"] * 4, config=config)
    assert found.data["test_prompts_by_set"] == {"a": 1, "b": 1}
    assert found.table["low"].isna().all() and found.table["high"].isna().all()
    assert "(no interval)" in found.findings()[0] and found.claims()[0].verdict.effect == "undecided"


def test_measured_the_same_whatever_mode_the_caller_is_in():
    drafts = {"dflash": tiny_draft(TARGET, DFLASH, trimmed=40)}
    config = replace(SMALL, controls=False)
    usual = emergence(drafts, ROWS, config=config).table
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            pd.testing.assert_frame_equal(emergence(drafts, ROWS, config=config).table, usual)


# ---- linear probes


def test_probe_finds_linear_structure_and_its_control_does_not():
    rows = [Row(torch.randint(6, (25,), generator=generator(i)), 5, None) for i in range(24)]
    sequence = torch.arange(240) // 10
    labels = torch.randint(6, (240,), generator=generator())
    centres = torch.randn(6, 8, generator=generator(1)) * 2
    states = torch.randn(2, 240, SLOTS, 8, generator=generator(2))
    states[1] += centres[labels][:, None]
    anchors = torch.randint(20, (240, SLOTS), generator=generator(3))
    split = split_prompts(rows, usable=range(24), sets=None, groups=None, train_share=0.4, validation_share=0.3,
                          generator=generator())  # fmt: skip
    config = ProbeConfig(rows=300, penalties=(1e-4, 1e-3, 1e-2, 3e-2, 1e-1))
    draft = tiny_draft(TARGET, DFLASH, trimmed=40)

    def probed(classes):
        study = DraftStudy("d", draft, rows, split, EmergenceConfig(probe_classes=classes), EXACT, Ticker(None, 2))
        return list(study._probes(SlotReadings(states, labels, anchors, sequence), config))

    task, control = (((one.ranks == 0).float()[:, one.rows]).mean((1, 2)) for one in probed(5))
    assert task[1] > 0.75 and task[0] < 0.45 and control.max() < 0.45
    assert probed(5)[0].rows.float().mean() < 1  # the sixth class is not asked about
    labels[split.validation(sequence)] = 9
    with pytest.raises(UsageError, match="commonest"):
        probed(5)
