"""The feature store: right states at the right rows, resumable, honest about damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny import tiny_target

from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.precision import recorded
from dspine_probe.target import Target
from dspine_probe.training.corpus import Example
from dspine_probe.training.features import META, FeatureStore, build_features

TAPS = (0, 2)


def examples() -> list[Example]:
    generator = torch.Generator().manual_seed(3)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 60, (count,), generator=generator).tolist())

    return [Example(f"e{i}", tokens(3 + i), tokens(5 + 2 * i)) for i in range(5)]


@pytest.fixture(scope="module")
def target():  # type: ignore[no-untyped-def]
    return tiny_target()


def test_rows_are_the_targets_states(target, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    store = build_features(target, examples(), TAPS, tmp_path / "store", batch_tokens=40)
    assert len(store) == 5
    for index, example in enumerate(examples()):
        ids = torch.tensor([example.prompt_ids + example.response_ids])
        states, row = target.hidden_states(ids, TAPS), store[index]
        assert row.id == example.id
        assert row.prompt_length == len(example.prompt_ids)
        assert torch.equal(row.tokens, ids[0])
        torch.testing.assert_close(row.taps, states.taps[0].bfloat16(), atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(row.final, states.final[0].bfloat16(), atol=2e-2, rtol=2e-2)


def test_a_killed_build_goes_on_and_ends_the_same(target, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    whole = build_features(target, examples(), TAPS, tmp_path / "whole", batch_tokens=20)

    def kill(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_features(target, examples(), TAPS, tmp_path / "cut", batch_tokens=20, on_batch=kill)
    with pytest.raises(ProbeError, match="unfinished"):
        FeatureStore.open(tmp_path / "cut")
    resumed = build_features(target, examples(), TAPS, tmp_path / "cut", batch_tokens=20)
    for index in range(5):
        assert torch.equal(whole[index].taps, resumed[index].taps)
        assert torch.equal(whole[index].tokens, resumed[index].tokens)


def test_the_precision_is_written_down_and_a_resumed_build_keeps_it(tmp_path: Path) -> None:
    half = Target.from_model(tiny_target().model.bfloat16(), name="tiny-llama")
    store = build_features(half, examples(), TAPS, tmp_path)
    assert store.meta.precision == recorded(tmp_path / META) == "bf16"
    with pytest.raises(UsageError, match="other .*precision"):
        build_features(tiny_target(), examples(), TAPS, tmp_path)
    raw = json.loads((tmp_path / META).read_text())
    del raw["precision"]
    (tmp_path / META).write_text(json.dumps(raw))
    assert recorded(tmp_path / META) is None
    assert build_features(half, examples(), TAPS, tmp_path).meta.precision is None, "an old store goes on"


def test_a_finished_store_is_not_computed_again(target, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    build_features(target, examples(), TAPS, tmp_path / "store")
    calls: list[int] = []
    build_features(target, examples(), TAPS, tmp_path / "store", on_batch=lambda done, _total: calls.append(done))
    assert not calls


def test_several_stores_read_as_one(target, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    whole = build_features(target, examples(), TAPS, tmp_path / "whole")
    build_features(target, examples()[:2], TAPS, tmp_path / "a")
    build_features(target, examples()[2:], TAPS, tmp_path / "b")
    joined = FeatureStore.open(tmp_path / "a", tmp_path / "b")
    assert joined.meta == whole.meta
    for index in range(5):
        torch.testing.assert_close(joined[index].taps, whole[index].taps, atol=2e-2, rtol=2e-2)
        assert torch.equal(joined[index].tokens, whole[index].tokens)
    build_features(target, examples(), (1,), tmp_path / "other")
    with pytest.raises(UsageError, match="cannot be joined"):
        FeatureStore.open(tmp_path / "a", tmp_path / "other")


def test_refusals(target, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "store"
    with pytest.raises(UsageError, match="holds no features"):
        FeatureStore.open(folder)
    with pytest.raises(UsageError, match="no examples"):
        build_features(target, [], TAPS, folder)
    build_features(target, examples(), TAPS, folder)
    with pytest.raises(UsageError, match="other examples, taps"):
        build_features(target, examples()[:3], TAPS, folder)
    taps = folder / "taps.bf16"
    taps.write_bytes(taps.read_bytes()[:-2])
    with pytest.raises(ProbeError, match="bytes long"):
        FeatureStore.open(folder)
    assert json.loads((folder / "meta.json").read_text())["taps"] == list(TAPS)
