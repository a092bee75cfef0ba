"""Self-synthesis of training prompts: the target writes the user turn itself, then answers it at T=0.

The method of Magpie (arXiv 2406.08464): an instruction-tuned model that is given its chat template up to the open
user turn continues with a plausible request. No data is needed, so the result can be shared whole. Turns are sampled
in rounds, each with its own seed and file, so that a killed run repeats nothing; answers go through `regenerate`.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dspine_probe.decoding.continuous import Completion, generate_sampled
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.files import write_atomically
from dspine_probe.target import Target
from dspine_probe.training.corpus import Corpus
from dspine_probe.training.filters import is_looping
from dspine_probe.training.regenerate import ALONE, Worker, answer, pack

MIN_WORDS = 4
MAX_TURN_TOKENS = 160
MAX_NON_ASCII = 0.1
MAX_ROUNDS = 64
_PLACE = "\u2603user turn\u2603"


@dataclass(frozen=True)
class TurnSampling:
    """How user turns are sampled: `round_size` of them a round, from seed and round number."""

    seed: int = 0
    round_size: int = 1024
    batch_size: int = 192
    temperature: float = 1.0
    top_p: float = 0.95


@dataclass(frozen=True)
class TurnRound:
    """Texts kept from one round by prompt id, and how many were dropped for which reason."""

    texts: dict[str, str]
    dropped: dict[str, int]


def open_user_turn(target: Target) -> list[int]:
    """Token ids of the chat template up to where the user begins to write.

    Raises:
        UsageError: the target has no tokenizer or no chat template.
    """
    tokenizer = target.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        raise UsageError(
            f"target '{target.name}' has no chat template to write a user turn in; use an instruction-tuned target"
        )
    messages = [{"role": "user", "content": _PLACE}]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False))
    before, found, _ = text.partition(_PLACE)
    if not found:
        raise UsageError(f"the chat template of target '{target.name}' rewrites the user's text; use other prompts")
    return [int(token) for token in tokenizer.encode(before, add_special_tokens=False)]


def turn_fault(text: str, finish: str, ids: tuple[int, ...], seen: set[str]) -> str | None:
    """Why a sampled turn is of no use: "long", "empty", "short", "foreign", "looping" or "duplicate"; else None.

    `seen` holds the turns kept so far, in lower case with single spaces, and is added to.
    """
    plain = " ".join(text.lower().split())
    if finish != "stop":
        return "long"
    if not plain:
        return "empty"
    if len(plain.split()) < MIN_WORDS:
        return "short"
    if sum(not c.isascii() for c in text) > MAX_NON_ASCII * len(text):
        return "foreign"
    if is_looping(ids):
        return "looping"
    if plain in seen:
        return "duplicate"
    seen.add(plain)
    return None


def sample_turns(target: Target, sampling: TurnSampling, number: int, seen: set[str]) -> TurnRound:
    """Sample round `number` of user turns and keep the usable ones; the same arguments give the same texts."""
    generator = torch.Generator(target.device).manual_seed(sampling.seed * MAX_ROUNDS + number)
    start = open_user_turn(target)
    turns = generate_sampled(
        target,
        [start] * sampling.round_size,
        max_new_tokens=MAX_TURN_TOKENS,
        batch_size=sampling.batch_size,
        generator=generator,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        abandon=is_looping,
    )
    texts: dict[str, str] = {}
    dropped: Counter[str] = Counter()
    for index, turn in enumerate(turns):
        text = _turn_text(target, turn)
        fault = turn_fault(text, turn.finish, turn.response_ids, seen)
        if fault is None:
            texts[f"synth/{sampling.seed}-{number}-{index}"] = text
        else:
            dropped[fault] += 1
    return TurnRound(texts, dict(dropped))


def synthesize(
    target: Target,
    folder: Path,
    *,
    token_budget: int,
    max_new_tokens: int = 320,
    sampling: TurnSampling = TurnSampling(),
    worker: Worker = ALONE,
) -> Corpus:
    """Write prompts and answer them until `token_budget` response tokens are kept, then pack the folder.

    Args:
        target: an instruction-tuned target; it writes both sides.
        folder: keeps `turns-<round>.json`, the work files and the packed corpus, prompts included.
        token_budget: kept response tokens of all workers together.
        max_new_tokens: longest answer.
        sampling: of the user turns; the batch size also serves the answers.
        worker: takes every count-th round and its share of the budget.

    Raises:
        UsageError: the folder belongs to a run with other settings.
        ProbeError: the target's turns are unusable, so that the budget stays out of reach.
    """
    folder = Path(folder)
    seen: set[str] = set()
    prompts: dict[str, tuple[int, ...]] = {}
    share = worker.share(token_budget)
    for number in range(worker.index, MAX_ROUNDS, worker.count):
        found = _round(target, folder, sampling, number, seen)
        prompts |= {name: tuple(target.encode_chat(text)) for name, text in found.texts.items()}
        kept = answer(
            target,
            prompts,
            folder,
            max_new_tokens=max_new_tokens,
            batch_size=sampling.batch_size,
            token_budget=share,
            worker=worker,
        )
        if share is None or kept >= share:
            return pack(target, folder, {"turns": _turn_notes(folder, sampling)})
    raise ProbeError(
        f"{MAX_ROUNDS} rounds of self-written prompts gave too few answers for {token_budget:,} tokens; "
        "lower the budget or raise the round size"
    )


def _round(target: Target, folder: Path, sampling: TurnSampling, number: int, seen: set[str]) -> TurnRound:
    """A round from its file if it is there, else sampled and written."""
    path = folder / f"turns-{number}.json"
    if path.exists():
        stored = json.loads(path.read_text())
        if stored["sampling"] != asdict(sampling):
            raise UsageError(
                f"{path} holds turns sampled with {stored['sampling']}, and this run has {asdict(sampling)}; "
                "use the same or another folder"
            )
        found = TurnRound(stored["texts"], stored["dropped"])
        seen.update(" ".join(text.lower().split()) for text in found.texts.values())
        return found
    found = sample_turns(target, sampling, number, seen)
    text = json.dumps({"sampling": asdict(sampling), **asdict(found)}, indent=1)
    write_atomically(path, lambda part: part.write_text(text))
    return found


def _turn_text(target: Target, turn: Completion) -> str:
    ids = turn.response_ids[:-1] if turn.finish == "stop" else turn.response_ids
    return target.decode(list(ids), skip_special=True).strip()


def _turn_notes(folder: Path, sampling: TurnSampling) -> dict[str, Any]:
    """How the turns of all workers were sampled and how many were dropped for which reason."""
    kept, dropped = 0, Counter[str]()
    for path in folder.glob("turns-*.json"):
        stored = json.loads(path.read_text())
        kept += len(stored["texts"])
        dropped.update(stored["dropped"])
    return {**asdict(sampling), "kept": kept, "dropped": dict(dropped)}
