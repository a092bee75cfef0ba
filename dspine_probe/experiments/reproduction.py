"""The main job: the findings, acceptance and real decoding of the shipped drafts, from one set of answers.

The target answers the prompts once and its states are read once; every experiment uses the same. Corruption and
injection are measured in their fast forms. Nothing is drawn here: `dspine_probe.report` turns a `Reproduction` into
figures and pages.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from dspine_probe.drafts import Draft
from dspine_probe.experiments.acceptance import AcceptanceResult
from dspine_probe.experiments.arena_building import choose_blocks, read_states
from dspine_probe.experiments.corruption.config import CorruptionConfig
from dspine_probe.experiments.corruption.measure import corruption
from dspine_probe.experiments.corruption.result import CorruptionResult
from dspine_probe.experiments.emergence import EmergenceConfig, emergence
from dspine_probe.experiments.emergence.result import EmergenceResult
from dspine_probe.experiments.evaluation import accept, answer_prompts
from dspine_probe.experiments.injection_depth.measure import InjectionConfig, injection_depth
from dspine_probe.experiments.injection_depth.result import InjectionDepthResult
from dspine_probe.experiments.injection_depth.store import InjectorSet
from dspine_probe.experiments.progress import Progress, silent
from dspine_probe.experiments.speed import PLAIN, SpeedResult, decode_all
from dspine_probe.prompts import Prompt
from dspine_probe.target import Target

_SHALLOW = 2


@dataclass(frozen=True)
class ReproductionConfig:
    """Sizes of the run. Real decoding uses the first `decoded_prompts`, which take the seven kinds in turn."""

    max_new_tokens: int = 96
    batch_size: int = 32
    decoded_prompts: int = 7
    decoded_tokens: int = 64
    blocks_per_answer: int = 4
    seed: int = 0


@dataclass(frozen=True)
class Reproduction:
    """What was measured, by experiment, and the seconds it took in all; no injection where there were no injectors."""

    emergence: EmergenceResult
    corruption: CorruptionResult
    injection: InjectionDepthResult | None
    acceptance: AcceptanceResult
    speed: SpeedResult
    seconds: float

    def save(self, folder: Path) -> None:
        """Write every experiment's table and record."""
        self.emergence.save(folder)
        self.corruption.save(folder)
        if self.injection is not None:
            self.injection.save(folder)
        self.acceptance.save(folder)
        self.speed.save(folder)

    def findings(self) -> list[str]:
        """What each experiment says, in its own sentences."""
        injected = [] if self.injection is None else self.injection.findings()
        return [*self.emergence.findings(), *self.corruption.findings(), *injected]

    def summary(self) -> pd.DataFrame:
        """One row for plain decoding and each draft: AL, tokens per second, speedup, readability after layer 2."""
        rows = []
        for mode in self.speed.modes:
            row = {"": mode, "AL": "1", "tokens/s": _interval(self.speed.tokens_per_second(mode), digits=1)}
            row |= {"speedup": "1", "read": "–"}
            if mode != PLAIN:
                shallow = self.emergence.grid(mode).loc[_SHALLOW]
                ends = [100 * shallow[slot] for slot in (1, 2, shallow.index[-1])]
                row["AL"] = _interval(self.acceptance.acceptance_length(mode))
                row["speedup"] = _interval(self.speed.speedup(mode))
                row["read"] = " / ".join(f"{share:.1f}" for share in ends) + " %"
            rows.append(row)
        return pd.DataFrame(rows).rename(columns={"read": f"slots 1 / 2 / T read at depth {_SHALLOW}"})


def reproduce(
    target: Target,
    drafts: Mapping[str, Draft],
    prompts: Sequence[Prompt],
    *,
    injectors: Mapping[str, InjectorSet] | None = None,
    config: ReproductionConfig | None = None,
    on_progress: Progress | None = None,
) -> Reproduction:
    """Measure emergence, corruption, injection depth, acceptance and real decoding of `drafts` on `prompts`.

    Args:
        target: in fp32, so that offline rounds are those of real decoding.
        drafts: by name, all reading the same taps.
        prompts: held out from the drafts' training, two or more of each set.
        injectors: trained injectors of some of the drafts, by their names.
        config: sizes and seed.
        on_progress: called with (stage, done, total).
    """
    config = config or ReproductionConfig()
    report = on_progress or silent
    began = time.perf_counter()
    answers = answer_prompts(
        target,
        prompts,
        max_new_tokens=config.max_new_tokens,
        batch_size=config.batch_size,
        on_progress=report,
    )
    taps = next(iter(drafts.values())).config.target_layer_ids
    states = read_states(target, prompts, answers, taps, batch_size=config.batch_size, on_progress=report)
    acceptance = accept(
        target,
        drafts,
        prompts,
        answers,
        max_new_tokens=config.max_new_tokens,
        batch_size=config.batch_size,
        seed=config.seed,
        states=states,
        on_progress=report,
    )
    read = emergence(
        drafts,
        states,
        sets=[prompt.set for prompt in prompts],
        config=EmergenceConfig(train_rows=2048, validation_rows=512, seed=config.seed),
        on_step=lambda _what, done, total: report("emergence", done, total),
    )
    arena = choose_blocks(
        states,
        prompts,
        slots=next(iter(drafts.values())).config.num_slots,
        per_answer=config.blocks_per_answer,
        seed=config.seed,
        about={"target": target.name, "taps": list(taps), "max_new_tokens": config.max_new_tokens},
    )
    corrupted = corruption(
        drafts,
        target,
        arena,
        config=replace(CorruptionConfig.fast(), seed=config.seed),
        on_step=lambda _what, done, total: report("corruption", done, total),
    )
    injected = None
    if injectors:
        injected = injection_depth(
            {name: drafts[name] for name in injectors},
            injectors,
            target,
            arena,
            config=InjectionConfig(fast=True, shares=(), seed=config.seed),
            on_progress=lambda _name, done, total: report("injection", done, total),
        )
    speed = decode_all(
        target,
        drafts,
        prompts[: config.decoded_prompts],
        max_new_tokens=config.decoded_tokens,
        seed=config.seed,
        on_progress=report,
    )
    return Reproduction(read, corrupted, injected, acceptance, speed, time.perf_counter() - began)


def _interval(found: object, digits: int = 2) -> str:
    value, low, high = (float(getattr(found, name)) for name in ("value", "low", "high"))
    return f"{value:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"
