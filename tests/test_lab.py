"""The front door: importing it is light, each method is the experiment's own numbers, and everything shows itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny_draft, tiny_target

import dspine_probe as dp
from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.decoding.generate import generate
from dspine_probe.display import Shown
from dspine_probe.drafts import DSpine
from dspine_probe.errors import UsageError
from dspine_probe.experiments import acceptance, one_block
from dspine_probe.experiments.common.request import NothingToMeasure
from dspine_probe.plots.figure_block import PLOTLY_TYPE
from dspine_probe.plots.one_block import depth_lens
from dspine_probe.prompts import Prompt
from dspine_probe.target import Target

TEXTS = [f"{name * (i + 2)}" for i in range(3) for name in ("ab", "cd")]
PROMPT = "abc"


@pytest.fixture(scope="module")
def target() -> Target:
    target = tiny_target(stop_ids=())
    target.encode_chat = lambda text: [3 + ord(c) % 50 for c in text]  # type: ignore[method-assign, assignment]
    target.decode = lambda ids, skip_special=False: "".join(f"<{int(i)}>" for i in ids)  # type: ignore[method-assign, assignment]
    return target


@pytest.fixture
def lab(target: Target) -> dp.Lab:
    return dp.Lab(target, tiny_draft(target, DFLASH), tiny_draft(target, DSPINE))


def fresh(code: str) -> str:
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return found.stdout


def test_the_import_is_light_and_lists_its_names() -> None:
    heavy = ["torch", "transformers", "plotly", "pandas", "transformer_lens", "IPython", "dspine_probe.lab"]
    code = f"import sys, dspine_probe as dp; dir(dp); print([m for m in {heavy} if m in sys.modules], *dir(dp))"
    found = fresh(code)
    assert found.startswith("[]") and set(dp.__all__) <= set(found.split())


def test_names_are_what_their_modules_hold() -> None:
    assert dp.generate is generate and dp.Lab.__module__ == "dspine_probe.lab"
    assert all(callable(getattr(dp, name)) for name in dp.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dp.nothing  # type: ignore[attr-defined]


def test_drafts_get_names_and_two_of_one_name_are_refused(lab: dp.Lab, target: Target, tmp_path: Path) -> None:
    assert list(lab.drafts) == ["dflash-1", "dspine-2"] and "nothing yet" in repr(lab)
    with pytest.raises(UsageError, match="named a, a"):
        dp.Lab(target, tmp_path / "x" / "a", tmp_path / "y" / "a")
    with pytest.raises(UsageError):
        dp.Lab("no such target either", tmp_path)  # the draft is looked for first, and named
    with pytest.raises(UsageError, match="no draft 'x'"):
        lab.generate(PROMPT, draft="x")


def test_an_answer_is_that_of_the_loop_and_marks_who_wrote_it(
    lab: dp.Lab, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    told = lab.generate(PROMPT, max_new_tokens=20)
    assert capsys.readouterr().out.startswith("generate: dspine-2, at most 20 tokens; about")
    plain = lab.generate(PROMPT, draft="none", max_new_tokens=20)
    assert told.generation.tokens == plain.generation.tokens
    rounds = told.generation.rounds
    html = told._repr_mimebundle_()["text/html"]
    assert html.count('title="the draft"') == sum(one.accepted for one in rounds)
    assert html.count("title=") == 20 and len(told.rounds()) == len(rounds)
    assert f"{told.generation.acceptance_length:.2f} tokens per round" in str(told)
    assert "&lt;" in html and "<3>" not in html


def test_the_lens_reads_the_last_depth_as_the_draft_does(lab: dp.Lab) -> None:
    shown = lab.lens(PROMPT, at=2)
    table = shown.result.table
    for name, draft in lab.drafts.items():
        rows = table[table["draft"] == name]
        assert len(rows) == 3 * draft.config.num_slots
        answer = lab._answer(PROMPT, draft, 48)
        anchor = answer.prompt_length + 2
        with torch.no_grad():
            scores = draft(answer.taps[None], answer.tokens[None, anchor : anchor + 1], torch.tensor([[anchor]]))
        best = scores[0].softmax(-1).max(-1)
        last = rows[rows["depth"] == 2]
        assert last["token"].tolist() == [f"<{i}>" for i in best.indices.tolist()]
        assert torch.allclose(torch.tensor(last["probability"].tolist()), best.values, atol=1e-5)
        labels = answer.tokens[anchor + 1 : anchor + 1 + draft.config.num_slots]
        assert last["label"].tolist() == [f"<{i}>" for i in labels.tolist()]
        assert ((last["rank"] == 0) == (last["token"] == last["label"])).all()
    assert "dflash-1" in shown.sentences[0] and depth_lens(shown.result).table is table
    with pytest.raises(UsageError, match="at is 99"):
        lab.lens(PROMPT, at=99)


def test_a_patch_at_the_anchors_embedding_repairs_all_and_one_at_the_end_repairs_its_slot(lab: dp.Lab) -> None:
    shown = lab.patch(PROMPT, draft="dflash-1", at=3, slot=2)
    grid = shown.result.table.pivot(index="depth", columns="slot", values="recovered")
    assert grid.loc[0, 0] == pytest.approx(1, abs=1e-3)  # the anchor's embedding is all that was changed
    assert grid.loc[2, 2] == pytest.approx(1, abs=1e-3)  # the state that slot 2 is scored from
    assert grid.loc[2].drop(2).abs().max() < 1e-3  # no other slot's last state is read
    assert grid.loc[0].drop(0).abs().max() < 1e-3  # the embeddings of masks are the same in both runs
    assert "nothing to repair" in lab.patch(PROMPT, draft="dflash-1", slot=2).sentences[0]
    with pytest.raises(UsageError, match="slots 1…4"):
        lab.patch(PROMPT, slot=9)
    answer = lab._answer(PROMPT, lab.drafts["dflash-1"], 48)
    with pytest.raises(UsageError, match="the anchor token itself"):
        lab.patch(PROMPT, token=int(answer.tokens[answer.prompt_length]))


def test_gates_of_a_prompt_are_the_traces(lab: dp.Lab, target: Target) -> None:
    shown = lab.gates(PROMPT, round=2, max_new_tokens=16)
    assert list(shown.figures) == ["layer_1", "layer_2"]
    assert shown.figures["layer_2"].alt == shown.result.describe(2, 2)  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="has gates"):
        dp.Lab(target, lab.drafts["dflash-1"]).gates(PROMPT)
    with pytest.raises(UsageError, match="'dflash-1' has no gates"):
        lab.gates(PROMPT, draft="dflash-1")


def test_acceptance_is_the_experiments(lab: dp.Lab, capsys: pytest.CaptureFixture[str]) -> None:
    shown = lab.acceptance(TEXTS, max_new_tokens=16)
    assert capsys.readouterr().out.startswith("acceptance: 6 prompts, answers of at most 16 tokens; about")
    rows = [Prompt(f"yours/{i}", "yours", text) for i, text in enumerate(TEXTS)]
    wanted = acceptance.evaluate(lab.target, lab.drafts, rows, max_new_tokens=16)
    assert shown.result.table.equals(wanted.table) and list(shown.sentences) == wanted.findings()


def test_what_was_measured_shares_answers_and_becomes_a_report(
    lab: dp.Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspine_probe.plots.figure_block.find_browser", lambda: None)
    with pytest.raises(UsageError, match="nothing was measured yet"):
        lab.report(tmp_path)
    corruption = lab.corruption(TEXTS)
    answers = [request.answers for request in lab._requests.values()]
    lab.acceptance(TEXTS)
    assert [request.answers for request in lab._requests.values()] == answers and len(answers) == 1
    assert list(lab.results) == ["corruption", "acceptance"] and "corruption, acceptance" in repr(lab)
    page = lab.report(tmp_path).read_text(encoding="utf-8")
    assert 'id="corruption"' in page and 'id="acceptance"' in page
    assert type(corruption.result).load(tmp_path).table.equals(corruption.result.table)


def test_what_the_lab_lacks_is_refused(lab: dp.Lab) -> None:
    with pytest.raises(NothingToMeasure, match="no injectors"):
        lab.injection(TEXTS)
    with pytest.raises(UsageError, match="there is no prompt"):
        lab.acceptance([])


def test_the_gates_experiment_measures_those_that_have_gates(lab: dp.Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.target, "tokenizer", object())
    monkeypatch.setattr("dspine_probe.experiments.gates.measure.kinds_of", lambda _tok, ids: torch.zeros_like(ids))
    monkeypatch.setattr("dspine_probe.lab._prompts", lambda _given: [Prompt(t, "yours", t) for t in TEXTS])
    shown = lab.gates()
    spines = [name for name, draft in lab.drafts.items() if isinstance(draft, DSpine)]
    assert list(shown.result.drafts) == spines  # type: ignore[union-attr]
    assert set(shown.figures) == {"gates_heatmaps", "gates_followed", "gates_clamped"}


def test_results_figures_and_answers_show_themselves(lab: dp.Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = lab.lens(PROMPT)
    seen: list[dict[str, object]] = []
    for module in ("display", "plots.figure_block"):
        monkeypatch.setattr(f"dspine_probe.{module}.display", lambda bundle, raw: seen.append(bundle))
    shown._ipython_display_()
    kinds = [set(one) for one in seen]
    assert kinds[0] == {"text/html", "text/plain"} and sum(PLOTLY_TYPE in one for one in kinds) == 1
    assert all(one["text/plain"] for one in seen)
    json.dumps(seen)  # a notebook can be saved
    (block,) = shown.figures.values()
    assert block.alt in repr(block) and "In words" in shown._repr_html_() and "<table" in shown._repr_html_()
    assert all(f"- {sentence}" in repr(shown) for sentence in shown.sentences)
    result = lab.acceptance(TEXTS, max_new_tokens=16).result
    bundle = result._repr_mimebundle_()
    assert bundle["text/plain"] == str(result) and all(f"- {line}" in str(result) for line in result.findings())
    assert "<table" in bundle["text/html"]


def test_an_answer_too_short_for_a_block_says_so(target: Target, lab: dp.Lab) -> None:
    draft = lab.drafts["dflash-1"]
    answer = one_block.answer_with_states(target, PROMPT, draft, max_new_tokens=3)
    with pytest.raises(UsageError, match="has 3 tokens and a block needs 5"):
        one_block.read_depths(target, {"a": (draft, answer)})
    with pytest.raises(UsageError, match="no draft to read"):
        one_block.read_depths(target, {})


def test_an_empty_set_of_figures_is_said() -> None:
    assert "No figures." in repr(Shown(None, ["a"], {}))
