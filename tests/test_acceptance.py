"""Acceptance: the offline walk is real decoding, and the statistics are what they say."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import prompts, scripted, tiny_draft, tiny_target
from typer.testing import CliRunner

from dspine_probe.cli.main import app
from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.decoding.generate import Generation, generate
from dspine_probe.decoding.offline import Rounds, simulate_rounds
from dspine_probe.drafts import Draft
from dspine_probe.drafts.checkpoint import save_draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments.acceptance import (
    AcceptanceCounts,
    AcceptanceResult,
    RequestCounts,
    count_rounds,
    evaluate,
)
from dspine_probe.experiments.acceptance.measure import TappedAnswer
from dspine_probe.experiments.common.answers import answer_prompts, read_states
from dspine_probe.experiments.common.wording import number
from dspine_probe.plots import acceptance as plots
from dspine_probe.prompts import Prompt
from dspine_probe.target import Target

NEW = 24


def tapped(target: Target, draft: Draft, prompt: list[int], answer: tuple[int, ...]) -> TappedAnswer:
    tokens = torch.tensor([*prompt, *answer])
    taps = target.hidden_states(tokens[None], draft.config.target_layer_ids).taps[0]
    return TappedAnswer(tokens, len(prompt), taps)


def rounds_of(found: Generation) -> Rounds:
    """The rounds of a real decoding run."""
    done, length = found.rounds, len(found.prompt_ids) + len(found.tokens)
    slots = len(done[0].drafted) if done else 0
    return Rounds(tuple(one.anchor for one in done), tuple(one.accepted for one in done), length, slots)


@pytest.mark.parametrize("architecture", [DFLASH, DSPINE])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_offline_walk_is_real_decoding_round_for_round(kind: str, architecture: str):
    target = tiny_target(kind, stop_ids=(2, 9))
    draft = tiny_draft(target, architecture, trimmed=40)
    real = [generate(target, draft, prompt, max_new_tokens=NEW) for prompt in prompts(20)]
    answers = [tapped(target, draft, list(one.prompt_ids), one.tokens) for one in real]
    assert {one.finish for one in real} == {"stop", "length"}
    for width in (None, 2):
        if width is not None:
            real = [generate(target, draft, p, max_new_tokens=NEW, width=width) for p in prompts(20)]
        for batch_size in (1, 7):
            walked = simulate_rounds(draft, answers, batch_size=batch_size, width=width)
            for one, rounds in zip(real, walked, strict=True):
                assert rounds == rounds_of(one)
                assert rounds.committed == tuple(len(done.committed) for done in one.rounds)


def test_walk_with_long_and_cut_rounds():
    """Drafts that are often right, so that rounds end at answers' ends in every way they can."""
    target = tiny_target(stop_ids=(2, 9))
    generator = torch.Generator().manual_seed(0)
    ends = set()
    for prompt in prompts(30):
        plain = generate(target, None, prompt, max_new_tokens=NEW)
        wrong = set((torch.rand(64, generator=generator) < 0.3).nonzero().flatten().tolist())
        draft = scripted(target, [*prompt, *plain.tokens], wrong)
        real = rounds_of(generate(target, draft, prompt, max_new_tokens=NEW))
        draft.exact_context = False
        assert simulate_rounds(draft, [tapped(target, draft, prompt, plain.tokens)]) == [real]
        ends.add((plain.finish, bool(real.anchors) and real.accepted[-1] == real.left[-1]))
    assert ends == {("stop", True), ("stop", False), ("length", True), ("length", False)}


def toy() -> RequestCounts:
    """Prompt of 10 tokens and 11 answered ones; T = 3. Rounds from positions 10, 14, 16, 17; the last one is cut."""
    rounds = Rounds(anchors=(10, 14, 16, 17), accepted=(3, 1, 0, 3), length=21, slots=3)
    assert rounds.left == (10, 6, 4, 3)
    assert rounds.committed == (4, 2, 1, 3)
    return count_rounds("draft", "toy", "1", rounds, stopped=True, slots=3)


