"""The main job end to end on tiny models: one set of answers, every experiment, a report that opens alone."""

from __future__ import annotations

import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs
from tiny import tiny_draft, tiny_target

from dspine_probe import report
from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.errors import UsageError
from dspine_probe.experiments.acceptance import AcceptanceResult
from dspine_probe.experiments.common.request import Request
from dspine_probe.experiments.common.splits import part_sizes
from dspine_probe.experiments.emergence import EmergenceConfig, EmergenceResult
from dspine_probe.experiments.reproduction import ANCHORS, FEWEST_PROMPTS, Reproduction, refuse_few, reproduce
from dspine_probe.prompts import Prompt

PROMPTS = [Prompt(f"{name}/{i}", name, name * (i + 2)) for i in range(6) for name in ("ab", "cd")]


@pytest.fixture(scope="module")
def found() -> Reproduction:
    target = tiny_target(stop_ids=())
    target.encode_chat = lambda text: [3 + ord(c) % 50 for c in text]  # type: ignore[method-assign, assignment]
    drafts = {"flash": tiny_draft(target, DFLASH), "spine": tiny_draft(target, DSPINE)}
    stages: list[str] = []
    request = Request(
        target, drafts, PROMPTS, max_new_tokens=24, anchors=ANCHORS, batch_size=4,
        on_progress=lambda stage, _done, _total: stages.append(stage),
    )  # fmt: skip
    first: list[str | None] = []
    result = reproduce(request, lambda so_far: first.append(report.lead(so_far)))
    assert first == [report.lead(result)]
    assert list(dict.fromkeys(stages)) == [
        "1 of 6: speed, decoding", "2 of 6: answers", "2 of 6: answers, states", "3 of 6: emergence",
        "4 of 6: corruption", "6 of 6: acceptance, walks",
    ]  # fmt: skip
    return result


@pytest.fixture(scope="module")
def page(found: Reproduction, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write(found, tmp_path_factory.mktemp("report"))[0]


class Page(HTMLParser):
    """Elements with their attributes, in order, and what a browser would fetch."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def having(self, name: str, value: str) -> list[dict[str, str | None]]:
        return [given for _, given in self.tags if given.get(name) == value]


def test_offline_and_real_decoding_agree(found: Reproduction) -> None:
    """The decoded prompts are the first of the simulated ones; both must tell the same tokens as plain decoding."""
    speed, acceptance = found.results["speed"], found.results["acceptance"]
    assert (speed.select(metric="same_tokens", set="all")["mean"] == 1).all()
    assert list(dict.fromkeys(speed.table["draft"])) == ["plain", *dict.fromkeys(acceptance.table["draft"])]
    assert list(found.left_out) == ["injection-depth"] and "no injectors" in found.left_out["injection-depth"]


def test_the_summary_has_a_row_for_each_method(found: Reproduction) -> None:
    table = found.summary()
    assert table[""].tolist() == ["plain", "flash", "spine"]
    assert table["tokens per round"][0] == "1" and "(" in table["tokens per round"][1]
    assert re.fullmatch(r"[\d.]+ \([\d.]+, [\d.]+\)", table["times plain"][1])


def test_the_first_thing_said_is_whether_drafts_make_decoding_faster(found: Reproduction, page: Path) -> None:
    claim = found.claims()[0][1]
    assert claim.id == "faster" and re.match(r"flash [\d.]+ \([\d.]+, [\d.]+\), spine", claim.here)
    said = report.lead(found)
    assert found.engines_agree is True and said is not None and "same tokens as the readable loop" in said
    assert claim.verdict.effect in said and claim.here in said
    text = page.read_text(encoding="utf-8")
    assert text.index('class="lead"') < text.index('class="card"') < text.index("<section")


def test_every_claim_has_a_card_in_the_ledgers_words_that_leads_to_its_section(found: Reproduction, page: Path) -> None:
    text, parsed = page.read_text(encoding="utf-8"), Page(page)
    assert len(parsed.having("class", "card")) == len(found.claims()) >= 3
    for name, claim in found.claims():
        assert escape(claim.claim) in text and f'class="verdict">{claim.verdict}' in text
        assert parsed.having("href", f"#{name}") and len(parsed.having("id", name)) == 1


def test_the_report_is_one_file_that_loads_nothing_and_folds_details(found: Reproduction, page: Path) -> None:
    text, library = page.read_text(encoding="utf-8"), get_plotlyjs()
    rest = text.replace(library, "")
    assert text.count(library) == 1 and "<script src=" not in rest and "url(" not in rest
    assert not re.search(r"(https?:)?//[a-z0-9.-]+\.[a-z]{2,}", rest)
    blocks = [block for blocks in report.figure_blocks(found).values() for block in blocks.values()]
    parsed = Page(page)
    pictures = [given["aria-label"] for given in parsed.having("role", "img")]
    assert pictures == [block.alt for block in blocks] and rest.count("Plotly.newPlot(") == len(blocks)
    ids = [given["id"] for _, given in parsed.tags if "id" in given]
    assert len(ids) == len(set(ids))
    # One figure a section is in sight; the others, all findings and all tables are folded.
    shown = re.sub(r"<details>.*?</details></section>", "", rest, flags=re.DOTALL)
    assert shown.count('role="img"') == len(found.results) and "<table" not in shown and "<li>" not in shown
    for query in ("prefers-color-scheme: dark", "@media print", "max-width: 30rem", "beforeprint"):
        assert query in rest


def test_everything_is_written_and_comes_back(found: Reproduction, page: Path) -> None:
    folder = page.parent
    for blocks in report.figure_blocks(found).values():
        assert all((folder / f"{name}.html").is_file() for name in blocks)
    assert AcceptanceResult.load(folder).table.equals(found.results["acceptance"].table)
    assert EmergenceResult.load(folder).findings() == found.results["emergence"].findings()
    assert (folder / "speed.csv").is_file() and (folder / "corruption.csv").is_file()


def test_too_few_prompts_for_an_interval_are_refused_at_once(found: Reproduction) -> None:
    few = PROMPTS[: 2 * FEWEST_PROMPTS - 1]
    with pytest.raises(UsageError, match=r"'cd' has 4 of the 9 prompts and an interval needs 5.*--limit 35"):
        refuse_few(few)
    with pytest.raises(UsageError, match="an interval needs 5"):
        reproduce(Request(tiny_target(), {}, few))
    config = EmergenceConfig()
    shares = config.train_share, config.validation_share
    tested = [part_sizes(count, *shares)[-1] for count in (FEWEST_PROMPTS - 1, FEWEST_PROMPTS)]
    assert tested == [1, 2]  # one tested prompt has no interval
