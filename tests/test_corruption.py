"""Predecessor corruption: every condition against a pass made by hand, and checks that can fail."""

import dataclasses

import pandas as pd
import pytest
import torch
from test_arena import tiny_arena
from tiny import MASK, tiny_draft

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.drafts import DFlash
from dspine_probe.drafts.block import TruePredecessors
from dspine_probe.drafts.injection import DSpineConfig
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.experiments.common.intervals import Estimate
from dspine_probe.experiments.common.rows import RowBuilder
from dspine_probe.experiments.corruption.blocks import OWN, prepare
from dspine_probe.experiments.corruption.config import CorruptionConfig
from dspine_probe.experiments.corruption.measure import corruption
from dspine_probe.experiments.corruption.passes import CorruptionRunner, as_long_as, hide
from dspine_probe.experiments.corruption.protocols import (
    FIELDS,
    AnchorProtocol,
    Cell,
    MessageProtocol,
    PrefixProtocol,
    Sheets,
)
from dspine_probe.experiments.corruption.replacements import KINDS, RANK_2, ZERO, FrequencyBands, replacement_tokens
from dspine_probe.experiments.corruption.result import CorruptionResult
from dspine_probe.experiments.corruption.table import FACTORS, CorruptionTable
from dspine_probe.hooks import HookedDraft
from dspine_probe.plots import corruption as plots
from dspine_probe.precision import EXACT

COUNTS = torch.arange(64) + 1
CONFIG = CorruptionConfig(resamples=50)
SLOTS = 4
SPINE = {"part": DSpineConfig(transfer_rank=8, message_size=6, top_k=4, replacement_layers=2)}


class Scene:
    """A tiny arena with replacements, and its blocks in one group."""

    def __init__(self) -> None:
        self.target, self.arena = tiny_arena(8, per_answer=5)
        generator = torch.Generator().manual_seed(0)
        bands = FrequencyBands.of(COUNTS)
        found = [
            replacement_tokens(self.target, a, KINDS, mask_token=MASK, bands=bands, generator=generator)
            for a in self.arena.answers
        ]
        self.replacements = {kind: [one[kind] for one in found] for kind in KINDS}
        (batch,) = self.arena.batches(answers_per_batch=8)
        self.group = prepare(
            self.arena, self.arena.order, batch, self.replacements, self.target, CONFIG, later_slots=True
        )
        self.answers = [self.arena.answers[i] for i in self.arena.order]

    def texts(self, block: int, kind: str, position: int):
        """The answer of a block, and the same edited at a position."""
        text = int(self.group.text[block])
        clean = self.answers[text].tokens
        edited = clean.clone()
        edited[position] = self.group.replacements[kind][text][position]
        return self.answers[text], edited

    def states(self, tokens):
        return self.target.hidden_states(tokens[None], self.arena.about["taps"])


@pytest.fixture(scope="module")
def scene() -> Scene:
    return Scene()


def draft_of(scene, architecture, **changes):
    return tiny_draft(scene.target, architecture, trimmed=60, **changes)


def measured(scene, draft, protocol, *extra):
    sheets = Sheets(len(scene.group), SLOTS)
    with HookedDraft(draft) as hooked, torch.no_grad():
        protocol(CorruptionRunner(hooked, scene.group), CONFIG, sheets, *extra).run()
    return sheets


def by_hand(draft, clean, edited, gold, answer=None):
    """Fields of one slot from its two rows of scores."""
    logp, other = clean.log_softmax(-1), edited.log_softmax(-1)
    index = int(draft.to_index(torch.tensor(gold)))
    pick, picked = (int(draft.to_tokens(row.argmax())) for row in (clean, edited))
    nan = float("nan")
    follow = [nan] * 3 if answer is None else [pick == answer, picked == answer, answer != gold]
    gold_logp = [nan, nan] if index < 0 else [float(logp[index]), float(other[index])]
    kl = float((logp.exp() * (logp - other)).sum())
    return torch.tensor([pick == gold, picked == gold, *gold_logp, kl, *follow], dtype=torch.float32)


def same(found, wanted):
    torch.testing.assert_close(found, wanted, atol=3e-4, rtol=1e-3, equal_nan=True)


