"""The main job: the first finding, acceptance and real decoding of the shipped drafts, from one set of answers.

The target answers the prompts once; emergence and acceptance read the same answers and states. Nothing is drawn
here: `dspine_probe.report` turns a `Reproduction` into figures and pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from dspine_probe.decoding.batch import Completion
from dspine_probe.drafts import Draft
from dspine_probe.experiments.acceptance import AcceptanceResult
from dspine_probe.experiments.emergence import EmergenceConfig, emergence
from dspine_probe.experiments.emergence_result import EmergenceResult
from dspine_probe.experiments.evaluation import TappedAnswer, accept, answer_prompts, tapped
from dspine_probe.experiments.speed import PLAIN, SpeedResult, decode_all
from dspine_probe.prompts import Prompt
from dspine_probe.target import Target

Progress = Callable[[str, int, int], None]
_SHALLOW = 2


@dataclass(frozen=True)
class ReproductionConfig:
    """Sizes of the run. Real decoding uses the first `decoded_prompts`, which take the seven kinds in turn."""

    max_new_tokens: int = 96
    batch_size: int = 32
    decoded_prompts: int = 7
    decoded_tokens: int = 64
    seed: int = 0


@dataclass(frozen=True)
class Reproduction:
    """What was measured, by experiment, and the seconds it took in all."""

    emergence: EmergenceResult
    acceptance: AcceptanceResult
    speed: SpeedResult
    seconds: float

    def save(self, folder: Path) -> None:
        """Write every experiment's table and record."""
        self.emergence.save(folder)
        self.acceptance.save(folder)
        self.speed.save(folder)

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
    config: ReproductionConfig | None = None,
    on_progress: Progress | None = None,
) -> Reproduction:
    """Measure emergence, acceptance and real decoding of `drafts` on `prompts`.

    Args:
        target: in fp32, so that offline rounds are those of real decoding.
        drafts: by name, all reading the same taps.
        prompts: held out from the drafts' training.
        config: sizes and seed.
        on_progress: called with (stage, done, total).
    """
    config = config or ReproductionConfig()
    report = on_progress or _silent
    began = time.perf_counter()
    answers = answer_prompts(
        target,
        prompts,
        max_new_tokens=config.max_new_tokens,
        batch_size=config.batch_size,
        on_progress=report,
    )
    acceptance = accept(
        target,
        drafts,
        prompts,
        answers,
        max_new_tokens=config.max_new_tokens,
        batch_size=config.batch_size,
        seed=config.seed,
        on_progress=report,
    )
    read = emergence(
        drafts,
        _sequences(target, drafts, answers, config.batch_size),
        sets=[prompt.set for prompt in prompts],
        config=EmergenceConfig(train_rows=2048, validation_rows=512, seed=config.seed),
        on_step=lambda _what, done, total: report("emergence", done, total),
    )
    speed = decode_all(
        target,
        drafts,
        prompts[: config.decoded_prompts],
        max_new_tokens=config.decoded_tokens,
        seed=config.seed,
        on_progress=report,
    )
    return Reproduction(read, acceptance, speed, time.perf_counter() - began)


def _sequences(
    target: Target, drafts: Mapping[str, Draft], answers: Sequence[Completion], batch_size: int
) -> list[TappedAnswer]:
    """Answers with their states in the order of the prompts, kept in bf16 to halve the memory."""
    first = dict(list(drafts.items())[:1])
    rows: list[TappedAnswer] = []
    for start in range(0, len(answers), batch_size):
        for _, batch in tapped(target, first, answers[start : start + batch_size]):
            rows += [TappedAnswer(r.tokens, r.prompt_length, r.taps.to(torch.bfloat16)) for r in batch]
    return rows


def _interval(found: object, digits: int = 2) -> str:
    value, low, high = (float(getattr(found, name)) for name in ("value", "low", "high"))
    return f"{value:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def _silent(_stage: str, _done: int, _total: int) -> None:
    pass