def test_counts_of_a_worked_example():
    counts = toy()
    assert (counts.rounds, counts.committed, counts.stopped) == (4, 10, True)
    assert counts.reached == (4, 3, 2)
    assert counts.passed == (3, 2, 2)
    result = AcceptanceCounts((counts,), resamples=20)
    assert result.acceptance_length("draft").value == 10 / 4
    assert result.estimate("conditional", "draft").value.tolist() == pytest.approx([3 / 4, 2 / 3, 1])
    assert result.estimate("survival", "draft").value.tolist() == pytest.approx([3 / 4, 1 / 2, 1 / 2])
    table = AcceptanceResult.of(result, {}, {})
    share = table.select(metric="stop_share", set="mean").iloc[0]
    assert share["mean"] == 1 / 4 and share["n"] == 1 and math.isnan(share["low"])
    assert table.select(metric="survival", set="toy")["slot"].tolist() == ["1", "2", "3"]


def test_slots_beyond_the_end_of_an_answer_are_not_put_to_the_test():
    rounds = Rounds(anchors=(5,), accepted=(2,), length=8, slots=4)
    counts = count_rounds("draft", "toy", "1", rounds, stopped=True, slots=4)
    assert counts.reached == (1, 1, 0, 0) and counts.passed == (1, 1, 0, 0)
    assert counts.committed == 2, "no bonus behind the stop token"
    bonus_is_the_stop = Rounds(anchors=(5,), accepted=(1,), length=8, slots=4)
    assert count_rounds("draft", "toy", "1", bonus_is_the_stop, stopped=True, slots=4).committed == 2


def test_an_answer_of_one_token_has_no_round():
    target = tiny_target()
    draft = tiny_draft(target)
    rounds = simulate_rounds(draft, [tapped(target, draft, [3, 4], (2,)), tapped(target, draft, [3], (4, 5))])
    assert rounds[0].anchors == () and rounds[1].anchors == (1,)
    counts = count_rounds("draft", "toy", "1", rounds[0], stopped=True, slots=4)
    assert (counts.rounds, counts.committed, counts.stopped) == (0, 0, False)


def random_counts(draft: str, set: str, id: str, generator: torch.Generator) -> RequestCounts:
    """Rounds of an answer that goes on for a block behind the last of them, so that none is cut."""
    accepted, anchors, at = [], [], 10
    for _ in range(int(torch.randint(3, 12, (), generator=generator))):
        accepted.append(int(torch.randint(0, 5, (), generator=generator)))
        anchors.append(at)
        at += accepted[-1] + 1
    rounds = Rounds(tuple(anchors), tuple(accepted), at + 5, 4)
    return count_rounds(draft, set, id, rounds, stopped=False, slots=4)


def test_acceptance_length_is_one_plus_the_products():
    generator = torch.Generator().manual_seed(1)
    counts = tuple(random_counts("draft", "toy", str(i), generator) for i in range(30))
    result = AcceptanceCounts(counts, resamples=20)
    products = result.estimate("conditional", "draft", "toy").value.cumprod(0)
    al = result.acceptance_length("draft", "toy").value
    torch.testing.assert_close(1 + products.sum(), al)
    torch.testing.assert_close(products, result.estimate("survival", "draft", "toy").value)


def two_sets(seed: int = 2) -> AcceptanceCounts:
    generator = torch.Generator().manual_seed(seed)
    counts = [
        random_counts(draft, set, f"{set}/{i}", generator)
        for draft in ("one", "two")
        for set, size in (("math", 12), ("chat", 5))
        for i in range(size)
    ]
    return AcceptanceCounts(tuple(counts), seed=7, resamples=300)


