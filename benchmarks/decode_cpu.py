"""Greedy decoding of single prompts on a CPU: how near the limits of the machine, and how fast beside others.

For one thread and for two, in one process: the parts of a round, interleaved (`decode_parts`), then every method
on the same prompts, prompt by prompt: our plain decoding, DFlash, DSpine with the trimmed and with the full head, and
the peers (`decode_peers`), those of llama.cpp one after the other. Prints tables, writes `results/decode_cpu.json`. Run
it on an idle machine: what else runs takes memory bandwidth and, with two threads, holds up every barrier. Some ten
minutes a thread count with all peers.

    PYTHONPATH=PEERS python benchmarks/decode_cpu.py
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from decode_parts import Parts, huge_pages, measure_parts
from decode_peers import Timed, Way, absent, dflash_ways, llama_ways, transformers_ways
from recording import RESULTS, made, save

from dspine_probe.decoding.fast_cpu import FastCpu
from dspine_probe.decoding.generate import generate
from dspine_probe.drafts import Draft, DSpine
from dspine_probe.drafts.checkpoint import load_draft
from dspine_probe.prompts import load_prompts
from dspine_probe.target import Target

RESULT = RESULTS / "decode_cpu.json"
PLAIN, TRIMMED, FULL = "plain", "dspine", "dspine, full head"
SPEEDUPS = (2.0, 2.5, 3.0)


class Peer(StrEnum):
    """Whose decoding is raced beside ours."""

    TRANSFORMERS = "transformers"
    DFLASH = "dflash"
    LLAMA = "llama.cpp"
    NONE = "none"


@dataclass(frozen=True)
class Race:
    """One way over all prompts: sums, and the median of the prompts' rates."""

    tokens: int
    seconds: float
    rounds: int | None
    bookkeeping: float | None
    median_rate: float

    @classmethod
    def of(cls, runs: Sequence[Timed]) -> Race:
        """Sum up; prompts whose answer is one token say nothing about decoding."""
        runs = [run for run in runs if run.tokens > 0]
        rounds = [run.rounds for run in runs if run.rounds is not None]
        spent = [run.bookkeeping for run in runs if run.bookkeeping is not None]
        return cls(
            sum(run.tokens for run in runs),
            sum(run.seconds for run in runs),
            sum(rounds) if rounds else None,
            sum(spent) if spent else None,
            statistics.median(run.tokens / run.seconds for run in runs),
        )

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a round."""
        return None if self.rounds is None else self.tokens / self.rounds

    def length_for(self, rate: float) -> float:
        """The acceptance length at which rounds as long as these reach a rate."""
        assert self.rounds is not None
        return rate * self.seconds / self.rounds


@dataclass(frozen=True)
class Bar:
    """One number beside what it should be."""

    name: str
    value: float
    limit: float
    at_most: bool

    @property
    def holds(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit


def ours(target: Target, draft: Draft | None, engines: FastCpu, limit: int, ids: list[int]) -> Timed:
    found = generate(target, draft, ids, max_new_tokens=limit, engines=engines)
    timing = found.timing
    return Timed(len(found.tokens) - 1, timing.decoding, len(found.rounds), timing.bookkeeping)


def untrimmed(draft: DSpine, target: Target) -> DSpine:
    """The same draft with the target's whole head."""
    config = replace(draft.config, draft_vocab_size=None)
    made = DSpine(config, draft.embedding, target.head.to(draft.embedding.dtype), codes=draft.codes)
    made.load_state_dict(draft.state_dict(), strict=False)
    return made.eval()


def race(ways: Mapping[str, Way], prompts: Sequence[list[int]]) -> dict[str, Race]:
    """Every prompt by every way in turn, after one that is not counted."""
    runs: dict[str, list[Timed]] = {name: [] for name in ways}
    for way in ways.values():
        way(prompts[0])
    for number, ids in enumerate(prompts):
        for name, way in ways.items():
            runs[name].append(way(ids))
        typer.echo(f"\rprompt {number + 1} of {len(prompts)}", nl=number + 1 == len(prompts))
    return {name: Race.of(found) for name, found in runs.items()}


def predicted(parts: Parts, name: str, acceptance_length: float) -> float:
    """Speedup from the parts alone: AL · step / (context + draft + verify)."""
    return acceptance_length * parts.step / parts.drafts[name].round


def bars(parts: Parts, raced: Mapping[str, Race]) -> list[Bar]:
    spine, full = parts.drafts[TRIMMED], parts.drafts[FULL]
    plain, fast = raced[PLAIN], raced[TRIMMED]
    assert fast.bookkeeping is not None and fast.acceptance_length is not None
    speedup = fast.rate / plain.rate
    found = [
        Bar("plain step over bytes / bandwidth", parts.step / parts.limit, 1.6, True),
        Bar("8-token verify over step", spine.verify / parts.step, 1.15, True),
        Bar("draft over step, full head", full.propose / parts.step, 0.45, True),
        Bar("draft over step, trimmed head", spine.propose / parts.step, 0.30, True),
        Bar("bookkeeping, share of decoding", fast.bookkeeping / fast.seconds, 0.05, True),
        Bar(
            "measured over predicted speedup", speedup / predicted(parts, TRIMMED, fast.acceptance_length), 0.92, False
        ),
        Bar("DSpine over our plain decoding", speedup, 1.6, False),
    ]
    if "llama.cpp F16" in raced:
        found.append(Bar("DSpine over llama.cpp F16", fast.rate / raced["llama.cpp F16"].rate, 1.0, False))
    return found


