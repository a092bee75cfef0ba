"""The recipes of docs/extending.md, followed to the letter: their code blocks become modules and run end to end."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest
import torch
from tiny import prompts, tiny_target
from typer.testing import CliRunner

from dspine_probe import report
from dspine_probe.cli.main import app
from dspine_probe.decoding.generate import generate
from dspine_probe.drafts import Backbone, registry
from dspine_probe.drafts.checkpoint import load_draft, save_draft
from dspine_probe.experiments import registry as experiments
from dspine_probe.experiments.common.request import Request
from dspine_probe.experiments.reproduction import reproduce
from dspine_probe.prompts import load_prompts
from dspine_probe.target import Target
from dspine_probe.training.corpus import Example
from dspine_probe.training.features import build_features
from dspine_probe.training.optimization import TrainConfig
from dspine_probe.training.recipes import new_draft
from dspine_probe.training.trainer import train

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
DRAFT, EXPERIMENT = "slot-bias", "agreement"


def blocks(heading: str) -> list[tuple[bool, str, str]]:
    """The Python blocks under a heading, in order: whether each is added to a file, the file, and the code."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    found = []
    for block in re.findall(r"^ *```python\n(.*?)^ *```", section, re.DOTALL | re.MULTILINE):
        first, code = dedent(block).split("\n", 1)
        added, path = re.fullmatch(r"# (add to )?(\S+\.py)", first).groups()  # type: ignore[union-attr]
        found.append((added is not None, path, code))
    return found


@pytest.fixture
def extended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package with both recipes followed: new files in a folder of their own, laid over the package's."""
    before = set(sys.modules)
    kinds = dict(registry.KINDS)
    new = tmp_path / "package"
    written = blocks("Add a draft") + blocks("Add an experiment")
    for added, path, code in written:
        if not added:
            (new / path).parent.mkdir(parents=True, exist_ok=True)
            (new / path).write_text(code)
            lay_over(new, Path(path).parent, monkeypatch)
    for added, path, code in written:
        if added and path.endswith("registry.py"):
            (entry,) = eval(f"({code})", vars(experiments).copy())
            monkeypatch.setitem(experiments.EXPERIMENTS, entry.name, entry)
        elif added:
            exec(code, {})
    yield
    registry.KINDS.clear()
    registry.KINDS.update(kinds)
    added_modules = [name for name in set(sys.modules) - before if written_under(new, sys.modules[name])]
    for name in added_modules:
        parent, _, leaf = name.rpartition(".")
        vars(sys.modules[parent]).pop(leaf, None)
    for name in added_modules:
        del sys.modules[name]


def written_under(folder: Path, module: ModuleType) -> bool:
    return (getattr(module, "__file__", None) or "").startswith(str(folder))


