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

from dspine_probe.decoding.continuous import generate_sampled
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.files import write_atomically
from dspine_probe.target import Target
from dspine_probe.training.corpus import Corpus
from dspine_probe.training.regenerate import ALONE, Worker, answer, is_looping, pack

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


def sample_turns(target: Target, sampling: TurnSampling, number: int, seen: set[str]) -> dict[str, Any]:
    """Sample round `number` of user turns; the same arguments give the same texts.

    Returns the `texts` kept, by prompt id, and how many were `dropped` for which reason.
    """
    generator = torch.Generator(target.device).manual_seed(sampling.seed * MAX_ROUNDS + number)
    turns = generate_sampled(
        target,
        [open_user_turn(target)] * sampling.round_size,
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
        ids = turn.response_ids[:-1] if turn.finish == "stop" else turn.response_ids
        text = target.decode(list(ids), skip_special=True).strip()
        fault = turn_fault(text, turn.finish, turn.response_ids, seen)
        if fault is None:
            texts[f"synth/{sampling.seed}-{number}-{index}"] = text
        else:
            dropped[fault] += 1
    return {"texts": texts, "dropped": dict(dropped)}


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
        texts = _round(target, folder, sampling, number, seen)["texts"]
        prompts |= {name: tuple(target.encode_chat(text)) for name, text in texts.items()}
        kept = answer(target, prompts, folder, max_new_tokens, sampling.batch_size, share, worker)
        if share is None or kept >= share:
            rounds = [json.loads(path.read_text()) for path in folder.glob("turns-*.json")]
            dropped = sum((Counter(one["dropped"]) for one in rounds), Counter[str]())
            notes = {"kept": sum(len(one["texts"]) for one in rounds), "dropped": dict(dropped)}
            return pack(target, folder, {"turns": asdict(sampling) | notes})
    raise ProbeError(
        f"{MAX_ROUNDS} rounds of self-written prompts gave too few answers for {token_budget:,} tokens; "
        "lower the budget or raise the round size"
    )


def _round(target: Target, folder: Path, sampling: TurnSampling, number: int, seen: set[str]) -> dict[str, Any]:
    """A round from its file if it is there, else sampled and written."""
    path = folder / f"turns-{number}.json"
    if path.exists():
        stored: dict[str, Any] = json.loads(path.read_text())
        if stored["sampling"] != asdict(sampling):
            raise UsageError(
                f"{path} holds turns sampled with {stored['sampling']}, and this run has {asdict(sampling)}; "
                "use the same or another folder"
            )
        seen.update(" ".join(text.lower().split()) for text in stored["texts"].values())
        return stored
    found = {"sampling": asdict(sampling)} | sample_turns(target, sampling, number, seen)
    write_atomically(path, lambda part: part.write_text(json.dumps(found, indent=1)))
    return found
