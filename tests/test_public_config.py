"""Fields of a public config.json that change the computation: computed, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_draft, tiny_target

from dspine_probe.drafts.checkpoint import load_draft, save_draft
from dspine_probe.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_draft(tiny_draft(tiny_target(), rope_theta=5e5), tmp_path / "draft", dtype=torch.float32)
    (tmp_path / "draft" / "manifest.json").unlink()
    return tmp_path / "draft"


def edit(folder: Path, drop: str = "", **changes: Any) -> None:
    path = folder / "config.json"
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in raw.items() if name != drop}))


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"layer_types": ["full_attention"]},
        {"sliding_window": 4},
        {"sliding_window": 4, "use_sliding_window": True},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}}},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.25}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"hidden_act": "gelu"},
        {"final_logit_softcapping": 30.0},
        {"attn_logit_softcapping": 50.0},
        {"logit_scale": 0.0625},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"norm_type": "layernorm"},
        {"layer_norm_eps": 1e-5},
        {"use_qk_norm": False},
        {"model_type": "gemma3_text"},
        {"output_multiplier": 2.0},
        {"dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 2], "input_embedding_scale": 32.0}},
        {"dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 2], "projector_type": "other"}},
        {"dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 2], "shift_label": True}},
        {"dflash_config": [63]},
        {"rope_scaling": "yarn"},
    ],
    ids=lambda changes: json.dumps(changes)[:60],
)
def test_what_is_not_computed_is_refused_by_name(folder: Path, changes: dict[str, Any]) -> None:
    edit(folder, **changes)
    name = "use_sliding_window" if changes.get("use_sliding_window") else next(iter(changes))
    words = {"use_sliding_window": "sliding_window", "dflash_config": "input_embedding|projector|shift|layout"}
    with pytest.raises(UsageError, match=f"config.json .*({words.get(name, name)}|rope_theta|partial|layout)"):
        load_draft(folder, tiny_target())


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}},
        {"rope_scaling": {"type": "default", "rope_theta": 5e5}},
    ],
)
def test_the_rotary_base_is_found_wherever_the_format_keeps_it(folder: Path, changes: dict[str, Any]) -> None:
    edit(folder, drop="rope_theta", **changes)
    assert load_draft(folder, tiny_target()).config.rope_theta == 5e5


def test_a_rotary_base_is_never_guessed(folder: Path) -> None:
    edit(folder, drop="rope_theta")
    with pytest.raises(UsageError, match="names no rope_theta"):
        load_draft(folder, tiny_target())


def test_neutral_fields_and_the_defaults_of_the_format_pass(folder: Path) -> None:
    neutral = {"sliding_window": 4096, "use_sliding_window": False, "rope_scaling": None, "mlp_bias": False}
    edit(folder, drop="layer_types", **neutral, partial_rotary_factor=1.0, final_logit_softcapping=None)
    edit(folder, drop="rms_norm_eps")
    edit(folder, drop="max_position_embeddings")
    config = load_draft(folder, tiny_target()).config
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-6, 32768)
