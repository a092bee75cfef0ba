"""First divergences of bfloat16 decoding, and how near a tie each of them was.

Answers prompts plainly in fp32, plainly in bfloat16, and in bfloat16 with each shipped draft; lists where answers
diverge and the fp32 margin between the two tokens there. From plain bfloat16 decoding nothing should diverge, since the
C kernels read a block to the same bits as single tokens. Exit status 1 if a divergence is no near-tie.

    python benchmarks/near_ties.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer
from divergence import NEAR, Divergence, first_divergences
from recording import RESULTS, made, save

from dspine_probe.decoding.engine import Engines
from dspine_probe.decoding.fast_cpu import FastCpu
from dspine_probe.decoding.generate import generate
from dspine_probe.drafts import Draft
from dspine_probe.drafts.checkpoint import load_draft, shipped_checkpoints
from dspine_probe.prompts import load_prompts
from dspine_probe.target import Target

Answers = list[tuple[int, ...]]


def answer(
    target: Target, draft: Draft | None, prompts: Sequence[Sequence[int]], limit: int, engines: Engines
) -> Answers:
    return [generate(target, draft, p, max_new_tokens=limit, engines=engines).tokens for p in prompts]


def show(name: str, parted: Sequence[Divergence], target: Target, total: int) -> None:
    typer.echo(f"{name}: {len(parted)} of {total} answers diverge")
    for one in parted:
        verdict = "near-tie" if one.near_tie else "NO NEAR-TIE"
        tokens = f"{target.decode([one.expected])!r} or {target.decode([one.found])!r}"
        margin = f"margin {one.margin:+.4f}, {one.steps:.1f} steps of bfloat16"
        typer.echo(f"  prompt {one.prompt}, token {one.at}: {tokens}: {margin}: {verdict}")


def main(
    prompts: Annotated[str, typer.Option(help="Shipped set or JSONL file.")] = "lab",
    count: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 28,
    limit: Annotated[int, typer.Option(min=1, help="Most new tokens a prompt.")] = 128,
) -> None:
    """List the divergences and write the result."""
    target = Target.load(dtype=torch.bfloat16)
    encoded = [target.encode_chat(prompt.text) for prompt in load_prompts(prompts, limit=count)]
    exact = FastCpu(torch.float32)
    rounded = FastCpu(torch.bfloat16)
    fp32 = answer(target, None, encoded, limit, exact)
    plain = answer(target, None, encoded, limit, rounded)
    compared: dict[str, tuple[Answers, Answers]] = {"bf16 plain against fp32 plain": (fp32, plain)}
    for name in shipped_checkpoints():
        found = answer(target, load_draft(name, target), encoded, limit, rounded)
        compared[f"bf16 {name} against bf16 plain"] = (plain, found)
    record: dict[str, Any] = {}
    for name, (expected, found) in compared.items():
        parted = first_divergences(target, encoded, expected, found, judge=exact)
        show(name, parted, target, len(encoded))
        record[name] = [{**asdict(one), "steps": one.steps, "near_tie": one.near_tie} for one in parted]
    result = {
        **made(),
        "settings": {"target": target.name, "prompts": len(encoded), "max_new_tokens": limit, "near": NEAR},
        "engines": {"exact": exact.about, "rounded": rounded.about},
        "divergences": record,
    }
    save(result, RESULTS / "near_ties.json")
    if not all(one["near_tie"] for listed in record.values() for one in listed):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
