"""What an experiment is asked to measure on, and how its settings become options of a command.

A `Request` holds a target, drafts and prompts; the target's answers, its states and the arena are made when first asked
for, and once. The registry's `run` functions take a request and the experiment's config. `option` makes a field of a
config that is also an option of the command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspine_probe.decoding.continuous import Completion
from dspine_probe.drafts import Backbone, Draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.answers import answer_prompts, read_states
from dspine_probe.experiments.common.arena import Arena, arena_key, build_arena, kept_arena, refuse_lonely
from dspine_probe.experiments.common.progress import Progress, silent
from dspine_probe.prompts import Prompt
from dspine_probe.target import Target
from dspine_probe.training.features import Sequence as Answer

if TYPE_CHECKING:
    from dspine_probe.precision import Precision


class NothingToMeasure(UsageError):
    """This request holds nothing the experiment speaks about, such as a draft with gates."""


def option(default: Any, help: str, *, min: int | None = None) -> Any:
    """A dataclass field that the experiment's command offers as `--field-name`, with this help text."""
    return field(default=default, metadata={"help": help, "min": min})


@dataclass(frozen=True)
class Request:
    """Target, drafts and prompts, with what is made from them.

    target: in fp32, so that states do not depend on batching.
    drafts: by name; those that share an arena read the same taps and have the same number of slots.
    prompts: held out from the training of every draft, two or more of each set.
    anchors: most blocks drafted on an answer. folder: where the arena is kept, if anywhere.
    precision: of what may be computed in bf16; None lets each experiment choose.
    """

    target: Target
    drafts: Mapping[str, Draft]
    prompts: Sequence[Prompt]
    max_new_tokens: int = 96
    anchors: int = 8
    batch_size: int = 32
    seed: int = 0
    folder: Path | None = None
    precision: Precision | None = None
    on_progress: Progress = silent

    @cached_property
    def answers(self) -> list[Completion]:
        """The target's greedy answers, in the order of the prompts."""
        return answer_prompts(
            self.target,
            self.prompts,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
            on_progress=self.on_progress,
        )

    @cached_property
    def states(self) -> list[Answer]:
        """Every answer with the states that the first draft reads."""
        return read_states(
            self.target,
            self.prompts,
            self.answers,
            self._first.config.target_layer_ids,
            batch_size=self.batch_size,
            on_progress=self.on_progress,
        )

    @cached_property
    def arena(self) -> Arena:
        """The arena for the drafts of this request."""
        return self.arena_for(self._first)

    def arena_for(self, draft: Draft) -> Arena:
        """The arena for a draft, and for all with its taps and slots; read from `folder` if it is kept there."""
        for name, one in {**self.drafts, draft.kind.name: draft}.items():
            if not isinstance(one, Backbone):
                raise UsageError(
                    f"draft {name!r} drafts token by token and has no blocks to probe; give parallel drafts, or "
                    "measure it with `evaluate`."
                )
            if one.shifted:
                raise UsageError(
                    f"the slots of draft {name!r} hold the token after their own place, which no probing experiment "
                    "reads; give drafts with unshifted slots, or measure it with `evaluate`."
                )
        taps = draft.config.target_layer_ids
        sizes: dict[str, Any] = {
            "taps": taps,
            "slots": draft.config.num_slots,
            "per_answer": self.anchors,
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
        }

        def build() -> Arena:
            refuse_lonely(self.prompts)  # before the target answers them
            shared = self.drafts and self._first.config.target_layer_ids == taps
            return build_arena(
                self.target,
                self.prompts,
                **sizes,
                batch_size=self.batch_size,
                answers=self.answers,
                states=self.states if shared else None,
                on_progress=self.on_progress,
            )

        return kept_arena(self.folder, arena_key(self.target, self.prompts, **sizes), build)

    @property
    def _first(self) -> Draft:
        if not self.drafts:
            raise UsageError("there is no draft to measure; give at least one.")
        return next(iter(self.drafts.values()))