def test_mean_weighs_sets_alike_and_intervals_hold_the_value():
    result = two_sets()
    math_al, chat_al, mean = (result.acceptance_length("one", name) for name in ("math", "chat", "mean"))
    torch.testing.assert_close(mean.value, (math_al.value + chat_al.value) / 2)
    for found in (math_al, chat_al, mean):
        assert 1 < found.low < found.value < found.high < 5
    assert mean.high - mean.low < chat_al.high - chat_al.low


def test_paired_ratio():
    result = two_sets()
    ratio = result.paired_ratio("two", "one")
    expected = result.acceptance_length("two").value / result.acceptance_length("one").value
    torch.testing.assert_close(ratio.value, expected)
    assert ratio.low < ratio.value < ratio.high
    same = result.paired_ratio("one", "one", "chat")
    assert same.value == same.low == same.high == 1
    copies = tuple(replace(one, draft="copy") for one in result.requests if one.draft == "one")
    paired = AcceptanceCounts(result.requests + copies, resamples=50).paired_ratio("copy", "one")
    assert paired.low == paired.high == 1, "drafts are drawn alike"


def test_per_request_mean_leaves_out_prompts_without_rounds():
    empty = RequestCounts("draft", "toy", "2", 0, 0, False, (0, 0, 0), (0, 0, 0))
    counts = AcceptanceCounts((toy(), empty), resamples=50)
    assert [float(counts.estimate("al_per_request", "draft", name).value) for name in ("toy", "mean")] == [2.5] * 2


def test_result_comes_back_from_disk(tmp_path: Path):
    counts = two_sets()
    drafts = {"one": {"architecture": DFLASH}, "two": {"architecture": DSPINE}}
    result = AcceptanceResult.of(counts, {"target": "tiny"}, drafts)
    result.save(tmp_path)
    loaded = AcceptanceResult.load(tmp_path)
    assert loaded.counts == counts and loaded.drafts == drafts
    assert loaded.frame().equals(result.frame())
    assert loaded.findings() == result.findings() and loaded.claims() == result.claims() != []
    assert "two over one" in loaded.findings()[-1]
    with pytest.raises(UsageError, match="was not found"):
        AcceptanceResult.load(tmp_path / "elsewhere")


def test_results_that_cannot_be_compared():
    with pytest.raises(UsageError, match="no request"):
        AcceptanceCounts(())
    with pytest.raises(UsageError, match="different prompts"):
        AcceptanceCounts((toy(), replace(toy(), draft="other", id="9")))
    with pytest.raises(UsageError, match="drafts are one, two and sets math, chat or mean"):
        two_sets().acceptance_length("three")


def test_evaluate_is_real_decoding_of_every_draft():
    target = tiny_target(stop_ids=(2, 9))
    listed = prompts(14)
    target.encode_chat = lambda text: listed[int(text)]
    drafts = {"a": tiny_draft(target, DFLASH), "b": tiny_draft(target, DSPINE, target_layer_ids=(1, 0, 3))}
    named = [Prompt(id=f"p{i}", set=("even", "odd")[i % 2], text=str(i)) for i in range(len(listed))]
    seen = []
    result = evaluate(
        target, drafts, named, max_new_tokens=NEW, batch_size=4, on_progress=lambda *event: seen.append(event)
    )
    assert result.counts.drafts == ("a", "b") and result.counts.sets == ("even", "odd")
    for name, draft in drafts.items():
        found = {one.id: one for one in result.counts.of(name)}
        for prompt, ids in zip(named, listed, strict=True):
            real = generate(target, draft, ids, max_new_tokens=NEW)
            expected = rounds_of(real)
            stopped = real.finish == "stop"
            assert found[prompt.id] == count_rounds(name, prompt.set, prompt.id, expected, stopped=stopped, slots=4)
    assert {stage for stage, _, _ in seen} == {"answers", "walks"}
    assert ("answers", 14, 14) in seen and seen[-1] == ("walks", 14, 14)
    assert result.drafts["b"]["architecture"] == DSPINE and list(result.drafts) == ["a", "b"]
    assert math.isfinite(float(result.counts.acceptance_length("a").value))
    answers = answer_prompts(target, named, max_new_tokens=NEW, batch_size=4)
    states = read_states(target, named, answers, drafts["a"].config.target_layer_ids, batch_size=4)
    given = {"answers": answers, "states": states, "max_new_tokens": NEW, "batch_size": 4}
    again = evaluate(target, {"a": drafts["a"]}, named, **given)
    assert again.counts.requests == tuple(result.counts.of("a")), "answers and states at hand are used"
    with pytest.raises(UsageError, match="0 drafts"):
        evaluate(target, {}, named, max_new_tokens=NEW)


