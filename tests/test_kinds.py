"""A draft of a new kind, from one class and one objective: built, hooked, patched, trained, saved, loaded, decoded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from test_intermediate import tiny_store
from test_training import CONFIG
from tiny import MASK, prompts, tiny_target
from torch import nn

from dspine_probe.config import ConfigPart
from dspine_probe.decoding.generate import generate
from dspine_probe.drafts import Backbone
from dspine_probe.drafts.block import TruePredecessors
from dspine_probe.drafts.checkpoint import load_draft
from dspine_probe.drafts.registry import KINDS, kind_named, register
from dspine_probe.errors import UsageError
from dspine_probe.experiments.patching import places, residual_sites
from dspine_probe.hooks import HookedDraft
from dspine_probe.training.objectives.dflash import DFlashObjective
from dspine_probe.training.recipes import new_draft
from dspine_probe.training.run import DraftPlan, train_draft


@dataclass(frozen=True)
class ShiftConfig(ConfigPart):
    KEY = "shift_config"
    scale: float = 0.5


class ShiftObjective(DFlashObjective):
    """As DFlash's."""


class Shift(Backbone):
    """Every slot but the first adds a scaled map of its predecessor's stream after each layer."""

    after_seams = ("shift.hook_out", "shift.hook_resid")
    hook_axes = {
        "shift.hook_out": ("block draft_slot d_model", "what the predecessor adds"),
        "shift.hook_resid": ("block slot d_model", "residual stream after the layer and its shift"),
    }

    def __init__(self, config, embedding, head, *, vocabulary=None):  # type: ignore[no-untyped-def]
        super().__init__(config, embedding, head, vocabulary=vocabulary)
        self.mix = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        for block in self.blocks:
            block.shift = nn.Module()
            block.shift.hook_out, block.shift.hook_resid = nn.Identity(), nn.Identity()

    def after_layer(self, layer, x, inputs):  # type: ignore[no-untyped-def]
        seams = self.blocks[layer].shift
        added = seams.hook_out(self.config.part.scale * self.mix(x[:, :-1]))
        return seams.hook_resid(torch.cat([x[:, :1], x[:, 1:] + added], dim=1))


@pytest.fixture
def shift() -> Iterator[str]:
    register(
        "shift", architecture="ShiftDraftModel", objective=f"{__name__}:ShiftObjective", part=ShiftConfig, causal=True
    )(Shift)  # fmt: skip
    yield "shift"
    del KINDS["shift"]


def test_a_new_kind_works_everywhere(shift: str, tmp_path: Path) -> None:
    target, store = tiny_target(), tiny_store()
    plan = DraftPlan(shift, 2, 5, 40, mask_token_id=MASK)
    config = dataclasses.replace(CONFIG, blocks=24)
    made = train_draft(plan, target, store, config, tmp_path / "run", tmp_path / "draft")
    assert isinstance(kind_named(shift).load_objective()(made), ShiftObjective)
    loaded = load_draft(tmp_path / "draft", target)
    assert type(loaded) is Shift
    assert loaded.config.part == ShiftConfig(0.5)
    assert '"shift_config"' in (tmp_path / "draft" / "config.json").read_text()
    ids = prompts(1)[0]
    plain = generate(target, None, ids, max_new_tokens=20).tokens
    assert generate(target, loaded, ids, max_new_tokens=20).tokens == plain
    with HookedDraft(loaded) as hooked:
        rows = {row.name: row for row in hooked.hook_table()}
        assert rows["blocks.1.shift.hook_out"].about == "what the predecessor adds"
        sequence = store[0]
        given = sequence.taps[None], sequence.tokens[None, 5:6], torch.tensor([[5]])
        _, cache = hooked.run_with_cache(*given)
        last = cache["blocks.1.shift.hook_resid"]
        torch.testing.assert_close(cache.decompose_resid().sum(0), last)
    assert places(loaded)[-2:] == ["blocks.1.shift.hook_out", "blocks.1.shift.hook_resid"]
    assert residual_sites(loaded)[-1].name == "blocks.1.shift.hook_resid"


def test_what_a_kind_cannot_be_given_is_refused(shift: str) -> None:
    target = tiny_target()
    draft = new_draft(shift, target, layers=2, block_size=5, taps=(0, 2), mask_token_id=MASK)
    context = draft.encode_context(torch.zeros(1, 4, 64))
    truth = TruePredecessors(torch.zeros(1, 5, dtype=torch.long), torch.tensor([True]))
    at = torch.tensor([[3]])
    with pytest.raises(UsageError, match="slots of a shift receive no codes"):
        draft.run(context, at, at, true_predecessors=truth)
    with pytest.raises(UsageError, match="Shift needs is_causal=True"):
        new_draft(shift, target, taps=(0, 2), mask_token_id=MASK, causal=False)
    with pytest.raises(UsageError, match="use one of dflash, dflash2, domino, dspark, dspine, eagle3, shift"):
        kind_named("shifted")
