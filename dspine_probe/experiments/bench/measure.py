"""From acceptance to tokens per second: every draft and plain decoding, on the same prompts, side by side in batches.

Batches are decoded by turns by every way, so that slow moments of the machine hit all alike. Rows that finish leave the
batch and are not replaced: the last ones of a batch decode in company that shrinks, plainly as with drafts. Beside the
decoding, each pass is timed by itself, which gives the speedup that the acceptance length promises. Nothing is
compared here: see `BenchResult`. Entry point: `bench`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dspine_probe.decoding.engine import Engines
from dspine_probe.decoding.generate import generate_batch
from dspine_probe.decoding.generation import Generation
from dspine_probe.decoding.reference import REFERENCE
from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments.bench.costs import PassCosts, pass_costs
from dspine_probe.experiments.bench.result import PLAIN, BatchRun, BenchResult
from dspine_probe.experiments.progress import Progress
from dspine_probe.prompts import Prompt
from dspine_probe.sampling import GREEDY, Sampling, generators
from dspine_probe.target import Target

_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class BenchConfig:
    """What is measured.

    max_new_tokens: most tokens of an answer.
    samplings: ways of choosing tokens.
    rows: how many prompts are decoded at once, one measurement each.
    cost_repeats: timings of every single pass.
    seed: of the tokens drawn, and of the bootstrap.
    """

    max_new_tokens: int = 128
    samplings: tuple[Sampling, ...] = (GREEDY, Sampling(1.0))
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    cost_repeats: int = 12
    seed: int = 0


def bench(
    target: Target,
    drafts: Mapping[str, Draft],
    prompts: Sequence[Prompt],
    *,
    config: BenchConfig | None = None,
    engines: Engines = REFERENCE,
    on_progress: Progress | None = None,
) -> BenchResult:
    """Decode every prompt in every way.

    Args:
        target: fp32 for answers that must agree to the token.
        drafts: by name; "plain" is taken.
        prompts: one user turn each. With several rows, only whole batches are decoded.
        config: what is measured.
        engines: what computes.
        on_progress: called with the stage, and what is done of all.

    Raises:
        UsageError: there are fewer prompts than rows at once, or a draft is named "plain".
        ProbeError: the device ran out of memory.
    """
    config = config or BenchConfig()
    if PLAIN in drafts:
        raise UsageError(f"a draft is named {PLAIN!r}, which stands for decoding without one; rename it")
    if not prompts or len(prompts) < max(config.rows):
        raise UsageError(
            f"{max(config.rows)} rows at once need as many prompts, but there are {len(prompts)}; "
            "give more prompts or fewer rows"
        )
    encoded = [target.encode_chat(prompt.text) for prompt in prompts]
    ways: dict[str, Draft | None] = {PLAIN: None, **drafts}
    batches = [batch for rows in config.rows for batch in _batches(len(prompts), rows)]
    runs: list[BatchRun] = []
    warm: set[int] = set()
    for number, batch in enumerate(batches):
        if len(batch) not in warm:
            _warm_up(target, ways, [encoded[index] for index in batch], engines, config)
            warm.add(len(batch))
        runs += _decode(target, ways, prompts, encoded, batch, engines, config)
        if on_progress is not None:
            on_progress("decoding", number + 1, len(batches))
    costs = _costs(target, drafts, statistics.median(map(len, encoded)), engines, config, on_progress)
    return BenchResult(tuple(runs), tuple(costs), _about(target, drafts, engines, config), config.seed)


def _batches(count: int, rows: int) -> Iterator[range]:
    for start in range(0, count - rows + 1, rows):
        yield range(start, start + rows)


def _decode(
    target: Target,
    ways: Mapping[str, Draft | None],
    prompts: Sequence[Prompt],
    encoded: Sequence[list[int]],
    batch: range,
    engines: Engines,
    config: BenchConfig,
) -> Iterator[BatchRun]:
    """One batch by every way, for every sampling; the same row has the same chance in all of them."""
    for sampling in config.samplings:
        plain: list[Generation] = []
        for name, draft in ways.items():
            chance = generators(config.seed, len(prompts))[batch.start : batch.stop]
            found = generate_batch(
                target,
                draft,
                [encoded[index] for index in batch],
                max_new_tokens=config.max_new_tokens,
                sampling=sampling,
                generators=None if sampling.greedy else chance,
                engines=engines,
            )
            plain = plain or found
            same = [one.tokens for one in found] == [one.tokens for one in plain] if sampling.greedy else None
            yield _run(name, sampling, [prompts[index] for index in batch], found, same)


def _run(
    draft: str, sampling: Sampling, prompts: Sequence[Prompt], found: Sequence[Generation], same: bool | None
) -> BatchRun:
    return BatchRun(
        draft=draft,
        sampling=sampling,
        sets=tuple(prompt.set for prompt in prompts),
        ids=tuple(prompt.id for prompt in prompts),
        tokens=tuple(len(one.tokens) - 1 for one in found),
        rounds=tuple(len(one.rounds) for one in found),
        timing=max((one.timing for one in found), key=lambda timing: timing.total),
        same_as_plain=same,
    )


def _warm_up(
    target: Target,
    ways: Mapping[str, Draft | None],
    prompts: Sequence[list[int]],
    engines: Engines,
    config: BenchConfig,
) -> None:
    """First calls pack, build and allocate; they are not timed."""
    for sampling in config.samplings:
        for draft in ways.values():
            generate_batch(
                target,
                draft,
                prompts,
                max_new_tokens=_WARM_UP_TOKENS,
                sampling=sampling,
                generators=None if sampling.greedy else generators(config.seed, len(prompts)),
                engines=engines,
            )


def _costs(
    target: Target,
    drafts: Mapping[str, Draft],
    prompt_length: float,
    engines: Engines,
    config: BenchConfig,
    on_progress: Progress | None,
) -> Iterator[PassCosts]:
    """Passes at half an answer's length."""
    cells = [(name, s, rows) for name in drafts for s in config.samplings for rows in config.rows]
    for number, (name, sampling, rows) in enumerate(cells):
        yield pass_costs(
            target,
            drafts[name],
            name=name,
            sampling=sampling,
            rows=rows,
            context=int(prompt_length) + config.max_new_tokens // 2,
            engines=engines,
            repeats=config.cost_repeats,
            seed=config.seed,
        )
        if on_progress is not None:
            on_progress("timing passes", number + 1, len(cells))


def _about(
    target: Target, drafts: Mapping[str, Draft], engines: Engines, config: BenchConfig
) -> dict[str, Any]:
    return {
        "target": target.name,
        "dtype": str(target.dtype),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "engines": engines.about,
        "drafts": {name: draft.config.architecture for name, draft in drafts.items()},
        **asdict(config),
    }
