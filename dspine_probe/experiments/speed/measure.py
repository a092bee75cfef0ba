"""From acceptance to tokens per second: every draft and plain decoding, on the same prompts, side by side in batches.

Every batch is decoded by all methods before the next one, so that slow moments of the machine affect all alike. Rows
that finish leave the batch and are not replaced: the last ones of a batch decode in company that shrinks, plainly as
with drafts. Beside the decoding, each pass is timed by itself, which gives the speedup that the acceptance length
promises. Entry point: `speed`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dspine_probe.decoding.engine import Engines
from dspine_probe.decoding.engines import AUTO, ENGINES, engine
from dspine_probe.decoding.generate import generate_batch
from dspine_probe.decoding.generation import Generation
from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.records import draft_record, plain
from dspine_probe.experiments.common.request import Request, option
from dspine_probe.experiments.speed.costs import PassCosts, pass_costs
from dspine_probe.experiments.speed.result import SpeedResult
from dspine_probe.experiments.speed.table import PLAIN, BatchRun, tabulate
from dspine_probe.prompts import encode_prompt
from dspine_probe.sampling import Sampling, generators

_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class SpeedConfig:
    """What is measured.

    cost_repeats: timings of every single pass; 0 for none, and no prediction.
    prompts, max_new_tokens: decode only the first prompts of the request, and shorter answers; None: as it says.
    seed: of the tokens drawn, and of the bootstrap.
    """

    rows: tuple[int, ...] = option((1, 4, 16), "Prompts decoded at once; repeat.", min=1)
    temperature: tuple[float, ...] = option((0.0, 1.0), "0 is greedy; repeat.")
    engine: str = option(AUTO, f"{AUTO} (the fast one for the device), {', '.join(ENGINES)}.")
    cost_repeats: int = 12
    prompts: int | None = None
    max_new_tokens: int | None = None
    seed: int = 0


def speed(request: Request, config: SpeedConfig = SpeedConfig()) -> SpeedResult:
    """Decode every prompt of a request plainly and with each of its drafts, and time their passes.

    Args:
        request: its target in fp32 for answers that must agree to the token; "plain" is no name for a draft. With
            several rows at once, only whole batches are decoded.

    Raises:
        UsageError: there are fewer prompts than rows at once, a draft is named "plain", or the engine is unknown.
        ProbeError: the device ran out of memory.
    """
    target, prompts = request.target, request.prompts[: config.prompts]
    if PLAIN in request.drafts:
        raise UsageError(f"a draft is named {PLAIN!r}, which stands for decoding without one; rename it")
    if not prompts or len(prompts) < max(config.rows):
        raise UsageError(
            f"{max(config.rows)} rows at once need as many prompts, but there are {len(prompts)}; "
            "give more prompts or fewer rows"
        )
    precision = request.precision
    packed = None if precision is None or precision.asked == "auto" else precision.dtype
    started, engines = time.perf_counter(), engine(config.engine, target.device, packed)
    longest = config.max_new_tokens or request.max_new_tokens
    encoded = [encode_prompt(target.encode_chat, prompt) for prompt in prompts]
    starts = [(rows, start) for rows in config.rows for start in range(0, len(prompts) - rows + 1, rows)]
    runs: list[BatchRun] = []
    warm: set[int] = set()
    for number, (rows, start) in enumerate(starts):
        batch = range(start, start + rows)
        if rows not in warm:
            # First calls pack, build and allocate; they are not timed.
            list(_decode(request, encoded, batch, engines, config, _WARM_UP_TOKENS))
            warm.add(rows)
        for sampling, name, found, same in _decode(request, encoded, batch, engines, config, longest):
            runs.append(
                BatchRun(
                    draft=name,
                    sampling=sampling,
                    sets=tuple(prompts[index].set for index in batch),
                    ids=tuple(prompts[index].id for index in batch),
                    tokens=tuple(len(one.tokens) - 1 for one in found),
                    rounds=tuple(len(one.rounds) for one in found),
                    timing=max((one.timing for one in found), key=lambda timing: timing.total),
                    same_as_plain=same,
                )
            )
        request.on_progress("decoding", number + 1, len(starts))
    context = int(statistics.median(map(len, encoded))) + longest // 2
    costs = list(_costs(request, context, engines, config)) if config.cost_repeats else []
    about = {
        "target": target.name,
        "dtype": str(target.dtype),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "engines": engines.about,
    }
    return SpeedResult(
        table=tabulate(runs, costs, seed=config.seed),
        config=about | plain(config) | {"prompts": len(prompts), "max_new_tokens": longest},
        drafts={name: draft_record(draft) for name, draft in request.drafts.items()},
        data={"runs": plain(runs), "costs": plain(costs)},
        seconds=time.perf_counter() - started,
    )


def _decode(
    request: Request,
    encoded: Sequence[list[int]],
    batch: range,
    engines: Engines,
    config: SpeedConfig,
    max_new_tokens: int,
) -> Iterator[tuple[Sampling, str, list[Generation], bool | None]]:
    """One batch by every method, for every sampling, and whether greedy answers are plain decoding's.

    The same row gets the same random numbers from all methods.
    """
    for sampling in map(Sampling, config.temperature):
        plain_answers: list[Generation] = []
        for name, draft in {PLAIN: None, **request.drafts}.items():
            drawn = generators(config.seed, len(encoded))[batch.start : batch.stop]
            found = generate_batch(
                request.target,
                draft,
                [encoded[index] for index in batch],
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                generators=None if sampling.greedy else drawn,
                engines=engines,
            )
            plain_answers = plain_answers or found
            same = [one.tokens for one in found] == [one.tokens for one in plain_answers]
            yield sampling, name, found, same if sampling.greedy else None


def _costs(request: Request, context: int, engines: Engines, config: SpeedConfig) -> Iterator[PassCosts]:
    """Passes at half an answer's length."""
    samplings = [Sampling(one) for one in config.temperature]
    cells = [(name, one, rows) for name in request.drafts for one in samplings for rows in config.rows]
    for number, (name, sampling, rows) in enumerate(cells):
        yield pass_costs(
            request.target,
            request.drafts[name],
            name=name,
            sampling=sampling,
            rows=rows,
            context=context,
            engines=engines,
            repeats=config.cost_repeats,
            seed=config.seed,
        )
        request.on_progress("timing passes", number + 1, len(cells))
