"""The front door: a target, some drafts, and one method for each thing to ask of them.

    import dspine_probe as dp
    lab = dp.Lab()                          # the embedded target and both shipped drafts
    lab.generate("Name three rivers.")      # an answer, its tokens marked by who wrote them
    lab.corruption()                        # what a wrong predecessor costs

A `Lab` computes nothing: every method is a call on an experiment of the registry, on the decoding loop or on
`experiments.one_block`, with sizes that take about a minute on two CPU cores, and it prints them before it starts.
These sizes are for looking: intervals are wide, and `dspine-probe probe` measures with larger ones. Experiments on the
same prompts and drafts share one set of answers, so the first takes some seconds more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspine_probe.decoding.engines import engine
from dspine_probe.decoding.generate import generate
from dspine_probe.display import Shown, Told
from dspine_probe.drafts import Draft, DSpine
from dspine_probe.drafts.checkpoint import load_draft, locate
from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.request import Request
from dspine_probe.experiments.common.schema import Result
from dspine_probe.experiments.one_block import BlockPatch, DepthReading, answer_with_states, patch_block, read_depths
from dspine_probe.experiments.registry import EXPERIMENTS
from dspine_probe.precision import default_device
from dspine_probe.pretrained import EMBEDDED
from dspine_probe.prompts import Prompt, load_all_prompts
from dspine_probe.target import Target
from dspine_probe.training.features import Sequence as Answer

if TYPE_CHECKING:
    from dspine_probe.widgets.gates import GateTrace

Prompts = str | Path | Sequence[str | Prompt] | None
SHIPPED = ("dflash", "dspine")
LIMIT, LONGEST, ANCHORS = 21, 48, 4
"""Default sizes: prompts of the shipped set (three of each of its seven kinds), tokens and blocks of an answer."""


def load_target(name: str | Path = EMBEDDED) -> Target:
    """The target of that name in fp32, on a GPU where there is one; see `Target.load` for other choices.

    Raises:
        UsageError: there is no such target. ProbeError: it cannot be fetched or read.
    """
    return Target.load(name, device=default_device())


class Lab:
    """A target with drafts by name, and what was measured on them (`results`, by experiment)."""

    def __init__(self, target: Target | str | Path = EMBEDDED, *drafts: Draft | str | Path) -> None:
        """Load what is named; some seconds, and half a minute more when the embedded target is first fetched.

        Args:
            target: "embedded", a hub id, a folder, or a loaded target.
            drafts: shipped names ("dflash", "dspine"), checkpoint folders, or loaded drafts, which are called by
                their class and number; by default both shipped ones.

        Raises:
            UsageError: one of them does not exist or does not fit the target, or two have one name.
        """
        given = drafts or SHIPPED
        names = [_name(draft, place) for place, draft in enumerate(given, start=1)]
        if len(set(names)) < len(names):
            raise UsageError(f"drafts are named {', '.join(names)}; give each a folder of another name.")
        found = [draft if isinstance(draft, Draft) else locate(draft) for draft in given]  # before the target loads
        self.target = target if isinstance(target, Target) else load_target(target)
        loaded = (draft if isinstance(draft, Draft) else load_draft(draft, self.target) for draft in found)
        self.drafts: dict[str, Draft] = dict(zip(names, loaded, strict=True))
        self.results: dict[str, Result] = {}
        self._requests: dict[tuple[Any, ...], Request] = {}
        self._answers: dict[tuple[Any, ...], Answer] = {}

    def __repr__(self) -> str:
        measured = ", ".join(self.results) or "nothing yet"
        return f"Lab of {self.target.name} with {', '.join(self.drafts)}; measured: {measured}."

    # ---- one prompt

    def generate(
        self, prompt: str, *, draft: str | None = None, max_new_tokens: int = LONGEST, engine_name: str = "reference"
    ) -> Told:
        """Answer a prompt greedily, about 3 s; the text is the target's own whatever the draft.

        Args:
            draft: which one proposes; the last by default, "none" for plain decoding.
            engine_name: "auto" takes the fast engine, which prepares weights first and rounds in bf16 on a CPU.
        """
        name = None if draft == "none" else self._one(draft)
        self._say(f"generate: {name or 'plain decoding'}, at most {max_new_tokens} tokens; about 3 s")
        made = generate(
            self.target,
            None if name is None else self.drafts[name],
            self.target.encode_chat(prompt),
            max_new_tokens=max_new_tokens,
            engines=engine(engine_name, self.target.device),
        )
        return Told(made, self.target, name)

    def lens(self, prompt: str, *, at: int = 0, max_new_tokens: int = LONGEST) -> Shown[DepthReading]:
        """What every depth of every draft would write in one block of the answer, about 3 s.

        at: the token of the answer, from 0, that the block starts from.
        """
        from dspine_probe.plots.one_block import depth_lens

        self._say(f"lens: one block of {', '.join(self.drafts)}; about 3 s")
        answers = {name: self._answer(prompt, draft, max_new_tokens) for name, draft in self.drafts.items()}
        found = read_depths(self.target, {name: (self.drafts[name], answers[name]) for name in answers}, at=at)
        return Shown(found, found.findings(), {"depth_lens": depth_lens(found)})

    def patch(
        self,
        prompt: str,
        *,
        draft: str | None = None,
        at: int = 0,
        slot: int = 1,
        token: int | None = None,
        max_new_tokens: int = LONGEST,
    ) -> Shown[BlockPatch]:
        """Replace one anchor token, and see which place repairs a slot behind it, about 3 s.

        Args:
            draft: the last by default. at, slot, token: as for `experiments.one_block.patch_block`.
        """
        from dspine_probe.plots.one_block import patch_map

        name = self._one(draft)
        self._say(f"patch: one block of {name}, every slot at every depth; about 3 s")
        answer = self._answer(prompt, self.drafts[name], max_new_tokens)
        found = patch_block(self.target, name, self.drafts[name], answer, at=at, slot=slot, token=token)
        return Shown(found, found.findings(), {"patch_map": patch_map(found)})

    def gates(
        self, prompt: str | None = None, *, draft: str | None = None, round: int = 1, max_new_tokens: int = LONGEST
    ) -> Shown[GateTrace] | Shown[Result]:
        """A DSpine's gates: in one round of the answer to a prompt, about 4 s; without a prompt the gates experiment.

        The experiment describes and correlates them, and holds them shut or at their mean, without walks; a minute.

        Args:
            draft: with a prompt, which DSpine; the last by default. round: from 1.

        Raises:
            UsageError: no such draft has gates, or there is no such round.
        """
        spines = {name: one for name, one in self.drafts.items() if isinstance(one, DSpine)}
        if not spines:
            raise UsageError(f"none of {', '.join(self.drafts)} has gates; give the lab a draft of the kind dspine.")
        if prompt is None:
            return self._measure("gates", 60, None, spines, clamps=("0", "mean"), walked_per_set=0)
        from dspine_probe.widgets.gates import trace_gates

        name = draft or list(spines)[-1]
        if name not in spines:
            raise UsageError(f"the draft {name!r} has no gates; choose one of {', '.join(spines)}.")
        self._say(f"gates: one answer with {name}, at most {max_new_tokens} tokens; about 4 s")
        ids = self.target.encode_chat(prompt)
        trace = trace_gates(self.target, spines[name], ids, max_new_tokens=max_new_tokens)
        blocks = {f"layer_{layer}": trace.figure(layer, round) for layer in range(1, trace.gates.shape[1] + 1)}
        return Shown(trace, [block.alt for block in blocks.values()], blocks)

    # ---- many prompts

    def acceptance(self, prompts: Prompts = None, *, max_new_tokens: int = LONGEST) -> Shown[Result]:
        """Tokens that a round commits, exact and offline, about 40 s.

        prompts: texts, a JSONL file or a folder of them, taken whole; by default the first few shipped ones.
        """
        return self._measure("acceptance", 40, prompts, self.drafts, max_new_tokens=max_new_tokens)

    def corruption(self, prompts: Prompts = None) -> Shown[Result]:
        """What a wrong predecessor costs its successor, against a wrong token farther back, about a minute."""
        return self._measure("corruption", 60, prompts, self.drafts, fast=True)

    def injection(self, prompts: Prompts = None) -> Shown[Result]:
        """What the true predecessor is worth injected at each depth, about half a minute.

        Raises:
            NothingToMeasure: no draft of the lab has trained injectors; of the shipped ones dflash has.
        """
        return self._measure("injection-depth", 30, prompts, self.drafts, fast=True)

    def report(self, path: str | Path) -> Path:
        """Write tables, figures and one page about all experiments run so far into the folder `path`.

        About 3 s a figure where a browser draws PNGs, else some seconds; one-prompt views are no part of it.

        Returns:
            The page.

        Raises:
            UsageError: nothing was measured yet. ProbeError: the folder cannot be written to.
        """
        if not self.results:
            raise UsageError("nothing was measured yet; call acceptance(), corruption(), injection() or gates() first.")
        from dspine_probe import report
        from dspine_probe.experiments.reproduction import Reproduction

        self._say(f"report: {', '.join(self.results)}; about 3 s a figure where a browser draws PNGs")
        seconds = sum(result.seconds for result in self.results.values())
        page, notes = report.write(Reproduction(self.results, {}, seconds), Path(path))
        for note in notes:
            self._say(note)
        return page

    # ---- how

    def _measure(
        self,
        name: str,
        seconds: int,
        prompts: Prompts,
        drafts: Mapping[str, Draft],
        *,
        max_new_tokens: int = LONGEST,
        **config: Any,
    ) -> Shown[Result]:
        """Run an experiment of the registry; `seconds` is what its default sizes take, `config` its settings."""
        rows, entry = _prompts(prompts), EXPERIMENTS[name]
        cost = f"about {max(1, seconds * len(rows) // LIMIT)} s on two CPU cores"
        self._say(f"{name}: {len(rows)} prompts, answers of at most {max_new_tokens} tokens; {cost}")
        result = entry.load_run()(self._request(rows, drafts, max_new_tokens), entry.load_config()(**config))
        self.results[name] = result
        return Shown(result, result.findings(), entry.draw(result))

    def _request(self, prompts: Sequence[Prompt], drafts: Mapping[str, Draft], max_new_tokens: int) -> Request:
        """One for the same prompts, drafts and length, so that the target answers them once."""
        key = (*prompts, *drafts, max_new_tokens)
        if key not in self._requests:
            self._requests[key] = Request(self.target, drafts, prompts, max_new_tokens, ANCHORS)
        return self._requests[key]

    def _answer(self, prompt: str, draft: Draft, max_new_tokens: int) -> Answer:
        key = (prompt, tuple(draft.config.target_layer_ids), max_new_tokens)
        if key not in self._answers:
            self._answers[key] = answer_with_states(self.target, prompt, draft, max_new_tokens=max_new_tokens)
        return self._answers[key]

    def _one(self, name: str | None) -> str:
        found = name or list(self.drafts)[-1]
        if found not in self.drafts:
            raise UsageError(f"the lab has no draft {found!r}; it has {', '.join(self.drafts)}.")
        return found

    def _say(self, line: str) -> None:
        print(line, flush=True)


def _name(draft: Draft | str | Path, place: int) -> str:
    if isinstance(draft, Draft):
        return f"{type(draft).__name__.lower()}-{place}"
    return Path(draft).resolve().name


def _prompts(given: Prompts) -> list[Prompt]:
    """The prompts meant: the first shipped ones, those of a file or folder, or texts as one set."""
    if given is None:
        return load_all_prompts(["lab"], limit=LIMIT)
    if isinstance(given, str | Path):
        return load_all_prompts([given])
    if not given:
        raise UsageError("there is no prompt; give texts, or a JSONL file.")
    return [one if isinstance(one, Prompt) else Prompt(f"yours/{i}", "yours", one) for i, one in enumerate(given)]
