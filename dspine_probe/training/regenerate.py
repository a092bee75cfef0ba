"""Answering prompts with the target at temperature 0, resumable, into a packed corpus.

`regenerate` appends every answer to a work file at once, so that a killed run goes on where it was; `pack` filters
what the work files hold (`ResponseFilter`) and writes the corpus. Several workers may share a folder, each with its own
work file. `encode_prompts` turns a prompts file into token ids, the same every time.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspine_probe.decoding.continuous import Completion, generate_greedy
from dspine_probe.errors import UsageError
from dspine_probe.files import write_atomically
from dspine_probe.precision import name_of
from dspine_probe.prompts import Prompt, encode_prompt
from dspine_probe.target import Target
from dspine_probe.training.corpus import Corpus, Example
from dspine_probe.training.worklog import WorkLog, read_work

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
SETTINGS = "run.json"
LINE_SECONDS = 30.0
MIN_RESPONSE = 8
NGRAM = 8
MIN_DISTINCT = 0.5
TAIL = 64


def is_looping(ids: Sequence[int]) -> bool:
    """Whether the text repeats itself: under half its 8-grams are distinct, or its last 64 tokens are periodic.

    A period of at most 32 counts, so that the cycle is seen twice.
    """
    grams = [tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1)]
    if len(grams) >= NGRAM and len(set(grams)) < MIN_DISTINCT * len(grams):
        return True
    tail = list(ids[-TAIL:])
    return len(tail) == TAIL and any(tail[p:] == tail[:-p] for p in range(1, TAIL // 2 + 1))


class ResponseFilter:
    """Says for one response after another whether to drop it; remembers what it has seen to find duplicates."""

    def __init__(self, stop_ids: Collection[int]) -> None:
        self._stop_ids = frozenset(stop_ids)
        self._seen: set[Hashable] = set()

    def reason(self, response: Sequence[int]) -> str | None:
        """None to keep it, else "empty", "short", "looping" or "duplicate"; the stop id counts for nothing."""
        body = tuple(response)
        while body and body[-1] in self._stop_ids:
            body = body[:-1]
        if not body:
            return "empty"
        if len(body) < MIN_RESPONSE:
            return "short"
        if is_looping(body):
            return "looping"
        if body in self._seen:
            return "duplicate"
        self._seen.add(body)
        return None


@dataclass(frozen=True)
class Worker:
    """One of `count` processes that share a folder; it takes every count-th prompt and its share of the budget."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise UsageError(f"worker {self.index} of {self.count} was asked for; workers are 0 to {self.count - 1}")

    def share(self, budget: int | None) -> int | None:
        """This worker's part of a budget, rounded up."""
        return None if budget is None else -(-budget // self.count)


ALONE = Worker()


def encode_prompts(
    target: Target, prompts: Sequence[Prompt], *, boxed_share: float = 0.0
) -> dict[str, tuple[int, ...]]:
    """Chat token ids of every prompt by id.

    Args:
        target: gives the tokenizer and the chat template.
        prompts: as `load_prompts` gives them.
        boxed_share: share of the prompts of sets named "math..." that get the request to reason step by step and box
            the answer; which ones depends on their id alone.
    """
    if not 0 <= boxed_share <= 1:
        raise UsageError(f"the boxed share is {boxed_share}; give a number from 0 to 1")
    encoded = {}
    for prompt in prompts:
        boxed = prompt.set.startswith("math") and _fraction(prompt.id) < boxed_share
        text = prompt.text + BOXED if boxed else prompt.text
        encoded[prompt.id] = tuple(encode_prompt(target.encode_chat, prompt, text))
    return encoded


def regenerate(
    target: Target,
    prompts: Mapping[str, Sequence[int]],
    folder: Path,
    *,
    max_new_tokens: int = 320,
    batch_size: int = 192,
    token_budget: int | None = None,
    worker: Worker = ALONE,
    notes: Mapping[str, Any] | None = None,
) -> Corpus:
    """Answer prompts in their order until the budget is reached, then pack the folder.

    A run on the same folder goes on after the answers already there.

    Args:
        target: answers at T=0.
        prompts: encoded prompts by id.
        folder: holds the work files and then the packed corpus.
        max_new_tokens: longest answer, the stop id included; longer ones are cut and kept, looping ones given up.
        batch_size: rows decoded together.
        token_budget: kept response tokens of all workers together; rows in flight when it is reached are finished,
            so that short answers are not favoured. None answers every prompt.
        worker: which share of the prompts this process takes.
        notes: added to the meta of the corpus, such as where the prompts come from.

    Raises:
        UsageError: the folder belongs to a run with other settings.
        ProbeError: the disk is full, or a work file is damaged.
    """
    mine = dict(list(prompts.items())[worker.index :: worker.count])
    answer(target, mine, Path(folder), max_new_tokens, batch_size, worker.share(token_budget), worker)
    return pack(target, folder, notes)


def answer(
    target: Target,
    prompts: Mapping[str, Sequence[int]],
    folder: Path,
    max_new_tokens: int,
    batch_size: int,
    token_budget: int | None,
    worker: Worker,
) -> int:
    """As `regenerate` for one worker's own prompts and budget, without packing; returns the response tokens kept."""
    settings = {"target": target.name, "max_new_tokens": max_new_tokens, "precision": name_of(target.dtype)}
    noted = folder / SETTINGS
    if not noted.exists():
        write_atomically(noted, lambda part: part.write_text(json.dumps(settings)))
    found = json.loads(noted.read_text())
    if {"precision": settings["precision"]} | found != settings:  # older runs did not note it
        raise UsageError(
            f"{folder} holds answers made with {found}, and this run has {settings}; use the same or another folder"
        )
    path = folder / f"work-{worker.index}.jsonl"
    judge = ResponseFilter(target.stop_ids)
    rows = list(read_work(path))
    answered = {row["id"] for row in rows}
    kept = resumed = sum(len(row["response"]) for row in rows if not judge.reason(row["response"]))
    left = [(name, ids) for name, ids in prompts.items() if name not in answered]
    began = said = time.monotonic()

    def record(index: int, completion: Completion) -> None:
        nonlocal kept, said
        response = completion.response_ids
        row = {"id": left[index][0], "prompt": completion.prompt_ids, "response": response}
        log.append(row | {"finish": completion.finish})
        kept += 0 if judge.reason(response) else len(response)
        if (now := time.monotonic()) - said >= LINE_SECONDS:
            said, of = now, "" if token_budget is None else f" of {token_budget:,}"
            rate = (kept - resumed) / (now - began)
            print(f"answers: {kept:,}{of} tokens kept, {rate:,.0f} a second", file=sys.stderr, flush=True)

    with WorkLog(path) as log:
        generate_greedy(
            target,
            [ids for _, ids in left],
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            on_complete=record,
            should_stop=lambda: token_budget is not None and kept >= token_budget,
            abandon=is_looping,
        )
    return kept


def pack(target: Target, folder: Path, notes: Mapping[str, Any] | None = None) -> Corpus:
    """Filter the answers in the work files of `folder`, write the corpus there, prompts included, and return it.

    The order depends on the ids alone, so that it mixes short and long answers. Drop reasons are counted in the meta,
    to which `notes` are added.
    """
    folder = Path(folder)
    rows = {row["id"]: row for path in sorted(folder.glob("work-*.jsonl")) for row in read_work(path)}
    if not rows:
        raise UsageError(f"{folder} holds no answers to pack; generate some first")
    judge = ResponseFilter(target.stop_ids)
    examples, dropped, finishes = [], Counter[str](), Counter[str]()
    for name in sorted(rows, key=_fraction):
        row = rows[name]
        reason = judge.reason(row["response"])
        if reason is not None:
            dropped[reason] += 1
            continue
        finishes[row["finish"]] += 1
        examples.append(Example(name, tuple(row["prompt"]), tuple(row["response"])))
    meta = json.loads((folder / SETTINGS).read_text()) | dict(notes or {})
    meta |= {"temperature": 0, "answered": len(rows), "dropped": dict(dropped), "finish": dict(finishes)}
    corpus = Corpus(examples, meta)
    corpus.save(folder, include_prompts=True)
    return corpus


def _fraction(name: str) -> float:
    """A number in [0, 1) that depends on the id alone."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) / 2**32
