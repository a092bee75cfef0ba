"""Prompts read from JSONL: the shipped set or any file a user names.

One JSON object a line, with `prompt` (a string) or `turns` (a list of strings, of which the first is used), and
optionally `id` and `set` (or `domain`). Nothing is filtered or reworded here. Entry points: `load_prompts`, and
`load_all_prompts` for several files or folders of them.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dspine_probe.errors import UsageError
from dspine_probe.files import data_dir

SHIPPED = ("lab",)
"""Names that `load_prompts` takes in place of a path."""


@dataclass(frozen=True)
class Prompt:
    """One user turn: `id` is unique in its file, `set` names the benchmark whose manner it follows.

    `where` is the file and line it was read from, for messages.
    """

    id: str
    set: str
    text: str
    where: str = field(default="", compare=False)


def load_prompts(source: str | Path, *, limit: int | None = None) -> list[Prompt]:
    """Read prompts in file order.

    Args:
        source: a shipped name ("lab") or the path of a JSONL file. A line without `id` gets "<file stem>/<number>",
            one without `set` its `domain`, else the file stem.
        limit: read no further than this many prompts; None reads all. The shipped set takes its seven kinds in
            turn, so that any first few keep the mix.

    Raises:
        UsageError: no such file, a line that is not an object with a prompt, an empty prompt, an id used twice,
            no prompt at all, or a limit below 1.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"limit is {limit}; give 1 or more, or leave it out to take all")
    path = _locate(source)
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        prompt = _parse(line, number, path)
        if prompt.id in seen:
            raise UsageError(
                f"{path} line {number} repeats the id {prompt.id!r} of line {seen[prompt.id]}; give each prompt its own"
            )
        seen[prompt.id] = number
        prompts.append(prompt)
        if len(prompts) == limit:
            break
    if not prompts:
        raise UsageError(f'{path} holds no prompt; write one JSON object a line, such as {{"prompt": "..."}}')
    return prompts


def load_all_prompts(sources: Sequence[str | Path], *, limit: int | None = None) -> list[Prompt]:
    """Prompts of several sources, each as in `load_prompts` or a folder of JSONL files; `limit` holds for each file."""
    files: list[str | Path] = []
    for source in sources:
        files += sorted(Path(source).glob("*.jsonl")) if Path(source).is_dir() else [source]
    return [prompt for file in files for prompt in load_prompts(file, limit=limit)]


def encode_prompt(encode: Callable[[str], list[int]], prompt: Prompt, text: str | None = None) -> list[int]:
    """Token ids of a prompt, or of `text` made from it, by `Target.encode_chat`; a refusal names file, line and id."""
    try:
        return encode(prompt.text if text is None else text)
    except UsageError as error:
        raise UsageError(f"{prompt.where or 'prompt'} (id {prompt.id!r}): {error}") from error


def refuse_surrogates(text: str, where: str) -> None:
    """Refuse text with half of a UTF-16 pair, which no tokenizer takes.

    Raises:
        UsageError: naming `where` and the character.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{where} holds the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, which is "
            "no text; remove it or write the whole pair"
        ) from error


def _locate(source: str | Path) -> Path:
    path = data_dir() / "prompts" / f"{source}.jsonl" if str(source) in SHIPPED else Path(source)
    if not path.is_file():
        fault = "is a folder" if path.is_dir() else "was not found"
        raise UsageError(f"the prompt file {path} {fault}; give a JSONL file or the shipped set {SHIPPED[0]!r}")
    return path


def _lines(path: Path) -> list[str]:
    try:
        # not splitlines: it also breaks at U+2028, which JSON allows inside a string
        return path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8 JSONL") from error


def _parse(line: str, number: int, path: Path) -> Prompt:
    where = f"{path} line {number}"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{where} is not JSON ({error.msg} at column {error.colno}); write one JSON object a line"
        ) from error
    if not isinstance(row, dict):
        raise UsageError(f'{where} is not a JSON object; write lines such as {{"prompt": "..."}}')
    text = _first_turn(row, where)
    refuse_surrogates(text, where)
    if not text.strip():
        raise UsageError(f"{where} has an empty prompt; fill it or remove the line")
    return Prompt(
        id=_label(row, "id", f"{path.stem}/{number}", where),
        set=_label(row, "set" if "set" in row else "domain", path.stem, where),
        text=text,
        where=where,
    )


def _first_turn(row: dict[str, object], where: str) -> str:
    turns = row.get("turns")
    first = turns[0] if isinstance(turns, list) and turns else row.get("prompt")
    if not isinstance(first, str):
        raise UsageError(f"{where} has neither a text `prompt` nor a list of texts `turns`; add one of them")
    return first


def _label(row: dict[str, object], key: str, default: str, where: str) -> str:
    value = row.get(key, default)
    if not isinstance(value, str | int) or not str(value):
        raise UsageError(f"{where} has {key} {value!r}; write a text that is not empty, or leave it out")
    refuse_surrogates(str(value), f"{key} in {where}")
    return str(value)
