"""Tokens per second of `generate_greedy` against `transformers.generate`: same target, prompts, batch size and limit.

Both run in this process in turn, several times. `transformers` gets its prompts sorted by length too, so that it pads
little. Only response tokens up to the stop id count. Prints the ratio and writes `benchmarks/results/generate.json`.
The bar is 3 times. Run it on an idle machine; with one thread it counts processor time instead of the clock, which is
fair on a busy one too.  python benchmarks/generate.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import torch
import typer
from recording import RESULTS, made, save

from dspine_probe.decoding.continuous import generate_greedy
from dspine_probe.prompts import load_prompts
from dspine_probe.target import Target

BAR = 3.0
RESULT = RESULTS / "generate.json"
Way = Callable[[Target, list[list[int]], int, int], int]


def ours(target: Target, prompts: list[list[int]], batch: int, limit: int) -> int:
    done = generate_greedy(target, prompts, max_new_tokens=limit, batch_size=batch)
    return sum(len(completion.response_ids) for completion in done)


def theirs(target: Target, prompts: list[list[int]], batch: int, limit: int) -> int:
    ordered = sorted(prompts, key=len)
    pad = target.stop_ids[0]
    tokens = 0
    for start in range(0, len(ordered), batch):
        part = ordered[start : start + batch]
        width = max(map(len, part))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in part])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in part])
        written = target.model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=limit,
            eos_token_id=list(target.stop_ids),
            pad_token_id=pad,
        )
        tokens += sum(_length(row, target.stop_ids) for row in written[:, width:].tolist())
    return tokens


def _length(row: Sequence[int], stop_ids: Sequence[int]) -> int:
    ends = [at + 1 for at, token in enumerate(row) if token in stop_ids]
    return ends[0] if ends else len(row)


def _measure(way: Way, *given: object) -> dict[str, float]:
    start, worked = time.perf_counter(), time.process_time()
    tokens = way(*given)  # type: ignore[arg-type]
    seconds, worked = time.perf_counter() - start, time.process_time() - worked
    return {
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "cpu_seconds": round(worked, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "tokens_per_cpu_second": round(tokens / worked, 1),
    }


def _compare(runs: dict[str, list[dict[str, float]]], key: str) -> tuple[dict[str, float], float]:
    rate = {name: statistics.median(run[key] for run in done) for name, done in runs.items()}
    return rate, rate["dspine_probe"] / rate["transformers"]


def main(
    prompts: Annotated[str, typer.Option(help="Shipped set or JSONL file.")] = "lab",
    count: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 96,
    batch: Annotated[int, typer.Option(min=1, help="Rows decoded together.")] = 48,
    limit: Annotated[int, typer.Option(min=1, help="Most new tokens a prompt.")] = 320,
    repeats: Annotated[int, typer.Option(min=1, help="Times each way is run.")] = 2,
    threads: Annotated[int, typer.Option(help="Threads of torch; 0 leaves its choice.")] = 0,
) -> None:
    """Measure both ways and write the result."""
    if threads:
        torch.set_num_threads(threads)
    target = Target.load(dtype=torch.bfloat16)
    encoded = [target.encode_chat(prompt.text) for prompt in load_prompts(prompts, limit=count)]
    runs: dict[str, list[dict[str, float]]] = {"dspine_probe": [], "transformers": []}
    ways: dict[str, Way] = {"dspine_probe": ours, "transformers": theirs}
    for way in ways.values():  # warm up
        way(target, encoded[:2], 2, 4)
    for _ in range(repeats):
        for name, way in ways.items():
            runs[name].append(_measure(way, target, encoded, batch, limit))
            typer.echo(f"{name:13} {runs[name][-1]}")
    single = torch.get_num_threads() == 1
    rate, ratio = _compare(runs, "tokens_per_cpu_second" if single else "tokens_per_second")
    settings = {"target": target.name, "prompts": len(encoded), "batch": batch, "max_new_tokens": limit}
    result = {
        **made(),
        "settings": {**settings, "dtype": str(target.dtype), "threads": torch.get_num_threads()},
        "measured_by": "processor time" if single else "clock",
        "tokens_per_second": rate,
        "ratio": round(ratio, 2),
        "bar": BAR,
        "runs": runs,
    }
    save(result, RESULT)
    verdict = "met" if ratio >= BAR else "MISSED"
    typer.echo(f"ratio {ratio:.2f} by {result['measured_by']}, bar {BAR}: {verdict}")


if __name__ == "__main__":
    typer.run(main)