@pytest.mark.parametrize("architecture", [DFLASH, DSPINE])
def test_protocol_a_is_what_passes_on_the_edited_texts_give(scene, architecture):
    draft, group = draft_of(scene, architecture), scene.group
    found = measured(scene, draft, AnchorProtocol, torch.Generator().manual_seed(0))
    tried = 0
    for block in range(0, len(group), 3):
        anchor, first = int(group.anchors[block]), int(group.first[block])
        answer, _ = scene.texts(block, RANK_2, anchor)
        gold = answer.tokens[anchor + 1 : anchor + 5].tolist()

        def scores(taps, token, anchor=anchor):
            with torch.no_grad():
                return draft(taps[None], torch.tensor([[token]]), torch.tensor([[anchor]]))[0]

        clean = scores(answer.taps, int(answer.tokens[anchor]))
        for kind in (RANK_2, "frequency", "mask"):
            _, edited = scene.texts(block, kind, anchor)
            asked = int(scene.target.logits(scene.states(edited[: anchor + 1]).final[0, -1]).argmax())
            wrong = scores(answer.taps, int(edited[anchor]))
            for slot in range(SLOTS):
                wanted = by_hand(draft, clean[slot], wrong[slot], gold[slot], asked if slot == 0 else None)
                same(found[Cell("A", "t−1", "token", kind)][:, block, slot], wanted)
            for site, position in (("t−2", anchor - 1), ("t−3", anchor - 2), ("first", first)):
                row = found[Cell("A", site, "row", kind)][:, block]
                if position < first or (site == "first" and first > anchor - 3):
                    assert row.isnan().all(), "the prompt is not edited"
                    continue
                _, edited = scene.texts(block, kind, position)
                states = scene.states(edited)
                asked = int(scene.target.logits(states.final[0, anchor]).argmax())
                whole = states.taps[0].clone()
                whole[:position] = answer.taps[:position]
                alone = answer.taps.clone()
                alone[position] = whole[position]
                told = asked if CONFIG.reruns(kind) else None
                for edit, taps in (("row", alone), ("rerun", whole)):
                    key = Cell("A", site, edit, kind)
                    if edit == "rerun" and (site == "t−2" or told is None):
                        assert key not in found, "the same as the row alone, or not asked for"
                        continue
                    wrong = scores(taps, int(answer.tokens[anchor]))
                    same(found[key][:, block, 0], by_hand(draft, clean[0], wrong[0], gold[0], told))
                    tried += 1
    assert tried > 40


def test_nothing_is_a_zero_embedding_and_a_zero_code(scene):
    group = scene.group
    for architecture in (DFLASH, DSPINE):
        draft = draft_of(scene, architecture)
        found = measured(scene, draft, AnchorProtocol, None)[Cell("A", "t−1", "token", ZERO)]
        bare = draft_of(scene, architecture)
        block = next(b for b in range(len(group)) if int(group.tokens[b, 0]) != MASK)
        anchor, token = int(group.anchors[block]), int(group.tokens[block, 0])
        bare.embedding = bare.embedding.clone()
        bare.embedding[token] = 0
        if architecture == DSPINE:
            bare.codes[token] = 0
        answer = scene.answers[int(group.text[block])]
        with torch.no_grad():
            given = answer.taps[None], torch.tensor([[token]]), torch.tensor([[anchor]])
            clean, wrong = draft(*given)[0], bare(*given)[0]
        for slot in range(1, SLOTS):
            wanted = by_hand(draft, clean[slot], wrong[slot], int(group.tokens[block, slot + 1]))
            same(found[:, block, slot], wanted)