def test_evaluate_command_prints_a_table_and_saves_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tiny_target(stop_ids=(2, 9))
    listed = prompts(4)
    target.encode_chat = lambda text: listed[int(text)]
    monkeypatch.setattr(Target, "load", lambda *_, **__: target)
    save_draft(tiny_draft(target, DFLASH), tmp_path / "a")
    save_draft(tiny_draft(target, DSPINE), tmp_path / "b")
    for name in ("x", "y"):
        rows = [json.dumps({"prompt": str(i)}) for i in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    options = ["--prompts", str(tmp_path), "--limit", "3", "--max-new-tokens", "12", "--output", str(tmp_path / "out")]
    command = ["evaluate", "--draft", str(tmp_path / "a"), "--draft", f"spine={tmp_path / 'b'}", *options]
    ran = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert ran.exit_code == 0, ran.output
    result = AcceptanceResult.load(tmp_path / "out")
    assert result.counts.sets == ("x", "y") and len(result.counts.requests) == 2 * 2 * 3
    assert result.counts.drafts == ("a", "spine")
    assert number(result.counts.acceptance_length("spine")) in ran.stdout
    unknown = CliRunner().invoke(app, ["evaluate", "--draft", "nope", *options])
    assert unknown.exit_code == 2 and "draft 'nope' is neither a folder nor a shipped draft" in unknown.stderr


@pytest.mark.parametrize("draw", [plots.bars, plots.survival])
def test_figures_show_what_their_words_say(draw):
    result = AcceptanceResult.of(two_sets(), {"target": "tiny"}, {"one": {}, "two": {}})
    block = draw(result)
    assert "n = 17 prompts" in block.caption and "one" in block.alt and "nan" not in block.alt
    assert sum(len(trace.x) for trace in block.figure.data) == len(block.table)
    mean = float(result.counts.acceptance_length("one").value)
    first = float(result.counts.estimate("survival", "one").value[0])
    assert f"one: mean {mean:.2f} tokens" in block.alt or f"one: {100 * first:.0f} % of rounds keep slot 1" in block.alt


def test_budgets_of_one_kind_give_a_slope_and_a_figure():
    """Two budgets: the slope is their difference over the doublings between them, drawn on the same prompts."""
    drafts = {
        name: {"architecture": DFLASH, "trained": {"blocks": blocks}}
        for name, blocks in {"one": 50_000, "two": 200_000}.items()
    }
    result = AcceptanceResult.of(two_sets(), {"target": "tiny"}, drafts)
    one, two = (float(result.counts.acceptance_length(name).value) for name in ("one", "two"))
    slope = result.counts.doubling({"one": 50_000, "two": 200_000})
    assert float(slope.value) == pytest.approx((two - one) / 2) and slope.low < slope.value < slope.high
    assert f"one, two: {number(slope, signed=True)} tokens a round with every doubling" in result.findings()[-1]
    block = plots.over_blocks(result)
    assert list(block.figure.data[0].x) == [50_000, 200_000] and "doubling" in block.alt
    drafts["two"]["trained"]["blocks"] = 50_000
    assert plots.over_blocks(AcceptanceResult.of(two_sets(), {}, drafts)) is None