def lay_over(new: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package of `folder` import from `new` too; a folder that the package lacks becomes a package there."""
    if not (PAGE.parents[1] / folder).is_dir():
        (new / folder / "__init__.py").touch()
        folder = folder.parent
    package = import_module(".".join(folder.parts))
    if str(new / folder) not in package.__path__:
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(new / folder)])


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    made, listed = tiny_target(stop_ids=()), prompts(10)
    made.encode_chat = lambda text: listed[int(text)]  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(Target, "load", lambda *_, **__: made)
    return made


@pytest.fixture
def draft(extended: None, target: Target) -> Backbone:
    """The recipe's draft, new."""
    return new_draft(DRAFT, target, layers=2, block_size=5, taps=(0, 2), mask_token_id=63)


def test_the_draft_is_trained_saved_loaded_and_lossless(draft: Backbone, target: Target, tmp_path: Path) -> None:
    assert not draft.get_parameter("slot_vectors").any()
    answers = [generate(target, None, prompt, max_new_tokens=24) for prompt in prompts(4)]
    examples = [Example(str(i), tuple(one.prompt_ids), tuple(one.tokens)) for i, one in enumerate(answers)]
    store = build_features(target, examples, (0, 2), tmp_path / "features")
    config = TrainConfig(blocks=16, sequences=2, anchors=4, lr=1e-2, log_every=1, mixed_precision="no")
    steps = []
    train(draft, store, config, tmp_path / "run", on_log=lambda report: steps.append(report.step))
    assert steps == [1, 2]
    assert draft.get_parameter("slot_vectors").abs().min() > 0, "training reached the new parameter"
    save_draft(draft, tmp_path / "saved", dtype=torch.float32)
    public = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert public["architectures"] == ["SlotBiasDraftModel"]
    loaded = load_draft(tmp_path / "saved", target)
    assert type(loaded) is type(draft)
    for name, parameter in draft.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    rounds = 0
    for answer in answers:
        drafted = generate(target, loaded, answer.prompt_ids, max_new_tokens=24)
        assert drafted.tokens == answer.tokens
        rounds += len(drafted.rounds)
    assert rounds < 23 * len(answers), "no proposal was ever accepted"


def test_the_experiment_is_a_command_a_line_of_the_ledger_and_a_section_of_the_report(
    draft: Backbone, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspine_probe.plots.figure_block.find_browser", lambda: None)  # no PNG
    save_draft(draft, tmp_path / "saved", dtype=torch.float32)
    rows = [json.dumps({"prompt": str(i), "set": "xy"[i % 2], "id": str(i)}) for i in range(10)]
    (tmp_path / "asked.jsonl").write_text("\n".join(rows))
    listed = command("probe", "--help")
    assert f" {EXPERIMENT} " in listed and "How often each slot proposes" in listed
    assert "--resamples" in command("probe", EXPERIMENT, "--help")

    given = {
        "--draft": f"biased={tmp_path / 'saved'}", "--prompts": str(tmp_path / "asked.jsonl"),
        "--max-new-tokens": "20", "--resamples": "50", "--output": str(tmp_path / "out"),
    }  # fmt: skip
    command("probe", EXPERIMENT, *(word for pair in given.items() for word in pair))
    saved = experiments.EXPERIMENTS[EXPERIMENT].load_result_class().load(tmp_path / "out")
    assert saved.config["resamples"] == 50 and list(saved.drafts) == ["biased"]
    assert saved.select(metric="agreement")["slot"].tolist() == ["1", "2", "3", "4"]
    assert saved.table["mean"].between(0, 1).all() and (saved.table["low"] <= saved.table["high"]).all()
    assert (tmp_path / "out" / f"{EXPERIMENT}_by_slot.html").is_file()

    command("ledger", str(tmp_path / "out"), "--output", str(tmp_path / "claims.md"))
    ledger = (tmp_path / "claims.md").read_text()
    assert f"{saved.claims()[0].here}. Verdict: **{saved.claims()[0].verdict}**. From `{EXPERIMENT}.json`" in ledger

    alone = {EXPERIMENT: experiments.EXPERIMENTS[EXPERIMENT]}
    monkeypatch.setattr("dspine_probe.experiments.reproduction.EXPERIMENTS", alone)
    asked = load_prompts(tmp_path / "asked.jsonl")
    found = reproduce(Request(target, {"biased": draft}, asked, max_new_tokens=20))
    page, _ = report.write(found, tmp_path / "report")
    text, result = page.read_text(encoding="utf-8"), found.results[EXPERIMENT]
    assert result.config["resamples"] == 200, "the entry's own sizes"
    assert f'<section id="{EXPERIMENT}">' in text and result.claims()[0].here in text
    assert result.findings() and all(sentence in text for sentence in result.findings())
    assert (tmp_path / "report" / f"{EXPERIMENT}_by_slot.html").is_file()


def command(*words: str) -> str:
    """What `dspine-probe` prints for these words, on a wide terminal."""
    ran = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    assert ran.exit_code == 0, ran.output
    return ran.output
