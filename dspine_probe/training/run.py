"""A training run from corpora to a checkpoint, as the command line performs it.

`collect` joins packed corpora (`features.build_features` computes the target's states for them), `train_draft` makes a
draft of a kind, warm-starts it, trains it and writes the checkpoint with its card.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from dspine_probe import __version__
from dspine_probe.drafts import Draft
from dspine_probe.drafts.checkpoint import load_draft, locate, save_draft, weights_digest
from dspine_probe.drafts.registry import kind_named
from dspine_probe.errors import UsageError
from dspine_probe.files import write_atomically
from dspine_probe.target import Target
from dspine_probe.training.corpus import Corpus, Example
from dspine_probe.training.features import FeatureStore
from dspine_probe.training.intermediate import NONE, Intermediate, Supervision
from dspine_probe.training.objectives.base import objective_for
from dspine_probe.training.optimization import TrainConfig
from dspine_probe.training.recipes import frequent_tokens, new_draft
from dspine_probe.training.state import STATE, kept_state
from dspine_probe.training.trainer import StepReport, train
from dspine_probe.training.validation import Validation, split, validate
from dspine_probe.training.warmstart import warm_start

PLAN = "plan.json"
DECAY_SHARE = 0.2
"""Share of a budget over which a run under the schedule wsd decays."""
_WARM_SAMPLE = 8
_QUICK_CHECK = 48  # held-out sequences tried while training; the card uses all of them


@dataclass(frozen=True)
class DraftPlan:
    """What to make: kind, depth, width of the block, and how many frequent tokens it may propose (None: all).

    With `init`, a shipped draft's name or a checkpoint folder, training goes on from there, and the checkpoint's own
    geometry holds in place of the plan's.
    """

    kind: str
    layers: int = 5
    block_size: int = 8
    draft_vocab: int | None = 8192
    warm: bool = True
    mask_token_id: int | None = None
    causal: bool = False
    supervision: Supervision = Supervision()
    init: str | None = None

    def settings(self) -> dict[str, Any]:
        """Every choice, flat."""
        own = asdict(self)
        return own | {f"supervision_{name}": value for name, value in own.pop("supervision").items()}


@dataclass(frozen=True)
class Reports:
    """Callbacks of a run: for every logged step, and for every validation."""

    on_log: Callable[[StepReport], None] | None = None
    on_validation: Callable[[int, Validation], None] | None = None


def collect(folders: Sequence[Path], prompts: Mapping[str, Sequence[int]] | None = None) -> list[Example]:
    """Examples of all corpora; `prompts` supplies the token ids that a corpus was saved without."""
    examples = [example for folder in folders for example in Corpus.load(folder, prompts).examples]
    if len({example.id for example in examples}) < len(examples):
        raise UsageError(f"{', '.join(map(str, folders))} share prompt ids; give each corpus once.")
    return examples


@torch.inference_mode(False)
def train_draft(
    plan: DraftPlan,
    target: Target,
    store: FeatureStore,
    config: TrainConfig,
    work: Path,
    output: Path,
    *,
    reports: Reports = Reports(),
    decay_from: Path | None = None,
) -> Draft:
    """Train a new draft on `store`, or resume the run in `work`, and write its checkpoint to `output`.

    With `decay_from`, the folder of a stable run or one of its states, the last fifth of the budget decays from there.
    """
    origin, plan = None, replace(plan, layers=kind_named(plan.kind).layers or plan.layers)
    if decay_from is not None:
        begin = round(config.blocks * (1 - DECAY_SHARE))
        config = replace(config, decay_from=begin)
        origin = None if (work / STATE).exists() else kept_state(decay_from, begin)
    process = PartialState(cpu=target.device.type == "cpu")
    train_on, held_out = split(store.meta.ids)
    if plan.init is None:
        draft = start_draft(plan, target, store, train_on, config.seed)
    else:
        plan, draft = _continue(plan, target, store)
    settings = plan.settings() | {"precision": config.precision.used}
    for run in (work, origin.parent) if origin is not None else (work,):
        _check_plan(settings, run)
    if process.is_main_process:
        work.mkdir(parents=True, exist_ok=True)
        write_atomically(work / PLAN, lambda to: to.write_text(json.dumps(settings, indent=2) + "\n"))
    objective = objective_for(draft, _intermediate(plan, target))
    began = time.monotonic()
    state = train(
        draft,
        store,
        config,
        work,
        indices=train_on,
        held_out=held_out[:_QUICK_CHECK],
        objective=objective,
        on_log=reports.on_log,
        on_validation=reports.on_validation,
        origin=origin,
    )
    if process.is_main_process:
        final = validate(draft, store, held_out, precision=config.precision)
        rates = ", ".join(f"{rate:g} from step {step}" for step, rate in state.rates)
        settings = settings | asdict(config) | {"lr": rates if len(state.rates) > 1 else config.lr}
        draft.training_record = settings | {"features": store.fingerprint}
        save_draft(draft, output, card=_card(settings, target, store, final, time.monotonic() - began))
    process.wait_for_everyone()
    return draft


def start_draft(plan: DraftPlan, target: Target, store: FeatureStore, train_on: list[int], seed: int) -> Draft:
    """An untrained draft; what is random in it depends on the seed alone."""
    vocabulary = None
    if plan.draft_vocab is not None:
        responses = (s.tokens[s.prompt_length :].tolist() for s in (store[i] for i in train_on))
        vocabulary = frequent_tokens(responses, plan.draft_vocab, target.vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = new_draft(
            plan.kind,
            target,
            layers=plan.layers,
            block_size=plan.block_size,
            mask_token_id=plan.mask_token_id,
            taps=store.meta.taps,
            vocabulary=None if vocabulary is None else vocabulary.to(target.device),
            causal=plan.causal or None,
        ).to(target.device)
    if plan.warm:
        rows = [store[i].tokens for i in train_on[:_WARM_SAMPLE]]
        length = min(len(row) for row in rows)
        warm_start(draft, target, torch.stack([row[:length] for row in rows]).to(target.device))
    return draft


def _continue(plan: DraftPlan, target: Target, store: FeatureStore) -> tuple[DraftPlan, Draft]:
    """The checkpoint that the plan begins with, and the plan with what is really being made."""
    assert plan.init is not None
    draft = load_draft(plan.init, target, dtype=torch.float32)
    config = draft.config
    if draft.kind.name != plan.kind:
        raise UsageError(f"{plan.init} holds a {config.architecture}, not a {plan.kind}; name its own kind.")
    if config.target_layer_ids != store.meta.taps:
        raise UsageError(
            f"{plan.init} reads taps {list(config.target_layer_ids)} but the features hold {list(store.meta.taps)}; "
            "build features with its taps."
        )
    made = replace(
        plan,
        layers=config.num_hidden_layers,
        block_size=config.block_size,
        draft_vocab=config.draft_vocab_size,
        warm=False,
        mask_token_id=config.mask_token_id,
        causal=config.is_causal,
        init=f"{Path(plan.init).name}, sha256 of the weights {weights_digest(locate(plan.init))[:16]}",
    )
    return made, draft


def _intermediate(plan: DraftPlan, target: Target) -> Intermediate | None:
    if plan.supervision.arm == NONE:
        return None
    return Intermediate(plan.supervision, target.head, plan.layers).to(target.device)


def _check_plan(now: Mapping[str, Any], run: Path) -> None:
    """Refuse to continue a run with another plan than its own."""
    before = json.loads((run / PLAN).read_text()) if (run / PLAN).exists() else {}
    changed = [name for name, value in now.items() if before.get(name, value) != value]
    if changed:
        raise UsageError(f"{run} was begun with another plan ({', '.join(changed)}); choose another output folder.")


def _card(settings: Mapping[str, Any], target: Target, store: FeatureStore, final: Validation, seconds: float) -> str:
    responses = store.meta.tokens - sum(store.meta.prompt_lengths)
    survival = " ".join(f"{share:.3f}" for share in final.survival)
    table = "\n".join(f"| {name} | {value} |" for name, value in settings.items())
    return f"""# {settings["kind"]} for {target.name}

A block-parallel draft for speculative decoding, trained by dspine_probe {__version__} on the target's own greedy
answers: {len(store):,} sequences, {responses:,} response tokens, taps {list(store.meta.taps)}. The last call of the
training loop took {seconds / 60:.0f} minutes on {target.device.type}.

Held-out sequences, {final.anchors:,} evenly spaced anchors: {final.tokens_per_anchor:.3f} tokens per anchor; survival
by slot {survival}. (Acceptance lengths by set: `dspine-probe evaluate`.)

| setting | value |
|---|---|
{table}
"""