def test_a_hidden_anchor_is_hidden_from_the_last_write_too(scene):
    """Slot 1 as drafted, against tables in which the anchor's token has no embedding and no code."""
    draft, group = draft_of(scene, DSPINE), scene.group
    with torch.no_grad(), HookedDraft(draft) as hooked:
        for block in range(0, len(group), 4):
            token, anchor = group.tokens[block, :1], group.anchors[block, None, None]
            if int(token) == MASK:
                continue
            context = draft.encode_context(scene.answers[int(group.text[block])].taps[None])
            with hooked.hooks(hide(draft, 0)):
                drafted = draft.draft_greedy(context, token[None], anchor)
                scores = draft.transition_cache(draft.run(context, token[None], anchor), token[None]).scores
            bare = draft_of(scene, DSPINE)
            bare.embedding = bare.embedding.clone()
            bare.embedding[token], bare.codes[token] = 0, 0
            assert int(bare.draft_greedy(context, token[None], anchor)[0, 0]) == int(drafted[0, 0])
            wanted = bare.transition_cache(bare.run(context, token[None], anchor), token[None]).scores
            torch.testing.assert_close(scores[0, 0], wanted[0, 0], atol=1e-4, rtol=1e-4)


def test_the_unedited_text_run_again_changes_nothing_but_rounding(scene):
    found = measured(scene, draft_of(scene, DFLASH), AnchorProtocol, None)
    fields = dict(zip(FIELDS, found[Cell("A", "t−3", "rerun", "unedited")], strict=True))
    kept = ~fields["hit"].isnan()
    assert torch.equal(fields["hit"][kept], fields["clean_hit"][kept])
    assert float(fields["kl"][kept].abs().max()) < 1e-5
    moved = fields["moved"][:, 0]
    assert moved[~moved.isnan()].eq(0).all(), "the target writes what it wrote"


@pytest.mark.parametrize("causal", [True, False])
def test_protocol_b_corrupts_one_shown_token(scene, causal):
    draft, group = draft_of(scene, DFLASH, is_causal=causal), scene.group
    found = measured(scene, draft, PrefixProtocol)
    block = len(group) - 1
    text, anchor = int(group.text[block]), int(group.anchors[block])
    answer, tokens = scene.answers[text], group.tokens[block]

    def scores(shown, t):
        visible = torch.where(torch.arange(1, SLOTS + 1) < t, shown[1:], -1)[None]
        with torch.no_grad():
            given = answer.taps[None], shown[None, :1], torch.tensor([[anchor]])
            return draft(*given, visible=visible)[0, t - 1]

    for t in range(1, SLOTS + 1):
        clean = scores(tokens, t)
        for site, slot in (("t−1", t - 1), ("t−2", t - 2), ("t−3", t - 3), ("first", 0)):
            for kind in (RANK_2, "mask"):
                row = found[Cell("B", site, "token", kind)][:, block, t - 1]
                if slot < 0 or (site == "first" and t <= 3):
                    assert row.isnan().all()
                    continue
                shown = tokens.clone()
                shown[slot] = group.replacements[kind][text][anchor + slot]
                asked = None
                if site == "t−1" and kind == RANK_2:
                    edited = answer.tokens[: anchor + t].clone()
                    edited[-1] = shown[slot]
                    asked = int(scene.target.logits(scene.states(edited).final[0, -1]).argmax())
                same(row, by_hand(draft, clean, scores(shown, t), int(tokens[t]), asked))


def test_protocol_c_sends_one_wrong_code(scene):
    draft, group = draft_of(scene, DSPINE, **SPINE), scene.group
    found = measured(scene, draft, MessageProtocol, torch.Generator().manual_seed(0))
    block = len(group) - 1
    text, anchor = int(group.text[block]), int(group.anchors[block])
    answer, tokens = scene.answers[text], group.tokens[block]

    def scores(said):
        """Training's way of feeding true codes, in all layers of this draft."""
        truth = TruePredecessors(said[None], torch.tensor([True]))
        with torch.no_grad():
            context = draft.encode_context(answer.taps[None])
            states = draft.run(context, tokens[None, :1], torch.tensor([[anchor]]), true_predecessors=truth)
            return draft.logits(states.hidden[0, 1:])

    clean = scores(tokens)
    for slot in range(SLOTS):
        said = tokens.clone()
        said[slot] = group.replacements[RANK_2][text][anchor + slot]
        wrong = scores(said)
        for t in range(slot + 1, SLOTS + 1):
            site = f"t−{t - slot}" if t - slot <= 3 else "first"
            row = found[Cell("C", site, "message", RANK_2)][:5, block, t - 1]
            same(row, by_hand(draft, clean[t - 1], wrong[t - 1], int(tokens[t]))[:5])
    assert Cell("C", "t−1", "message", "noise") in found


