"""Is speculative decoding token-identical to plain decoding? Every draft, side by side and alone, on real prompts.

The plain answer of each prompt, decoded alone by the reference loop, is the truth; every draft decodes it again with 1
and with 4 rows, and so does plain decoding with 4. Where an answer differs, the report says at which token, and by how
much the target preferred the true one: a near-tie speaks for rounding, anything else for a fault. Works in chunks of 4
prompts, writes the report after each, and goes on where it stopped when run again with the same settings.

    python benchmarks/token_identity.py --prompts lab --prompts FOLDER_OF_JSONL --count 200

On two cores 200 prompts of 64 tokens take the better part of an hour. Ends with status 1 if anything differs in fp32.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain, product, zip_longest
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from recording import RESULTS, made, save

from dspine_probe.decoding.engine import Engines
from dspine_probe.decoding.fast_cpu import FastCpu
from dspine_probe.decoding.generate import generate, generate_batch
from dspine_probe.decoding.reference import REFERENCE
from dspine_probe.drafts import Draft
from dspine_probe.drafts.checkpoint import load_draft
from dspine_probe.prompts import Prompt, load_prompts
from dspine_probe.target import Target

ROWS = (1, 4)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose(sources: Sequence[str], count: int) -> list[Prompt]:
    """The first `count` prompts, taken from the sources in turn."""
    folders = [sorted(Path(s).glob("*.jsonl")) if Path(s).is_dir() else [s] for s in sources]
    listed = [load_prompts(file) for file in chain.from_iterable(folders)]
    return [prompt for turn in zip_longest(*listed) for prompt in turn if prompt is not None][:count]


def answer_chunk(
    target: Target, drafts: dict[str, Draft], prompts: list[list[int]], limit: int, engines: Engines
) -> dict[str, list[tuple[int, ...]]]:
    """Answers of a few prompts by every way of decoding that is not the truth itself."""
    ways: dict[str, Draft | None] = {"plain": None, **drafts}
    answers = {}
    for (name, draft), rows in product(ways.items(), ROWS):
        if draft is None and rows == 1 and engines is REFERENCE:
            continue
        parts = [prompts[at : at + rows] for at in range(0, len(prompts), rows)]
        done = [generate_batch(target, draft, part, max_new_tokens=limit, engines=engines) for part in parts]
        answers[f"{name}, {rows} row{'s' * (rows > 1)}"] = [one.tokens for batch in done for one in batch]
    return answers


def difference(target: Target, prompt: list[int], truth: Sequence[int], found: Sequence[int]) -> dict[str, Any]:
    """Where two answers part, and the target's scores of both tokens there."""
    at = next((at for at, pair in enumerate(zip(truth, found, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return {"token": min(len(truth), len(found)), "lengths": [len(truth), len(found)]}
    states = target.hidden_states(torch.tensor([[*prompt, *truth[:at]]]), ())
    scores = target.logits(states.final[0, -1])[[truth[at], found[at]]].tolist()
    return {"token": at, "scores": scores, "preferred_by": scores[0] - scores[1]}


def resume(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The report so far, if it was made with these settings."""
    if path.is_file():
        report = json.loads(path.read_text())
        if report["settings"] == json.loads(json.dumps(settings)):
            return report
        typer.echo(f"{path} was made with other settings; it is begun again")
    return {**made(), "settings": settings, "prompts": [], "identical": {}, "differences": []}


def main(
    prompts: Annotated[list[str] | None, typer.Option(help="'lab', a JSONL file or a folder; repeat.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts, taken from the sources in turn.")] = 200,
    limit: Annotated[int, typer.Option(min=1, help="Most new tokens a prompt.")] = 64,
    draft: Annotated[list[str] | None, typer.Option(help="Drafts; by default dflash and dspine.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, where all must agree, or bfloat16.")] = "float32",
    fast: Annotated[bool, typer.Option(help="Test the fast CPU engines against the reference.")] = False,
    threads: Annotated[int, typer.Option(min=0, help="Threads of torch; 0 leaves its choice.")] = 0,
    output: Annotated[Path | None, typer.Option(help="The report.")] = None,
) -> None:
    """Decode, compare, and write the report."""
    if threads:
        torch.set_num_threads(threads)
    names = draft or ["dflash", "dspine"]
    target = Target.load("embedded", dtype=DTYPES[dtype])
    drafts = {name: load_draft(name, target, dtype=DTYPES[dtype]) for name in names}
    engines: Engines = FastCpu(DTYPES[dtype]) if fast else REFERENCE
    chosen = choose(prompts or ["lab"], count)
    settings = {
        "target": target.name,
        "drafts": names,
        "dtype": dtype,
        "engines": engines.about,
        "max_new_tokens": limit,
        "ids": [prompt.id for prompt in chosen],
    }
    path = output or RESULTS / f"token_identity{'_fast' * fast}_{dtype}.json"
    report = resume(path, settings)
    for start in range(len(report["prompts"]), len(chosen), max(ROWS)):
        chunk = chosen[start : start + max(ROWS)]
        encoded = [target.encode_chat(prompt.text) for prompt in chunk]
        truths = [generate(target, None, ids, max_new_tokens=limit).tokens for ids in encoded]
        for way, found in answer_chunk(target, drafts, encoded, limit, engines).items():
            for prompt, ids, truth, tokens in zip(chunk, encoded, truths, found, strict=True):
                report["identical"][way] = report["identical"].get(way, 0) + (tokens == truth)
                if tokens != truth:
                    where = difference(target, ids, truth, tokens)
                    report["differences"].append({"way": way, "prompt": prompt.id, **where})
        report["prompts"] += [prompt.id for prompt in chunk]
        save(report, path)
        typer.echo(f"{len(report['prompts'])} of {len(chosen)} prompts, {len(report['differences'])} differences")
    for way, same in report["identical"].items():
        typer.echo(f"{way:40} {same} of {len(chosen)} identical")
    raise typer.Exit(1 if report["differences"] and dtype == "float32" else 0)


if __name__ == "__main__":
    typer.run(main)
