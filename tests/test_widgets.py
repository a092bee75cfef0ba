"""The gate view, without a browser: it keeps what the draft did, and its sliders show every part of it."""

import json

import pytest
import torch
from tiny import prompts, tiny_draft, tiny_target

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.decoding.generate import generate
from dspine_probe.errors import UsageError
from dspine_probe.hooks import HookedDraft
from dspine_probe.widgets.gates import GateTrace, GateView, trace_gates

TOKENS = 16


class Spelled:
    """A tokenizer that writes token i as ` i`, and one token as a line break."""

    def decode(self, ids, **_options):
        return "".join("\n" if int(token) == 5 else f" {int(token)}" for token in ids)


@pytest.fixture(scope="module")
def target():
    made = tiny_target()
    made.tokenizer = Spelled()
    return made


@pytest.fixture(scope="module")
def spine(target):
    return tiny_draft(target, DSPINE, trimmed=40)


@pytest.fixture(scope="module")
def prompt():
    return prompts(1)[0]


@pytest.fixture(scope="module")
def trace(target, spine, prompt):
    return trace_gates(target, spine, prompt, max_new_tokens=TOKENS)


def test_trace_keeps_the_answer_and_leaves_the_draft_unhooked(target, spine, prompt, trace):
    answer = generate(target, spine, prompt, max_new_tokens=TOKENS)
    assert trace.rounds == answer.rounds and len(trace.rounds) > 2
    config = spine.config
    assert trace.gates.shape == (len(answer.rounds), config.num_hidden_layers, config.num_slots, 6)
    HookedDraft(spine).close()  # refused while another HookedDraft holds it


def test_gates_are_those_of_a_pass_over_the_same_text(target, spine, prompt, trace):
    answer = generate(target, spine, prompt, max_new_tokens=TOKENS)
    text = torch.tensor([prompt + list(answer.tokens)])
    taps = target.hidden_states(text, spine.config.target_layer_ids).taps
    one = trace.rounds[-1]
    anchor = torch.tensor([[one.anchor]])
    with HookedDraft(spine) as hooked:
        _, cache = hooked.run_with_cache(taps, text[:, one.anchor][:, None], anchor)
    for layer in range(spine.config.num_hidden_layers):
        there = cache[f"blocks.{layer}.inject.hook_gate"][0]
        torch.testing.assert_close(trace.gates[-1, layer], there, atol=1e-4, rtol=1e-3)


def test_table_and_figure_tell_of_one_layer_and_round(trace):
    table = trace.table(2, 3)
    torch.testing.assert_close(torch.tensor(table["gate"].to_numpy()), trace.gates[2, 1].mean(-1))
    assert (table["low"] <= table["high"]).all() and list(table["token"]) == list(trace.drafted[2])
    assert (table["fate"] == "kept").sum() == trace.rounds[2].accepted
    block = trace.figure(2, 3)
    drawn = sorted(slot for bars in block.figure.data for slot in bars.x)
    assert drawn == list(table["slot"])
    assert all(f"{gate:.2f}" in block.alt for gate in table["gate"])
    assert block.alt != trace.figure(1, 3).alt


@pytest.mark.parametrize(("layer", "round"), [(0, 1), (3, 1), (1, 0), (1, 99)])
def test_layers_and_rounds_that_do_not_exist_are_refused(trace, layer, round):
    with pytest.raises(UsageError, match="this trace has"):
        trace.table(layer, round)


def test_sliders_redraw(trace):
    view = GateView(trace)
    assert (view.layer.max, view.round.max) == (trace.gates.shape[1], len(trace.rounds))
    view.layer.value, view.round.value = 2, 3
    expected = trace.figure(2, 3)
    for shown, new in zip(view.figure.data, expected.figure.data, strict=True):
        assert (tuple(shown.x), tuple(shown.y)) == (tuple(new.x), tuple(new.y))
        assert list(shown.error_y.array) == list(new.error_y.array)
    assert view.figure.layout.title.text == expected.title
    assert view.figure.layout.xaxis.ticktext == expected.figure.layout.xaxis.ticktext
    assert "Layer 2, round 3" in view.words.value


def test_view_falls_back_to_a_still_figure_and_words(trace):
    view = GateView(trace, layer=2, round=1)
    bundle = view._repr_mimebundle_()
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == view.model_id
    assert bundle["text/plain"] == trace.figure(2, 1).alt
    still = json.loads(json.dumps(bundle["application/vnd.plotly.v1+json"]))
    assert still["layout"]["title"]["text"] == trace.figure(2, 1).title and len(still["data"]) == 3


def test_controls_have_names(trace):
    view = GateView(trace)
    assert view.layer.description == "layer" and view.round.description == "round"


def test_other_drafts_and_answers_without_rounds_are_refused(target, spine, prompt):
    with pytest.raises(UsageError, match="no gates"):
        trace_gates(target, tiny_draft(target, DFLASH), prompt, max_new_tokens=TOKENS)
    with pytest.raises(UsageError, match="another prompt"):
        trace_gates(target, spine, prompt, max_new_tokens=1)
    assert isinstance(trace_gates(target, spine, prompt, max_new_tokens=2), GateTrace)
