"""Draft checkpoints: the public layout, round trips, and everything that must be refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_config, tiny_draft, tiny_target

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.drafts import Draft, DSpine
from dspine_probe.drafts.checkpoint import load_draft, save_draft, shipped_checkpoints, weights_digest
from dspine_probe.drafts.layout import public_name
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.target import Target

BOTH = pytest.mark.parametrize("architecture", [DFLASH, DSPINE])


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) drop tensors, as another writer would: without a manifest."""
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    save_file(tensors, folder / "model.safetensors")
    (folder / "manifest.json").unlink(missing_ok=True)


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    (folder / "manifest.json").unlink(missing_ok=True)


def drafted(draft: Draft, target: Target) -> torch.Tensor:
    ids = torch.arange(12)[None] % target.vocab_size
    taps = target.hidden_states(ids, draft.config.target_layer_ids).taps
    anchors = torch.tensor([[5, 11]])
    with torch.no_grad():
        states = draft.run(draft.encode_context(taps), ids.gather(1, anchors), anchors)
        tokens = draft.draft_greedy(draft.encode_context(taps), ids.gather(1, anchors), anchors)
    return torch.cat([states.hidden.flatten(), tokens.flatten()])


@BOTH
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("trimmed", [None, 20])
def test_fp32_round_trip_computes_the_same(architecture: str, kind: str, trimmed: int | None, tmp_path: Path):
    target = tiny_target(kind)
    draft = tiny_draft(target, architecture, trimmed=trimmed)
    save_draft(draft, tmp_path / "draft", dtype=torch.float32)
    loaded = load_draft(tmp_path / "draft", target)
    assert loaded.config == draft.config
    assert not loaded.training and loaded.embedding.data_ptr() == target.embedding.data_ptr()
    assert torch.equal(drafted(loaded, target), drafted(draft, target))


