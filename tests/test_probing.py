"""Probes: split by prompt or fooled, honest about convergence, and the study measures what it says."""

import math
from dataclasses import replace

import pandas as pd
import pytest
import torch
from toy import BLOCK, D_MODEL, LAYERS, TAPS, seeded, toy_draft, toy_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.experiments.common.arena import Arena
from dspine_probe.experiments.common.linear_probe import (
    ProbeConfig,
    control_labels,
    fit_probe,
    online_bits,
    split_groups,
)
from dspine_probe.experiments.probing.measure import ProbingConfig, probing
from dspine_probe.experiments.probing.questions import ACCEPTED, OWN, PREDECESSOR, SLOT, SUCCESSOR, ask, read_rows
from dspine_probe.experiments.probing.table import ProbingResult
from dspine_probe.plots.probing import curves, heatmap

SLOTS = BLOCK - 1
FEW = ProbeConfig(penalties=(1e-4, 1e-3, 3e-3, 1e-2, 1e-1), rows=400)


def accuracy(x, y, parts, *, where=None, seed=0):
    probe = fit_probe(x, y, parts, config=ProbeConfig(), generator=seeded(seed))
    rows = parts.test if where is None else parts.test & where
    return float((probe.predict(x[rows]) == y[rows]).float().mean())


# ---- what a wrong split makes out of nothing (random weights, labels without information)

SEQUENCES, LENGTH = 24, 32