class Restless(DFlash):
    """Never says the same thing twice."""

    def run(self, *given, **more):
        states = super().run(*given, **more)
        self.calls = getattr(self, "calls", 0) + 1
        return dataclasses.replace(states, hidden=states.hidden * (1 + 1e-6 * self.calls))


class Chatty(DFlash):
    """Says it is causal and is not."""

    def block_inputs(self, *given):
        inputs = super().block_inputs(*given)
        bias = dataclasses.replace(inputs.bias, block=torch.zeros_like(inputs.bias.block))
        return dataclasses.replace(inputs, bias=bias)


def test_exchanging_a_thing_for_itself_is_exact_and_checked(scene):
    for architecture, protocols in ((DFLASH, [AnchorProtocol]), (DSPINE, [AnchorProtocol, MessageProtocol])):
        with HookedDraft(draft_of(scene, architecture)) as hooked, torch.no_grad():
            for protocol in protocols:
                runner = CorruptionRunner(hooked, scene.group)
                made = protocol(runner, CONFIG, Sheets(len(scene.group), SLOTS), None)
                assert made.check_no_op() == (7 if protocol is AnchorProtocol else SLOTS)
                made.run()
                made.check_no_op()
    restless = draft_of(scene, DFLASH)
    restless.__class__ = Restless
    with pytest.raises(ProbeError, match="exchanging a token for itself changed"):
        corruption({"d": restless}, scene.target, scene.arena, counts=COUNTS, config=CONFIG, precision=EXACT)


def test_a_causal_block_that_passes_something_backwards_is_refused(scene):
    chatty = draft_of(scene, DFLASH, is_causal=True)
    chatty.__class__ = Chatty
    with pytest.raises(ProbeError, match="a corrupted slot of a causal block changed"):
        measured(scene, chatty, PrefixProtocol)


def test_noise_is_as_long_as_the_change_it_is_held_against():
    change = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0))
    noise = as_long_as(change, torch.Generator().manual_seed(1))
    torch.testing.assert_close(noise.norm(dim=-1), change.norm(dim=-1))
    assert (torch.cosine_similarity(noise, change, dim=-1).abs() < 0.99).all()


@pytest.fixture(scope="module")
def result(scene) -> CorruptionResult:
    drafts = {"dflash": draft_of(scene, DFLASH), "dspine": draft_of(scene, DSPINE)}
    steps = []
    made = corruption(
        drafts,
        scene.target,
        scene.arena,
        fine_tuned={"dflash": draft_of(scene, DFLASH, seed=5)},
        counts=COUNTS,
        config=CONFIG,
        precision=EXACT,
        on_progress=lambda *step: steps.append(step),
    )
    assert [done for _, done, _ in steps] == list(range(1, steps[0][2] + 1))
    return made


def test_the_result_has_every_protocol_place_and_control(result, scene):
    rows = result.frame()
    plain = rows[~rows[["draft", "site", "kind"]].apply(lambda c: c.str.contains("−  |\\s−\\s")).any(axis=1)]
    assert set(plain["protocol"]) == {"A", "B", "C", "decode"}
    for protocol, extra in (("A", {"noise", "unedited"}), ("B", {"clean"}), ("C", {"noise"})):
        mine = plain[plain["protocol"] == protocol]
        kinds = set(CONFIG.message_kinds if protocol == "C" else KINDS)
        assert set(mine["kind"]) == kinds | extra
        assert {"t−1", "t−2", "t−3", "first"} <= set(mine["site"])
    counted = rows[rows["metric"].isin(["clean", "top1", "moved", "followed"])]
    assert counted["mean"].between(0, 1).all() and (rows["low"] <= rows["high"]).all()
    assert result.data["exchanged_for_itself"] == {"dflash": 7 + SLOTS, "dspine": 7 + SLOTS}
    moved = result.select(kind="unedited", metric="moved")
    assert len(moved) == 2 and (moved["mean"] == 0).all(), "the target writes what it wrote"
    assert result.data["blocks"] == len(scene.group) and result.data["fine_tuned"] == ["dflash"]
    assert result.config["precision"] == "fp32"