@BOTH
def test_saving_again_gives_the_same_bytes(architecture: str, tmp_path: Path):
    target = tiny_target()
    save_draft(tiny_draft(target, architecture, trimmed=20, target_name="tiny"), tmp_path / "one")
    loaded = load_draft(tmp_path / "one", target)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    save_draft(loaded, tmp_path / "two")
    for name in ("config.json", "model.safetensors", "manifest.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@BOTH
def test_tensors_have_the_public_names_and_nothing_of_the_target(architecture: str, tmp_path: Path):
    target = tiny_target()
    save_draft(tiny_draft(target, architecture), tmp_path / "draft", card="# Card")
    names = set(load_file(tmp_path / "draft" / "model.safetensors"))
    layer = (
        *(f"self_attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
        *("input_layernorm.weight", "post_attention_layernorm.weight"),
    )
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    expected |= {f"layers.{i}.{part}" for i in range(2) for part in layer}
    if architecture == DSPINE:
        expected |= {f"injection.{part}.{i}.weight" for part in ("readouts", "writes") for i in range(2)}
        expected |= {f"injection.{part}.weight" for part in ("message", "receiver_gate", "predecessor_gate")}
        expected |= {"injection.bias", "transfer_mean", "transfer_projection"}
    assert names == expected
    assert (tmp_path / "draft" / "README.md").read_text() == "# Card"
    (tmp_path / "plain").touch()
    modes = {path.stat().st_mode for path in (tmp_path / "draft").iterdir()}
    assert modes == {(tmp_path / "plain").stat().st_mode}, "files of a checkpoint are as readable as any new file"
    assert public_name("blocks.1.attn.q_norm.weight") == "layers.1.self_attn.q_norm.weight"


def test_bf16_draft_keeps_its_codes_in_fp32(tmp_path: Path):
    target = tiny_target()
    draft = tiny_draft(target, DSPINE)
    save_draft(draft, tmp_path / "draft")
    loaded = load_draft(tmp_path / "draft", target, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert loaded.head.dtype == torch.bfloat16 and loaded.codes.dtype == torch.float32
    torch.testing.assert_close(loaded.codes, draft.codes, atol=0.05, rtol=0)


@pytest.mark.parametrize("beside", [False, True])
def test_public_table_of_codes(beside: bool, tmp_path: Path):
    target = tiny_target()
    draft = tiny_draft(target, DSPINE)
    folder = tmp_path / "draft"
    save_draft(draft, folder, full_codes=True, dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    assert {"transfer_codes", "transfer_ready"} <= set(tensors) and "transfer_mean" not in tensors
    if beside:
        save_file({"codes": tensors["transfer_codes"]}, folder / "transfer.safetensors")
        rewrite(folder, transfer_codes=None, transfer_ready=None)
    loaded = load_draft(folder, target)
    assert isinstance(loaded, DSpine) and torch.equal(loaded.codes, draft.codes)
    assert torch.equal(drafted(loaded, target), drafted(draft, target))
    save_draft(loaded, tmp_path / "again", dtype=torch.float32)
    assert set(load_file(tmp_path / "again" / "model.safetensors")) == set(tensors)


def test_codes_that_were_never_filled_in_are_refused(tmp_path: Path):
    target = tiny_target()
    save_draft(tiny_draft(target, DSPINE), tmp_path / "draft", full_codes=True)
    rewrite(tmp_path / "draft", transfer_ready=torch.tensor(False))
    with pytest.raises(UsageError, match="never filled in"):
        load_draft(tmp_path / "draft", target)


def test_trimmed_vocabulary_is_stored_as_offsets(tmp_path: Path):
    target = tiny_target()
    draft = tiny_draft(target, trimmed=20)
    save_draft(draft, tmp_path / "draft")
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    tokens = torch.arange(20) + tensors["d2t"]
    assert torch.equal(tokens, draft.vocabulary)
    assert tensors["t2d"].dtype == torch.bool and tensors["t2d"][tokens].all() and tensors["t2d"].sum() == 20
    assert torch.equal(load_draft(tmp_path / "draft", target).vocabulary, draft.vocabulary)
    rewrite(tmp_path / "draft", d2t=tokens)
    with pytest.raises(UsageError, match="offsets"):
        load_draft(tmp_path / "draft", target)


@BOTH
def test_unknown_missing_and_misshapen_tensors_are_named(architecture: str, tmp_path: Path):
    target = tiny_target()
    cases = [
        ({"layers.9.extra": torch.ones(1)}, "unknown tensors layers.9.extra"),
        ({"layers.1.mlp.up_proj.weight": None}, "no tensors layers.1.mlp.up_proj.weight"),
        ({"norm.weight": torch.ones(7)}, r"norm.weight is \(7,\), but config.json asks for \(32,\)"),
        ({"fc.weight": torch.ones(32, 96)}, r"fc.weight is \(32, 96\), but 2 taps \[0, 2\] of width 32 need"),
    ]
    for changes, message in cases:
        save_draft(tiny_draft(target, architecture), tmp_path / "draft")
        rewrite(tmp_path / "draft", **changes)
        with pytest.raises(UsageError, match=message):
            load_draft(tmp_path / "draft", target)


def test_config_that_does_not_fit_is_refused(tmp_path: Path):
    target = tiny_target()
    dflash = {"mask_token_id": 63, "target_layer_ids": [0, 2]}
    cases = [
        ({"dflash_config": {**dflash, "mask_token_id": 64}}, "mask_token_id 64 lies outside"),
        ({"dflash_config": {**dflash, "target_layer_ids": [0, 4]}}, r"\[4\] do not fit a target of 5 layers"),
        ({"dflash_config": {**dflash, "target_layer_ids": [0, 1, 2]}}, "3 taps"),
        ({"is_causal": False}, "DSpine needs is_causal"),
        ({"architectures": ["Other"]}, "'Other' is unknown"),
        ({"num_target_layers": 6}, "6 layers, not for 'tiny-llama'"),
        ({"vocab_size": 65}, r"\(64, 32\) but the draft was made for \(65, 32\)"),
    ]
    for changes, message in cases:
        save_draft(tiny_draft(target, DSPINE), tmp_path / "draft")
        edit_config(tmp_path / "draft", **changes)
        with pytest.raises(UsageError, match=message):
            load_draft(tmp_path / "draft", target)


def test_look_alike_target_is_refused_unless_the_checkpoint_does_not_say(tmp_path: Path):
    target, other = tiny_target(), tiny_target(seed=5)
    save_draft(tiny_draft(target, target_name="tiny"), tmp_path / "draft")
    with pytest.raises(UsageError, match="made for 'tiny', not for 'tiny-llama'.*other weights"):
        load_draft(tmp_path / "draft", other)
    raw = json.loads((tmp_path / "draft" / "config.json").read_text())
    del raw["target_fingerprint"]
    (tmp_path / "draft" / "config.json").write_text(json.dumps(raw))
    (tmp_path / "draft" / "manifest.json").unlink()
    load_draft(tmp_path / "draft", other)


def test_damaged_files_are_refused_in_a_sentence(tmp_path: Path):
    target = tiny_target()
    folder = tmp_path / "draft"
    save_draft(tiny_draft(target), folder)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ProbeError, match="checksum differs"):
        load_draft(folder, target)
    (folder / "manifest.json").unlink()
    for size in (len(whole) // 2, 5, 0):
        weights.write_bytes(whole[:size])
        with pytest.raises(ProbeError, match="may be truncated"):
            load_draft(folder, target)
    weights.unlink()
    with pytest.raises(UsageError, match="was not found"):
        load_draft(folder, target)
    (folder / "config.json").write_text("{")
    with pytest.raises(ProbeError, match="config.json cannot be read"):
        load_draft(folder, target)


def shard(folder: Path) -> dict[str, str]:
    """Spread the weights of a checkpoint over two files, as other writers do with large ones."""
    tensors = load_file(folder / "model.safetensors")
    of = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for part in set(of.values()):
        save_file({name: tensors[name] for name in tensors if of[name] == part}, folder / part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": of}))
    (folder / "model.safetensors").unlink()
    (folder / "manifest.json").unlink()
    return of


@BOTH
def test_sharded_weights_are_read(architecture: str, tmp_path: Path):
    target = tiny_target()
    draft = tiny_draft(target, architecture)
    save_draft(draft, tmp_path, dtype=torch.float32)
    of = shard(tmp_path)
    assert torch.equal(drafted(load_draft(tmp_path, target), target), drafted(draft, target))
    assert len(weights_digest(tmp_path)) == 64
    first = tmp_path / "model-00001-of-00002.safetensors"
    lost, *others = load_file(first).items()
    save_file(dict(others), first)
    with pytest.raises(ProbeError, match=f"lacks {lost[0]}, which model.safetensors.index.json names"):
        load_draft(tmp_path, target)
    first.unlink()
    with pytest.raises(ProbeError, match="00001-of-00002.safetensors, which .* names, is missing"):
        load_draft(tmp_path, target)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(of))
    with pytest.raises(ProbeError, match="has no weight_map"):
        load_draft(tmp_path, target)


def test_saving_to_a_link_fills_the_folder_it_leads_to(tmp_path: Path):
    target = tiny_target()
    draft = tiny_draft(target)
    (tmp_path / "large-disk").mkdir()
    (tmp_path / "draft").symlink_to("large-disk")
    save_draft(draft, tmp_path / "draft")
    assert (tmp_path / "draft").is_symlink() and (tmp_path / "large-disk" / "config.json").is_file()
    assert load_draft(tmp_path / "draft", target).config == draft.config


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DSPINE_PROBE_DATA", str(tmp_path))
    target = tiny_target()
    with pytest.raises(UsageError, match="'dflash' is not in .*clone of the repository, or set DSPINE_PROBE_DATA"):
        load_draft("dflash", target)
    with pytest.raises(UsageError, match="shipped: none"):
        load_draft("dflsh", target)
    save_draft(tiny_draft(target), tmp_path / "checkpoints" / "dflash")
    save_draft(tiny_draft(target, DSPINE), tmp_path / "checkpoints" / "dspine")
    assert list(shipped_checkpoints()) == ["dflash", "dspine"]
    assert isinstance(load_draft("dspine", target), DSpine)
    with pytest.raises(UsageError, match=r"shipped: dflash, dspine\); did you mean 'dspine'"):
        load_draft("dspin", target)
    with pytest.raises(UsageError, match="holds no config.json"):
        load_draft(tmp_path, target)


def test_saving_replaces_a_checkpoint_but_nothing_else(tmp_path: Path):
    target = tiny_target()
    draft = tiny_draft(target)
    save_draft(draft, tmp_path / "draft", card="old")
    save_draft(draft, tmp_path / "draft")
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["config.json", "manifest.json", "model.safetensors"]
    (tmp_path / "draft" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="name a new folder"):
        save_draft(draft, tmp_path / "draft")
    assert (tmp_path / "draft" / "thesis.tex").exists()


def test_failed_save_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tiny_target()
    save_draft(tiny_draft(target), tmp_path / "draft")
    before = (tmp_path / "draft" / "model.safetensors").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dspine_probe.drafts.checkpoint.save_file", full)
    with pytest.raises(ProbeError, match="disk is full"):
        save_draft(tiny_draft(target, seed=2), tmp_path / "draft")
    assert (tmp_path / "draft" / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_config_knows_its_target():
    assert tiny_config(tiny_target(), DFLASH, target_name="x").to_dict()["target_name"] == "x"


def test_a_checkpoint_says_with_what_seed_and_budget_its_draft_was_trained(tmp_path: Path) -> None:
    target = tiny_target()
    draft = tiny_draft(target)
    draft.training_record = {"blocks": 64, "seed": 3}
    save_draft(draft, tmp_path / "said")
    save_draft(tiny_draft(target), tmp_path / "unsaid")
    assert load_draft(tmp_path / "said", target).training_record == {"blocks": 64, "seed": 3}
    assert load_draft(tmp_path / "unsaid", target).training_record == {}
