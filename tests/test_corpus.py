"""Filters, work files, resumable regeneration and packed corpora, on a tiny random model."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dspine_probe.decoding import continuous
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.prompts import Prompt
from dspine_probe.target import Target
from dspine_probe.training.corpus import Corpus, Example
from dspine_probe.training.regenerate import BOXED, ResponseFilter, Worker, encode_prompts, is_looping, pack, regenerate
from dspine_probe.training.worklog import WorkLog, read_work


@pytest.fixture
def target() -> Target:
    torch.manual_seed(0)
    sizes = dict(vocab_size=97, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1, max_position_embeddings=128))
    for name, p in model.named_parameters():
        p.data.normal_(1.0 if "norm" in name else 0.0, 0.5)
    return Target.from_model(model, name="tiny", stop_ids=[3, 4, 5])


def asked(count: int) -> dict[str, tuple[int, ...]]:
    g = torch.Generator().manual_seed(0)
    return {f"p/{i}": tuple(torch.randint(0, 97, (3 + i % 9,), generator=g).tolist()) for i in range(count)}


SETTINGS = dict(max_new_tokens=24, batch_size=8)


def test_loops_are_found() -> None:
    assert is_looping(list(range(50)) + [1, 2, 3] * 22)
    assert is_looping([7] * 20)
    assert is_looping(list(range(30)) * 3)
    assert not is_looping(list(range(40)))
    assert not is_looping([7] * 10)


def test_drop_reasons() -> None:
    judge = ResponseFilter([0])
    assert judge.reason([0]) == "empty"
    assert judge.reason([1, 2, 3, 4, 5, 6, 7, 0]) == "short"
    assert judge.reason([1] * 40) == "looping"
    assert judge.reason(range(1, 20)) is None
    assert judge.reason([*range(1, 20), 0]) == "duplicate"


def test_work_log_drops_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "work.jsonl"
    with WorkLog(path) as log:
        log.append({"id": "a"})
    with path.open("ab") as file:
        file.write(b'{"id": "b", "resp')
    assert list(read_work(path)) == [{"id": "a"}]
    with WorkLog(path) as log:
        log.append({"id": "c"})
    assert [row["id"] for row in read_work(path)] == ["a", "c"]
    path.write_text('{"id": "a"}\n{"id"\n{"id": "c"}\n')
    with pytest.raises(ProbeError, match="line 2"):
        list(read_work(path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_said_in_one_sentence() -> None:
    log = WorkLog(Path("/dev/full"))
    log._file = open("/dev/full", "ab", buffering=0)
    with log._file, pytest.raises(ProbeError, match="full; free some space"):
        log.append({"id": "a"})


def test_killed_run_resumes_to_the_same_corpus(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = asked(40)
    whole = regenerate(target, prompts, tmp_path / "whole", **SETTINGS)
    original, asked_for = continuous._Queue._finished, []

    def die_later(self: continuous._Queue, flight: continuous._Flight) -> bool:
        asked_for.append(1)
        if len(asked_for) > 250:
            raise KeyboardInterrupt
        return original(self, flight)

    monkeypatch.setattr(continuous._Queue, "_finished", die_later)
    with pytest.raises(KeyboardInterrupt):
        regenerate(target, prompts, tmp_path / "killed", **SETTINGS)
    monkeypatch.undo()
    work = tmp_path / "killed" / "work-0.jsonl"
    before = len(list(read_work(work)))
    assert 0 < before < 40
    with work.open("ab") as file:
        file.write(b'{"id": "torn')
    again = regenerate(target, prompts, tmp_path / "killed", **SETTINGS)
    assert len(list(read_work(work))) == 40
    assert again.examples == Corpus.load(tmp_path / "killed").examples
    assert again.examples == whole.examples
    assert again.meta["answered"] == 40
    assert len(again.examples) + sum(again.meta["dropped"].values()) == 40


def test_budget_stops_the_run_and_workers_share_it(target: Target, tmp_path: Path) -> None:
    prompts = asked(60)
    everything = regenerate(target, prompts, tmp_path / "all", **SETTINGS)
    half = everything.response_tokens // 2
    part = regenerate(target, prompts, tmp_path / "part", token_budget=half, **SETTINGS)
    assert half <= part.response_tokens < everything.response_tokens
    for index in range(2):
        both = regenerate(target, prompts, tmp_path / "two", worker=Worker(index, 2), **SETTINGS)
    assert both.examples == everything.examples
    with pytest.raises(UsageError, match="workers are 0 to 1"):
        Worker(2, 2)


def test_other_settings_are_refused(target: Target, tmp_path: Path) -> None:
    regenerate(target, asked(3), tmp_path, **SETTINGS)
    with pytest.raises(UsageError, match="the same or another folder"):
        regenerate(target, asked(3), tmp_path, max_new_tokens=9, batch_size=8)
    settings = json.loads((tmp_path / "run.json").read_text())
    assert settings.pop("precision") == "fp32"
    (tmp_path / "run.json").write_text(json.dumps(settings))
    regenerate(target, asked(3), tmp_path, **SETTINGS)  # older runs did not note the precision
    (tmp_path / "run.json").write_text(json.dumps({**settings, "precision": "bf16"}))
    with pytest.raises(UsageError, match="'precision': 'bf16'.*'precision': 'fp32'"):
        regenerate(target, asked(3), tmp_path, **SETTINGS)
    with pytest.raises(UsageError, match="no answers to pack"):
        pack(target, tmp_path / "nothing")


def test_corpus_round_trip_with_and_without_prompts(tmp_path: Path) -> None:
    corpus = Corpus([Example("a", (1, 2), (3, 4, 70_000)), Example("b", (5,), (6,))], {"target": "tiny"})
    corpus.save(tmp_path / "with", include_prompts=True)
    assert Corpus.load(tmp_path / "with").examples == corpus.examples
    corpus.save(tmp_path / "without", include_prompts=False)
    assert "prompt" not in (tmp_path / "without" / "tokens.safetensors").read_bytes()[:600].decode("latin1").split('"')
    prompts = {"a": (1, 2), "b": (5,), "c": (9,)}
    assert Corpus.load(tmp_path / "without", prompts).examples == corpus.examples
    assert Corpus.load(tmp_path / "without", prompts).response_tokens == 4
    with pytest.raises(UsageError, match="saved without prompts"):
        Corpus.load(tmp_path / "without")
    with pytest.raises(UsageError, match="'b'"):
        Corpus.load(tmp_path / "without", {"a": (1, 2)})
    with pytest.raises(UsageError, match="differs"):
        Corpus.load(tmp_path / "without", prompts | {"b": (6,)})


def test_damaged_corpora_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no corpus"):
        Corpus.load(tmp_path)
    Corpus([Example("a", (1,), (2,))]).save(tmp_path, include_prompts=True)
    tokens = tmp_path / "tokens.safetensors"
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-2])
    with pytest.raises(ProbeError, match="not the file"):
        Corpus.load(tmp_path)
    tokens.write_bytes(whole)
    meta = json.loads((tmp_path / "meta.json").read_text())
    (tmp_path / "meta.json").write_text(json.dumps(meta | {"format": 99}))
    with pytest.raises(UsageError, match="format 99"):
        Corpus.load(tmp_path)
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(ProbeError, match="damaged"):
        Corpus.load(tmp_path)


def test_boxed_share_depends_on_the_id_alone(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "encode_chat", lambda text: [len(text)])
    prompts = [Prompt(f"q/{i}", "math_word" if i % 2 else "general", "x") for i in range(400)]
    encoded = encode_prompts(target, prompts, boxed_share=0.5)
    boxed = {name for name, ids in encoded.items() if ids == (1 + len(BOXED),)}
    assert 70 < len(boxed) < 130
    assert all(int(name.split("/")[1]) % 2 for name in boxed)
    assert encode_prompts(target, prompts[::-1], boxed_share=0.5) == encoded
    with pytest.raises(UsageError, match="0 to 1"):
        encode_prompts(target, prompts, boxed_share=2)