def test_change_is_after_minus_before_on_the_same_blocks(result):
    wanted = {"draft": "dflash", "protocol": "A", "site": "t−1", "kind": RANK_2, "subset": "all"}
    means = {m: result.select(**wanted, metric=m, slot="2")["mean"].item() for m in ("clean", "top1", "change")}
    assert means["change"] == pytest.approx(means["top1"] - means["clean"])


def test_acceptance_under_true_anchors_is_that_of_the_walk(result, scene):
    from dspine_probe.decoding.offline import simulate_rounds

    draft = draft_of(scene, DFLASH)
    rounds = simulate_rounds(draft, scene.arena.answers)
    by_set = []
    for name in scene.arena.set_names:
        mine = [r for r, of in zip(rounds, scene.arena.sets, strict=True) if of == name]
        by_set.append(sum(sum(r.committed) for r in mine) / sum(len(r.anchors) for r in mine))
    row = result.select(draft="dflash", protocol="decode", kind="clean", metric="al").iloc[0]
    assert row["mean"] == pytest.approx(sum(by_set) / len(by_set))
    assert (result.select(protocol="decode", kind="clean", metric="al_change")[["mean", "low", "high"]] == 0).all(
        axis=None
    )


def test_results_come_back_from_disk_and_speak(result, tmp_path):
    result.save(tmp_path)
    again = CorruptionResult.load(tmp_path)
    pd.testing.assert_frame_equal(again.frame(), result.frame())
    assert again.findings() == result.findings() and again.claims() == result.claims()
    said = " ".join(result.findings())
    assert "protocol A" in said and "protocol B" in said and "protocol C" in said and "acceptance length" in said
    (claim,) = result.claims()
    assert claim.id == "P1" and "no-op" in claim.controls[0].name
    assert any("fine-tuned against parent" in control.name for control in claim.controls)
    assert not [control for control in claim.controls if control.outcome == "not measured"]
    alone = dataclasses.replace(result, table=result.table[result.table["condition"].str.startswith("A ")])
    missing = [control.name for control in alone.claims()[0].controls if control.outcome == "not measured"]
    assert [name.split(" (")[0] for name in missing] == ["protocol B", "protocol C"]


@pytest.mark.parametrize("figure", [plots.places, plots.protocols, plots.slots, plots.picks])
def test_figures_show_what_their_words_say(result, figure):
    block = figure(result)
    assert len(block.figure.data) and block.caption and "dflash" in block.alt and len(block.table)
    assert sum(len(trace.x) for trace in block.figure.data) == len(block.table)


def table(gaps, slot=1):
    """A result with nothing but the contrasts of t−1 against two places."""
    rows = RowBuilder(FACTORS)
    for site, (low, high) in zip(("t−2", "first"), gaps, strict=True):
        where = {"protocol": "A", "site": f"t−1 − {site}", "edit": "row", "kind": RANK_2, "subset": "all"}
        gap = Estimate(*map(torch.tensor, ((low + high) / 2, low, high)))
        rows.add(gap, draft="d", metric="change", slot=slot, n=9, **where)
    return CorruptionResult(rows.table(), {}, {"d": {}}, {"headline_slots": {"A": "1"}}, 0.0)


def test_a_place_that_costs_as_much_leaves_the_finding_unsettled():
    assert table([(-0.3, -0.2), (-0.3, -0.1)]).holds("d") is True
    assert table([(-0.3, -0.2), (-0.3, 0.1)]).holds("d") is None
    assert table([(-0.3, -0.2), (0.05, 0.1)]).holds("d") is False
    assert table([(-0.3, -0.2), (-0.3, -0.1)], slot=2).holds("d") is None, "not the slots compared"


