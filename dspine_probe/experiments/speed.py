"""Real decoding against plain decoding: the same prompts, the same tokens, the clock.

Every prompt is answered by plain greedy decoding and with each draft, one after the other, so that slow moments of
the machine hit all alike. In fp32 all answers must agree, and the result says whether they did. This is the short
comparison of the main job; `bench` measures batches, sampling and single passes as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from dspine_probe.decoding.engine import Engines
from dspine_probe.decoding.generate import Generation, generate
from dspine_probe.decoding.reference import REFERENCE
from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments.progress import Progress
from dspine_probe.experiments.results import save_result
from dspine_probe.experiments.stats import RESAMPLES, Estimate, draw_counts, estimate, ratio_samples
from dspine_probe.prompts import Prompt
from dspine_probe.target import Target

PLAIN, NAME = "plain", "speed"


@dataclass(frozen=True)
class Decoded:
    """One answer: tokens after the first, seconds after the prefill and their parts, rounds taken."""

    draft: str
    set: str
    id: str
    tokens: int
    rounds: int
    seconds: float
    drafting: float
    verifying: float
    same_as_plain: bool


@dataclass(frozen=True)
class SpeedResult:
    """Decoding of every prompt by plain decoding and by each draft."""

    answers: tuple[Decoded, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    resamples: int = RESAMPLES

    @property
    def modes(self) -> tuple[str, ...]:
        """Plain decoding first, then the drafts."""
        return tuple(dict.fromkeys(answer.draft for answer in self.answers))

    @property
    def same_tokens(self) -> bool:
        """Whether every answer equals that of plain decoding."""
        return all(answer.same_as_plain for answer in self.answers)

    def tokens_per_second(self, mode: str) -> Estimate:
        """Tokens over seconds, all prompts together."""
        return self._ratio(mode, "tokens", mode, "seconds")

    def acceptance_length(self, mode: str) -> Estimate:
        """Tokens over rounds; 1 for plain decoding."""
        return self._ratio(mode, "tokens", mode, "rounds")

    def speedup(self, mode: str) -> Estimate:
        """Seconds of plain decoding over seconds with the draft, on the same prompts."""
        return self._ratio(PLAIN, "seconds", mode, "seconds")

    def share(self, mode: str, part: str) -> float:
        """Share of the decoding time spent in a part ("drafting" or "verifying")."""
        chosen = [answer for answer in self.answers if answer.draft == mode]
        return sum(getattr(a, part) for a in chosen) / sum(a.seconds for a in chosen)

    def to_frame(self) -> pd.DataFrame:
        """One row per mode: tokens/s, speedup and tokens per round with intervals, shares of time, sums."""
        rows = []
        for mode in self.modes:
            chosen = [answer for answer in self.answers if answer.draft == mode]
            row: dict[str, Any] = {
                "mode": mode,
                "prompts": len(chosen),
                "tokens": sum(a.tokens for a in chosen),
            }
            measures = {
                "tokens_per_second": self.tokens_per_second(mode),
                "speedup": self.speedup(mode),
                "tokens_per_round": self.acceptance_length(mode),
            }
            for name, found in measures.items():
                row |= {
                    name: float(found.value),
                    f"{name}_low": float(found.low),
                    f"{name}_high": float(found.high),
                }
            row |= {
                "drafting_share": self.share(mode, "drafting"),
                "verifying_share": self.share(mode, "verifying"),
            }
            rows.append(row | {"same_tokens": all(a.same_as_plain for a in chosen)})
        return pd.DataFrame(rows)

    def save(self, folder: str | Path) -> None:
        """Write `speed.csv` (the table) and `speed.json` (every answer, configuration, versions)."""
        record = {
            "answers": self.answers,
            "config": self.config,
            "seed": self.seed,
            "resamples": self.resamples,
        }
        save_result(folder, NAME, self.to_frame(), record)

    def _ratio(self, mode: str, numerator: str, base: str, denominator: str) -> Estimate:
        top = torch.tensor([float(getattr(a, numerator)) for a in self.answers if a.draft == mode])
        bottom = torch.tensor([float(getattr(a, denominator)) for a in self.answers if a.draft == base])
        counts = draw_counts(
            len(top), generator=torch.Generator().manual_seed(self.seed), resamples=self.resamples
        )
        value = top.double().sum() / bottom.double().sum()
        return estimate(value, ratio_samples(top, bottom, counts))


def decode_all(
    target: Target,
    drafts: Mapping[str, Draft],
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    seed: int = 0,
    engines: Engines = REFERENCE,
    on_progress: Progress | None = None,
) -> SpeedResult:
    """Decode every prompt plainly and with every draft.

    Args:
        target: fp32 for answers that must agree to the token.
        drafts: by name; "plain" is taken.
        prompts: one user turn each.
        max_new_tokens: most tokens of an answer.
        seed: of the bootstrap over prompts.
        engines: what computes; by default the readable reference, which is not fast.
        on_progress: called with "decoding", prompts done, and prompts in all.
    """
    if not prompts or PLAIN in drafts:
        raise UsageError(
            f"decoding needs at least one prompt and drafts not named {PLAIN!r}, got {list(drafts)}."
        )
    modes: dict[str, Draft | None] = {PLAIN: None, **drafts}
    _warm_up(target, modes, prompts[0], engines)
    answers = []
    for number, prompt in enumerate(prompts):
        ids = target.encode_chat(prompt.text)
        plain: tuple[int, ...] = ()
        for mode, draft in modes.items():
            found = generate(target, draft, ids, max_new_tokens=max_new_tokens, engines=engines)
            plain = found.tokens if mode == PLAIN else plain
            answers.append(_decoded(mode, prompt, found, same=found.tokens == plain))
        if on_progress is not None:
            on_progress("decoding", number + 1, len(prompts))
    config = {
        "target": target.name,
        "dtype": str(target.dtype),
        "threads": torch.get_num_threads(),
        "engines": engines.about,
        "max_new_tokens": max_new_tokens,
    }
    return SpeedResult(tuple(answers), config, seed)


def _warm_up(target: Target, modes: Mapping[str, Draft | None], prompt: Prompt, engines: Engines) -> None:
    """First calls allocate and choose kernels; they are not timed."""
    ids = target.encode_chat(prompt.text)
    for draft in modes.values():
        generate(target, draft, ids, max_new_tokens=8, engines=engines)


def _decoded(mode: str, prompt: Prompt, found: Generation, *, same: bool) -> Decoded:
    timing = found.timing
    return Decoded(
        draft=mode,
        set=prompt.set,
        id=prompt.id,
        tokens=len(found.tokens) - 1,
        rounds=len(found.rounds),
        seconds=timing.decoding,
        drafting=timing.draft + timing.head,
        verifying=timing.verify,
        same_as_plain=same,
    )