def lengths_needed(raced: Mapping[str, Race]) -> dict[str, float]:
    """The acceptance lengths at which DSpine's rounds, as long as measured, reach a speedup or pass a peer."""
    fast, plain = raced[TRIMMED], raced[PLAIN].rate
    needed = {f"{times:g} × plain": fast.length_for(times * plain) for times in SPEEDUPS}
    peers = {name: fast.length_for(one.rate) for name, one in raced.items() if name.startswith("llama.cpp")}
    return needed | peers


def show(threads: int, parts: Parts, raced: Mapping[str, Race], held: Sequence[Bar]) -> str:
    """Three Markdown tables."""
    lines = [f"### {threads} thread{'s' * (threads > 1)}", ""]
    gib, bound = parts.bandwidth / 1e9, parts.limit * 1e3
    lines += [
        f"Reading: {gib:.1f} GB/s; a step reads {parts.bytes_per_step / 1e6:.0f} MB, {bound:.2f} ms at least.",
        "",
    ]
    lines += ["| way | tokens/s | median of prompts | × plain | tokens a round |", "|---|---|---|---|---|"]
    for name, one in sorted(raced.items(), key=lambda item: -item[1].rate):
        length = "" if one.acceptance_length is None else f"{one.acceptance_length:.2f}"
        times = one.rate / raced[PLAIN].rate
        lines.append(f"| {name} | {one.rate:.1f} | {one.median_rate:.1f} | {times:.2f} | {length} |")
    lines += ["", "| part, ms | context | block | head | verify | draft / step | with context |"]
    lines += ["|---|---|---|---|---|---|---|", f"| step | | | | {parts.step * 1e3:.2f} | | |"]
    for name, one in parts.drafts.items():
        times = (one.context, one.propose - one.head, one.head, one.verify)
        cells = " | ".join(f"{1e3 * seconds:.2f}" for seconds in times)
        shares = one.propose / parts.step, (one.propose + one.context) / parts.step
        lines.append(f"| {name} | {cells} | {shares[0]:.3f} | {shares[1]:.3f} |")
    lines += ["", "| bar | measured | wanted | |", "|---|---|---|---|"]
    for bar in held:
        wanted = f"{'≤' if bar.at_most else '≥'} {bar.limit:g}"
        lines.append(f"| {bar.name} | {bar.value:.3f} | {wanted} | {'holds' if bar.holds else 'MISSED'} |")
    lines += ["", "Acceptance length at which DSpine reaches: "]
    lines[-1] += ", ".join(f"{name} {length:.2f}" for name, length in lengths_needed(raced).items())
    return "\n".join(lines)


def main(
    prompts: Annotated[str, typer.Option(help="Shipped set or JSONL file.")] = "lab",
    count: Annotated[int, typer.Option(min=2, help="How many prompts.")] = 20,
    limit: Annotated[int, typer.Option(min=2, help="Most new tokens a prompt.")] = 128,
    threads: Annotated[list[int] | None, typer.Option(help="Thread counts; by default 1 and 2.")] = None,
    context: Annotated[int, typer.Option(min=8, help="Tokens cached while parts are timed.")] = 128,
    turns: Annotated[int, typer.Option(min=3, help="Times each part is run.")] = 100,
    peer: Annotated[list[Peer] | None, typer.Option(help="Only these peers; repeat. [default: all]")] = None,
    out: Annotated[Path, typer.Option(help="Where the result goes.")] = RESULT,
) -> None:
    """Measure everything and write the result."""
    peers = peer or [one for one in Peer if one is not Peer.NONE]
    target, engines = Target.load(dtype=torch.bfloat16), FastCpu(torch.bfloat16)
    drafts = {name: load_draft(name, target) for name in ("dflash", TRIMMED)}
    spine = drafts[TRIMMED]
    assert isinstance(spine, DSpine)
    drafts[FULL] = untrimmed(spine, target)
    encoded = [target.encode_chat(prompt.text) for prompt in load_prompts(prompts, limit=count)]
    result: dict[str, Any] = {
        **made(),
        "engines": engines.about,
        "settings": {"prompts": len(encoded), "max_new_tokens": limit, "dtype": str(target.dtype)},
        "peers": peers,
        "absent": absent(),
        "threads": {},
    }
    for number in threads or [1, 2]:
        torch.set_num_threads(number)
        parts = measure_parts(target, drafts, engines, context=context, turns=turns)
        ways: dict[str, Way] = {
            name: partial(ours, target, draft, engines, limit) for name, draft in {PLAIN: None, **drafts}.items()
        }
        if Peer.TRANSFORMERS in peers:
            ways |= transformers_ways(target, limit)
        if Peer.DFLASH in peers:
            ways |= dflash_ways(target, limit)
        raced = race(ways, encoded)
        if Peer.LLAMA in peers:
            # Each apart: idle workers of a server spin, and with two threads take a core from the engine that decodes.
            for alone in llama_ways(number, limit):
                raced |= race(alone, encoded)
        held = bars(parts, raced)
        typer.echo(show(number, parts, raced, held) + "\n")
        result["threads"][number] = {
            "parts": asdict(parts),
            "bytes_in_huge_pages": huge_pages(),
            "race": {name: asdict(one) | {"rate": one.rate} for name, one in raced.items()},
            "bars": [asdict(bar) | {"holds": bar.holds} for bar in held],
            "acceptance_length_for": lengths_needed(raced),
        }
        save(result, out)


if __name__ == "__main__":
    typer.run(main)