def test_subsets_and_contrasts_of_numbers_made_by_hand():
    _, arena = tiny_arena(8, per_answer=2)
    blocks = len(arena.prompt)
    fields = torch.zeros(len(FIELDS), blocks, SLOTS)
    of = {name: fields[i] for i, name in enumerate(FIELDS)}
    of["clean_hit"][::2] = 1  # every second block right before, none after
    of["moved"][:] = float("nan")
    of["moved"][:, 0] = 0
    of["moved"][1::2, 0] = 1

    def frame(made):
        return CorruptionResult(made.rows.table(), {}, {}, {}, 0.0).frame()

    keys = Cell("A", "t−1", "token", RANK_2), Cell("A", "t−2", "row", RANK_2)
    other = torch.zeros_like(fields)
    made = CorruptionTable(arena, dataclasses.replace(CONFIG, resamples=20))
    made.condition("d", keys[0], fields)
    rows = frame(made)

    def mean(subset, metric, slot=1):
        found = rows[(rows["subset"] == subset) & (rows["metric"] == metric) & (rows["slot"] == str(slot))]
        return found["mean"].item() if len(found) else None

    assert mean("clean correct", "change") == -1
    assert mean("answer changes", "clean") == 0 and mean("answer stays", "clean") == 1
    assert mean("answer changes", "change", slot=2) is None
    made.contrasts("d", {keys[0]: fields, keys[1]: other})
    contrast = frame(made)
    one = contrast[(contrast["metric"] == "change") & (contrast["site"] == "t−1 − t−2")].iloc[0]
    assert one["mean"] == pytest.approx(mean("all", "change")) and one["edit"] == "row"


def test_the_fast_configuration_uses_less_and_says_so(scene):
    drafts = {"dspine": draft_of(scene, DSPINE)}
    config = dataclasses.replace(CorruptionConfig.fast(), resamples=20)
    made = corruption(drafts, scene.target, scene.arena, config=config, precision=EXACT)
    assert made.data["blocks"] == 2 * len(scene.arena.answers)
    assert not made.measured("B") and made.measured("C") == ["dspine"]
    frame = made.frame()
    assert {*frame["kind"]} >= {RANK_2, ZERO} and not {*frame["kind"]} & {"noise", "mask", "frequency"}
    gaps = made.headline("dspine", "A", kind=RANK_2, metric="change")
    gaps = gaps[gaps["site"].str.startswith("t−1 − ")]
    expected = True if (gaps["high"] < 0).all() else False if (gaps["low"] > 0).any() else None
    assert len(gaps) == 3 and made.holds("dspine") is expected


def test_what_cannot_be_measured_is_refused_in_a_sentence(scene):
    draft, arena = draft_of(scene, DFLASH), scene.arena

    def refuses(words, *, drafts=None, arena=arena, config=CONFIG, **given):
        with pytest.raises(UsageError, match=words):
            corruption(
                {"d": draft} if drafts is None else drafts,
                scene.target,
                arena,
                counts=COUNTS,
                config=config,
                precision=EXACT,
                **given,
            )

    refuses("no draft", drafts={})
    refuses("'e' has no parent", fine_tuned={"e": draft})
    refuses("reads taps", drafts={"d": draft_of(scene, DFLASH, target_layer_ids=(0, 3))})
    refuses("drafts 2 slots", drafts={"d": draft_of(scene, DFLASH, block_size=3)})
    refuses("mask tokens", drafts={"d": draft, "e": draft_of(scene, DFLASH, mask_token_id=5)})
    near = dataclasses.replace(arena, anchors=tuple(torch.tensor([a.prompt_length + 1]) for a in arena.answers))
    refuses("no answer has a token 3 places before", arena=near)
    lonely = dataclasses.replace(arena, sets=("alone", *["both"] * (len(arena.sets) - 1)))
    refuses("'alone' has 1 answer", arena=lonely)
    masked = [dataclasses.replace(a, tokens=a.tokens.clone()) for a in arena.answers]
    masked[0].tokens[masked[0].prompt_length] = MASK
    refuses("'mask' leaves token", arena=dataclasses.replace(arena, answers=tuple(masked)))
    for changes in ({"kinds": ("mask",)}, {"kinds": (RANK_2, "typo")}, {"kinds": (RANK_2,)}, {"anchors_per_answer": 0}):
        with pytest.raises(UsageError, match="give"):
            CorruptionConfig(**changes)
    assert OWN not in KINDS