@pytest.fixture(scope="module")
def random_llama():
    """Tokens, and states after 0, 2 and 4 layers of a random Llama."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, num_key_value_heads=2, initializer_range=0.1, **sizes)
    tokens = torch.randint(3, 60, (SEQUENCES, LENGTH), generator=seeded())
    with torch.no_grad():
        model = LlamaForCausalLM(config).eval().base_model
        states = model(tokens, output_hidden_states=True).hidden_states
    return tokens.flatten(), [states[depth].flatten(0, 1) for depth in (0, 2, 4)]


def test_a_token_split_leaks_and_a_grouped_split_does_not(random_llama):
    """A coin flip a sequence says nothing about any state, yet a split by token reads it, better with depth."""
    _, depths = random_llama
    group = torch.arange(SEQUENCES).repeat_interleave(LENGTH)
    found = {"token": [], "grouped": []}
    for x in depths:
        for name, unit in (("token", torch.arange(len(group))), ("grouped", group)):
            scores = []
            for seed in range(4):
                coin = torch.randint(2, (SEQUENCES,), generator=seeded(100 + seed))[group]
                scores.append(accuracy(x, coin, split_groups(unit, generator=seeded(seed)), seed=seed))
            found[name].append(sum(scores) / len(scores))
    assert found["token"][0] < 0.65 < 0.7 < found["token"][1] < found["token"][2]
    assert all(abs(score - 0.5) < 0.1 for score in found["grouped"])


def test_the_control_task_is_learned_by_heart_and_only_from_types_that_recur(random_llama):
    tokens, depths = random_llama
    group = torch.arange(SEQUENCES).repeat_interleave(LENGTH)
    recurring, withheld = [], []
    for x in depths:
        scores = []
        for seed in range(3):
            y = control_labels(tokens, torch.arange(4), seeded(seed))
            assert len({(t, c) for t, c in zip(tokens.tolist(), y.tolist(), strict=True)}) == len(tokens.unique())
            parts = split_groups(group, generator=seeded(seed))
            held = torch.isin(tokens, torch.randperm(64, generator=seeded(seed))[:20])
            scores.append((accuracy(x, y, parts), accuracy(x, y, parts.only(~held, test_too=False), where=held)))
        recurring.append(sum(a for a, _ in scores) / 3)
        withheld.append(sum(b for _, b in scores) / 3)
    assert recurring[0] > 0.98 and recurring[1] < 0.6 and recurring[2] < 0.6
    assert all(abs(score - 0.25) < 0.12 for score in withheld)


def test_more_dimensions_than_examples_fit_anything():
    x, y = torch.randn(180, 128, generator=seeded(1)), torch.randint(2, (180,), generator=seeded(2))
    parts = split_groups(torch.arange(180), train_share=1 / 3, validation_share=0.1, generator=seeded())
    probe = fit_probe(x, y, parts, config=ProbeConfig(penalties=(1e-1, 1, 2, 4, 8)), generator=seeded())
    assert probe.train_accuracy > 0.95 and abs(accuracy(x, y, parts) - 0.5) < 0.15


# ---- the probe itself


def separable(rows=240, seed=0):
    generator = seeded(seed)
    y = torch.randint(3, (rows,), generator=generator)
    x = torch.randn(rows, 6, generator=generator) * torch.tensor([1e-3, 1, 1e3, 1, 1, 1]) + 5
    x[:, 0] += 1e-2 * y  # tiny scale: found only if features are standardised
    return x, y, torch.arange(rows) // 8


def test_probe_standardises_with_training_rows_and_chooses_on_validation():
    x, y, group = separable()
    parts = split_groups(group, generator=seeded())
    probe = fit_probe(x, y, parts, config=ProbeConfig(), generator=seeded())
    assert float((probe.predict(x[parts.test]) == y[parts.test]).float().mean()) > 0.9
    assert torch.allclose(
        torch.tensor(probe.model.named_steps["standardscaler"].mean_), x[parts.train].double().mean(0), rtol=1e-4
    )
    shifted = x.clone()
    shifted[parts.test] += 100  # the test part has no say in the fit
    again = fit_probe(shifted, y, parts, config=ProbeConfig(), generator=seeded())
    assert again.penalty == probe.penalty and again.validation_accuracy == probe.validation_accuracy
    alone = {
        c: fit_probe(x, y, parts, config=ProbeConfig(penalties=(c, c / 2, c / 3, c / 4, c / 5)), generator=seeded())
        for c in ProbeConfig().penalties
    }
    assert probe.validation_accuracy >= max(one.validation_accuracy for one in alone.values()) - 0.03


def test_a_fit_that_does_not_converge_is_not_used_and_counted():
    x, y, group = separable()
    parts = split_groups(group, generator=seeded())
    some = fit_probe(
        x, y, parts, config=ProbeConfig((1e-6, 1e-5, 1e-4, 1e3, 1e5), max_iterations=8), generator=seeded()
    )
    assert 0 < some.failed < 5 and some.penalty < 1e3
    with pytest.raises(ProbeError, match="no probe converged within 1 iterations"):
        fit_probe(x, y, parts, config=ProbeConfig(max_iterations=1), generator=seeded())


def test_unusable_data_is_refused_in_a_sentence():
    x, y, group = separable()
    with pytest.raises(UsageError, match="needs the prompt of every row"):
        split_groups(None, generator=seeded())
    with pytest.raises(UsageError, match="all rows are of one prompt"):
        split_groups(torch.zeros(20, dtype=torch.long), generator=seeded())
    with pytest.raises(UsageError, match="the test part is empty"):
        split_groups(torch.arange(2).repeat(10), generator=seeded())
    with pytest.raises(UsageError, match="leave a test part"):
        split_groups(group, train_share=0.8, validation_share=0.2, generator=seeded())
    parts = split_groups(group, generator=seeded())
    with pytest.raises(UsageError, match="the test part is empty"):
        replace(parts, test=torch.zeros_like(parts.test))
    with pytest.raises(UsageError, match="prompt of the test part is in another part"):
        replace(parts, test=torch.ones_like(parts.test))
    with pytest.raises(UsageError, match="too few to choose from"):
        fit_probe(x, y, parts, config=ProbeConfig(penalties=(1.0, 2.0)), generator=seeded())
    with pytest.raises(UsageError, match="all of one class"):
        fit_probe(x, torch.zeros_like(y), parts, config=ProbeConfig(), generator=seeded())


def test_split_keeps_groups_whole_and_shares_within_strata():
    group = torch.arange(60).repeat_interleave(3)
    stratum = (group % 3 == 0).long()
    parts = split_groups(group, stratum=stratum, generator=seeded())
    assert torch.equal(parts.train.long() + parts.validation.long() + parts.test.long(), torch.ones_like(group))
    for value, size in ((0, 40), (1, 20)):
        counts = [len(group[p & (stratum == value)].unique()) for p in (parts.train, parts.validation, parts.test)]
        assert counts == [size // 2, round(0.15 * size), size - size // 2 - round(0.15 * size)]
    other = split_groups(group, generator=seeded(1))
    assert not torch.equal(parts.test, other.test)
    fewer = parts.only(group % 2 == 0, test_too=False)
    assert torch.equal(fewer.test, parts.test) and not (fewer.train & (group % 2 == 1)).any()


def test_description_length_is_short_only_where_there_is_something_to_read():
    x, y, group = separable(rows=960)
    send = {"classes": 3, "penalty": 1.0, "config": ProbeConfig(), "generator": seeded()}
    bits, failed = online_bits(x, y, group, **send)
    noise, _ = online_bits(torch.randn(960, 6, generator=seeded(9)), y, group, **(send | {"generator": seeded()}))
    assert failed == 0 and len(bits) == 960
    first = torch.randperm(120, generator=seeded())[: round(120 / 32)]
    assert torch.allclose(bits[torch.isin(group, first)], torch.tensor(math.log2(3)).double())
    assert float(bits.mean()) < 0.6 < math.log2(3) - 0.02 < float(noise.mean()) < 1.9
    unseen = torch.where(torch.isin(group, first) & (y == 2), 0, y)
    assert online_bits(x, unseen, group, **(send | {"generator": seeded()}))[0].isfinite().all()


# ---- the study


FIRST, ANCHORS = 9, 8


def toy_arena(prompts=8):
    answers = tuple(replace(toy_sequence(length=20, seed=s), id=str(s)) for s in range(prompts))
    anchors = tuple(torch.arange(FIRST, FIRST + ANCHORS) for _ in range(prompts))
    return Arena(
        answers,
        tuple("ab"[s % 2] for s in range(prompts)),
        anchors,
        SLOTS,
        {"target": "toy", "taps": list(range(TAPS))},
    )


CONFIG = ProbingConfig(classes=4, probe=FEW, resamples=30, questions=(OWN, SLOT), described=(OWN,))


@pytest.fixture(scope="module")
def arena():
    return toy_arena()


@pytest.fixture(scope="module")
def rows(arena):
    return read_rows(toy_draft("dspine"), arena)


@pytest.fixture(scope="module")
def result(arena):
    return probing({"toy": toy_draft("dspine")}, arena, config=CONFIG)


def test_rows_hold_the_tokens_around_every_slot(arena, rows):
    assert rows.states.shape == (LAYERS + 1, len(arena.prompt), SLOTS, D_MODEL)
    index = 17
    answer = arena.answers[int(arena.prompt[index])]
    anchor = FIRST + index % ANCHORS
    everything = torch.ones(len(arena.prompt), dtype=torch.bool)
    for question, shift in ((PREDECESSOR, 0), (OWN, 1), (SUCCESSOR, 2)):
        asked = ask(question, rows, everything, 5)
        common = rows.tokens[:, shift : shift + SLOTS]
        kinds, counts = common[common >= 0].unique(return_counts=True)
        kept = set(kinds[counts.argsort(descending=True, stable=True)[:5]].tolist())
        for slot in range(SLOTS):
            token = int(answer.tokens[anchor + slot + shift])
            assert (int(asked.classes[index, slot]) >= 0) == (token in kept)
        assert asked.count == 5 and 0 < asked.coverage < 1
    last = rows.tokens[arena.prompt == 0][-1]
    assert last[-1] == -1 and (last[:-1] >= 0).all()  # its successor lies behind the answer
    assert ask(SLOT, rows, everything, 5).classes[3].tolist() == list(range(SLOTS))
    assert (rows.accepted[:, 1:] <= rows.accepted[:, :-1]).all()
    assert ask(ACCEPTED, rows, everything, 5).count == 2
    with pytest.raises(UsageError, match="no question 'mood'"):
        ask("mood", rows, everything, 5)


def test_study_reads_what_is_there_and_its_controls_do_not(result):
    """The slot index is in every state, and the baseline that is told it says so."""
    at = {"draft": "toy", "metric": "accuracy"}
    index = result.select(**at, question=SLOT, probe="trained", slot="", depth=LAYERS)["mean"].item()
    assert index > 0.8
    alone = result.select(**at, question=SLOT, probe="slot index alone", slot="")["mean"].item()
    assert alone == 1.0  # the baseline knows the answer, and selectivity over it says so
    over = result.select(**at, question=SLOT, probe="trained − slot index alone", slot="", depth=LAYERS)
    assert over["mean"].item() == pytest.approx(index - 1, abs=1e-6)
    control = result.select(**at, question=OWN, probe="control task", slot="", depth=LAYERS)["mean"].item()
    gap = result.select(**at, question=OWN, probe="trained − control task", slot="", depth=LAYERS)["mean"].item()
    trained = result.select(**at, question=OWN, probe="trained", slot="", depth=LAYERS)["mean"].item()
    assert gap == pytest.approx(trained - control, abs=1e-6)
    assert (
        result.select(question=OWN, metric="accuracy, unseen anchor types", probe="control task", slot="")["n"]
        .between(1, ANCHORS * 8 * SLOTS)
        .all()
    )
    compression = result.select(question=OWN, metric="compression", slot="")
    bits = result.select(question=OWN, metric="bits a label", slot="")
    assert compression["mean"].to_numpy() * bits["mean"].to_numpy() == pytest.approx(2.0, abs=1e-6)
    assert result.select(question=SLOT, metric="bits a label").empty
    spread = result.select(question=OWN, metric="accuracy, sd over splits", slot="")
    assert (spread["mean"] >= 0).all() and spread["low"].isna().all()


def test_every_fit_is_on_record(result):
    assert len(result.fits) == 5 * 2 * (3 * (LAYERS + 1) + 1)
    assert {fit["repeat"] for fit in result.fits} == set(range(5))
    assert all(fit["penalty"] in FEW.penalties and fit["rows"] <= FEW.rows for fit in result.fits)
    assert (
        f"{sum(fit['failed'] for fit in result.fits)} of {5 * len(result.fits)} fits did not converge"
        in result.findings()[-1]
    )


def test_result_survives_the_disk_and_repeats(arena, result, tmp_path):
    result.save(tmp_path)
    again = ProbingResult.load(tmp_path)
    pd.testing.assert_frame_equal(again.frame(), result.frame(), check_exact=True)
    assert again.findings() == result.findings() and again.skipped == result.skipped
    small = replace(CONFIG, questions=(SLOT,), described=())
    first = probing({"toy": toy_draft("dspine")}, arena, config=small).frame()
    pd.testing.assert_frame_equal(first, result.select(question=SLOT).reset_index(drop=True), check_exact=True)


def test_figures_say_what_they_show(result):
    block = curves(result)["toy"]
    final = result.select(question=OWN, probe="trained", metric="accuracy", slot="", depth=LAYERS)["mean"].item()
    assert f"own token, after the last layer: trained {100 * final:.0f} %" in block.alt
    assert len(block.figure.data) == 2 * 3 and block.figure.data[0].y[-1] == pytest.approx(100 * final, abs=1e-3)
    assert heatmap(result, "toy", OWN).figure.data[0].z.shape == (LAYERS + 1, SLOTS)


def test_studies_that_cannot_be_made_are_refused(arena):
    with pytest.raises(UsageError, match="no draft"):
        probing({}, arena)
    with pytest.raises(UsageError, match="give five or more"):
        ProbingConfig(repeats=4)
    with pytest.raises(UsageError, match=r"no questions \['mood'\]"):
        ProbingConfig(questions=("mood",))
    taps = replace(arena, about={**arena.about, "taps": [0, 2]})
    with pytest.raises(UsageError, match=r"'draft' reads taps \[0, 1\] .* the arena holds taps \[0, 2\]"):
        probing({"toy": toy_draft("dspine")}, taps, config=CONFIG)
    with pytest.raises(UsageError, match="drafts 3 slots, but .* blocks of 2"):
        probing({"toy": toy_draft("dspine")}, replace(arena, slots=2), config=CONFIG)
