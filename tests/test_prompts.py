"""Reading prompts: the shipped set, a user's file, and files that are broken."""

import json
from collections import Counter
from pathlib import Path

import pytest

from dspine_probe.errors import UsageError
from dspine_probe.prompts import Prompt, encode_prompt, load_prompts

SETS = {"gsm8k", "math500", "humaneval", "mbpp", "livecodebench", "mtbench", "arenahard"}


def _write(folder: Path, *lines: str) -> Path:
    path = folder / "mine.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_the_shipped_set_has_twenty_prompts_of_each_kind() -> None:
    prompts = load_prompts("lab")
    assert Counter(prompt.set for prompt in prompts) == dict.fromkeys(SETS, 20)
    assert all(prompt.id.startswith(f"lab/{prompt.set}/") for prompt in prompts)
    assert len({prompt.text for prompt in prompts}) == 140


def test_any_seven_prompts_in_a_row_of_the_shipped_set_cover_the_sets() -> None:
    assert {prompt.set for prompt in load_prompts("lab", limit=7)} == SETS
    assert {prompt.set for prompt in load_prompts("lab")[50:57]} == SETS


def test_prompt_and_turns_are_both_read(tmp_path: Path) -> None:
    path = _write(tmp_path, '{"prompt": "one"}', "", '{"turns": ["two", "later"], "id": 7, "set": "s", "x": 1}')
    assert load_prompts(path) == [Prompt("mine/1", "mine", "one"), Prompt("7", "s", "two")]
    assert load_prompts(str(path), limit=1) == [Prompt("mine/1", "mine", "one")]


def test_a_line_separator_inside_a_string_does_not_end_the_line(tmp_path: Path) -> None:
    path = _write(tmp_path, json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False))
    assert load_prompts(path)[0].text == "a\u2028b"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"prompt": "a"', "mine.jsonl line 2 is not JSON"),
        ('["a"]', "line 2 is not a JSON object"),
        ('{"text": "a"}', "line 2 has neither"),
        ('{"turns": []}', "line 2 has neither"),
        ('{"turns": [3]}', "line 2 has neither"),
        ('{"prompt": "  "}', "line 2 has an empty prompt"),
        ('{"prompt": "a", "id": "mine/1"}', "line 2 repeats the id 'mine/1' of line 1"),
        ('{"prompt": "a", "id": null}', "line 2 has id None"),
        ('{"prompt": "a", "set": ""}', "line 2 has set ''"),
        (r'{"prompt": "a \ud83d b"}', r"mine.jsonl line 2 holds the lone surrogate U\+D83D at character 2"),
        (r'{"prompt": "a", "id": "\udc00"}', r"id in .*line 2 holds the lone surrogate U\+DC00"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        load_prompts(_write(tmp_path, '{"prompt": "fine"}', line))


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere.jsonl was not found; give a JSONL file or the shipped set 'lab'"):
        load_prompts(tmp_path / "nowhere.jsonl")
    with pytest.raises(UsageError, match="is a folder"):
        load_prompts(tmp_path)
    with pytest.raises(UsageError, match="holds no prompt"):
        load_prompts(_write(tmp_path, "", ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        load_prompts(tmp_path / "latin.jsonl")


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="limit is 0"):
        load_prompts("lab", limit=0)


def test_a_prompt_that_is_refused_is_named_by_file_line_and_id(tmp_path: Path) -> None:
    _, second = load_prompts(_write(tmp_path, '{"prompt": "short"}', '{"prompt": "long", "id": "x/7"}'))

    def encode(text: str) -> list[int]:
        if text.startswith("long"):
            raise UsageError("the prompt has 46 tokens and target 't' takes 40; shorten it")
        return [len(text)]

    with pytest.raises(UsageError, match=r"mine.jsonl line 2 \(id 'x/7'\): the prompt has 46 tokens"):
        encode_prompt(encode, second)
    with pytest.raises(UsageError, match=r"^prompt \(id 'y'\): the prompt"):
        encode_prompt(encode, Prompt("y", "s", "long"))
    assert encode_prompt(encode, second, "other text") == [10]
