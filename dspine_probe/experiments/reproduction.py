"""The main job: every experiment of the registry that takes part, on one set of answers.

The target answers the prompts once and its states are read once; every experiment uses the same. Nothing is drawn
here: `dspine_probe.report` turns a `Reproduction` into figures and pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from dspine_probe.decoding.fast_cpu import FastCpu
from dspine_probe.decoding.generate import generate
from dspine_probe.decoding.reference import REFERENCE
from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.claims import PUBLISHED, Claim
from dspine_probe.experiments.common.progress import Progress
from dspine_probe.experiments.common.request import NothingToMeasure, Request
from dspine_probe.experiments.common.schema import MEAN, Result
from dspine_probe.experiments.common.wording import number
from dspine_probe.experiments.registry import EXPERIMENTS, Experiment
from dspine_probe.experiments.speed.table import PLAIN
from dspine_probe.prompts import Prompt

ANCHORS = 4
"""Blocks drafted on each answer."""
CHECKED = 32
"""Tokens that the fast engine and the readable loop are compared on."""
SPEED = "speed"
FEWEST_PROMPTS = 5
"""Prompts of each set: emergence tests on half of them, and two tested prompts are the least that give an interval."""


@dataclass(frozen=True)
class Reproduction:
    """What was measured, by experiment; why others were left out; and the seconds it took in all.

    engines_agree: whether the fast engine and the readable loop write the same tokens in fp32; None where not asked.
    """

    results: Mapping[str, Result]
    left_out: Mapping[str, str]
    seconds: float
    engines_agree: bool | None = None

    def save(self, folder: Path) -> None:
        """Write every experiment's table and record."""
        for result in self.results.values():
            result.save(folder)

    def findings(self) -> list[str]:
        """What each experiment says, in its own sentences."""
        return [sentence for result in self.results.values() for sentence in result.findings()]

    def claims(self) -> list[tuple[str, Claim]]:
        """Published claims that were measured, in the ledger's order, each with its experiment's name."""
        order = [published.id for published in PUBLISHED]
        found = [(name, claim) for name, result in self.results.items() for claim in result.claims()]
        return sorted(found, key=lambda pair: order.index(pair[1].id))

    def summary(self) -> pd.DataFrame:
        """One row for plain decoding and for each draft: speedup, tokens per second, tokens per round."""
        speed, acceptance = self.results["speed"], self.results["acceptance"]
        cells: dict[str, tuple[Result, dict[str, Any], int]] = {
            "times plain": (speed, {"metric": "speedup", "set": "all"}, 2),
            "tokens/s": (speed, {"metric": "tokens_per_second", "set": "all"}, 1),
            "tokens per round": (acceptance, {"metric": "al", "set": MEAN}, 2),
        }
        rows = []
        for method in dict.fromkeys(speed.table["draft"]):
            row = {"": method}
            for title, (result, wanted, digits) in cells.items():
                found = result.select(draft=method, **wanted)
                own = method == PLAIN and title != "tokens/s"  # plain decoding is the unit
                row[title] = "1" if own else number(found.iloc[0], digits)
            rows.append(row)
        return pd.DataFrame(rows)


def refuse_few(prompts: Sequence[Prompt]) -> None:
    """Refuse sets with too few prompts for an interval, before any work.

    Raises:
        UsageError: naming the set and how many prompts would do.
    """
    sets = list(dict.fromkeys(prompt.set for prompt in prompts))
    for name in sets:
        count = sum(prompt.set == name for prompt in prompts)
        if count < FEWEST_PROMPTS:
            raise UsageError(
                f"the set {name!r} has {count} of the {len(prompts)} prompts and an interval needs {FEWEST_PROMPTS}; "
                f"take more, such as --limit {FEWEST_PROMPTS * max(len(sets), 7)}, or all of them."
            )


def reproduce(request: Request, on_speed: Callable[[Reproduction], None] | None = None) -> Reproduction:
    """Run every experiment that takes part, speed first, which needs no answers and is what a newcomer asks.

    Args:
        request: target, drafts and prompts; its `on_progress` is called with ("3 of 6: emergence", done, total).
        on_speed: called with what there is once speed was measured.

    Raises:
        UsageError: there are too few prompts in a set.
    """
    refuse_few(request.prompts)
    began = time.perf_counter()
    taking_part = {name: one for name, one in EXPERIMENTS.items() if one.reproduced is not None}
    stages = _Stages(request.on_progress, len(taking_part) + 1)
    request = replace(request, on_progress=stages)
    found = Reproduction({}, {}, 0.0)
    for name in sorted(taking_part, key=lambda name: name != SPEED):
        if name != SPEED and stages.number <= 1:
            stages.start("answers")
            _ = request.arena
        found = _measured(found, taking_part[name], request, stages)
        if name == SPEED and SPEED in found.results:
            found = replace(found, engines_agree=engines_agree(request))
            if on_speed is not None:
                on_speed(found)
    return replace(found, seconds=time.perf_counter() - began)


def _measured(found: Reproduction, experiment: Experiment, request: Request, stages: _Stages) -> Reproduction:
    """What was found, with one experiment more."""
    stages.start(experiment.name)
    config = replace(experiment.load_config()(**experiment.reproduced or {}), seed=request.seed)
    try:
        result = experiment.load_run()(request, config)
    except NothingToMeasure as reason:
        return replace(found, left_out={**found.left_out, experiment.name: str(reason)})
    return replace(found, results={**found.results, experiment.name: result})


def engines_agree(request: Request) -> bool | None:
    """Whether the fast engine and the readable loop answer the first prompt alike in fp32, plainly and with each draft.

    Speed is measured on the fast engine; this is its check. None where the fast engine does not run.
    """
    target = request.target
    if target.device.type != "cpu" or target.dtype != torch.float32:
        return None
    ids, engines = target.encode_chat(request.prompts[0].text), (FastCpu(torch.float32), REFERENCE)
    return all(
        len({generate(target, draft, ids, max_new_tokens=CHECKED, engines=one).tokens for one in engines}) == 1
        for draft in (None, *request.drafts.values())
    )


class _Stages:
    """Progress under the name of the stage that is on, and its number of all."""

    def __init__(self, on_progress: Progress, total: int) -> None:
        self.on_progress, self.total, self.number, self.name = on_progress, total, 0, ""

    def start(self, name: str) -> None:
        self.number, self.name = self.number + 1, name

    def __call__(self, what: str, done: int, total: int) -> None:
        part = "" if what == self.name else f", {what}"
        self.on_progress(f"{self.number} of {self.total}: {self.name}{part}", done, total)
