"""What looking costs: capture of residual streams against a plain forward, and a patch sweep against the naive loop.

All ways run interleaved in one process on the same random weights at the geometry of the embedded target and its
drafts; ratios are of medians. Target: transformers' forward, torch forward hooks, `Target.hidden_states`, and
TransformerLens's bridge around a copy. Draft: the draft itself, torch forward hooks, `HookedDraft`. Sweep: 100 sites
(stream, attention, MLP and injection outputs by slot), each a full hooked forward, or one after another on a shared
context, or all in `sweep`; results are compared before anything is timed. Writes `results/probing_<part>.json`; the
naive loop makes the sweep last some minutes.

    python benchmarks/probing.py [--threads N] [--rounds N] [--parts capture sweep]
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from recording import RESULTS, made, save
from torch import Tensor, nn
from train_step import make_draft
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformers import LlamaConfig, LlamaForCausalLM

from dspine_probe.drafts import Draft, DSpine
from dspine_probe.experiments.patching import (
    Blocks,
    Site,
    places,
    residual_names,
    residual_sites,
    sweep,
    sweep_one_by_one,
)
from dspine_probe.hooks import HookedDraft
from dspine_probe.target import Target

CONTEXT, SITES = 200, 100
GENERATOR = torch.Generator().manual_seed(0)
Ways = Mapping[str, Callable[[], object]]


def timed(ways: Ways, rounds: int) -> dict[str, float]:
    """Median seconds of every way, interleaved, after one round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - began)
    return {name: median(took) for name, took in times.items()}


def over(times: Mapping[str, float], base: str) -> dict[str, float]:
    """Times as multiples of one of them, which stays in milliseconds."""
    ratios = {name: round(took / times[base], 3) for name, took in times.items() if name != base}
    return {f"{base}, ms": round(1000 * times[base], 2)} | ratios


# ---- capture


def make_target() -> Target:
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=2048, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return Target.from_model(LlamaForCausalLM(config).eval(), name="random", stop_ids=(2,))


def torch_hooks(modules: list[nn.Module], run: Callable[[], object]) -> Callable[[], list[Tensor]]:
    """`run` under plain forward hooks that keep a copy of what each module gives."""

    def captured() -> list[Tensor]:
        kept: list[Tensor] = []

        def keep(_module: nn.Module, _inputs: object, output: Any) -> None:
            kept.append((output if isinstance(output, Tensor) else output[0]).detach().clone())

        handles = [module.register_forward_hook(keep) for module in modules]
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
        return kept

    return captured


def target_ways(target: Target, rows: int) -> Ways:
    """The stream after every layer but the last, which transformers gives normed only; no logits anywhere."""
    layers = range(target.num_layers - 1)
    ids = torch.randint(3, 49152, (rows, CONTEXT), generator=GENERATOR)
    bridge = build_bridge_from_module(copy.deepcopy(target.model), "LlamaForCausalLM", hf_config=target.model.config)
    names = [f"blocks.{layer}.hook_resid_post" for layer in layers]
    decoder = target.model.base_model

    def plain() -> object:
        return decoder(input_ids=ids, use_cache=False)

    return {
        "plain forward": plain,
        "torch hooks": torch_hooks([decoder.layers[layer] for layer in layers], plain),
        "Target.hidden_states": lambda: target.hidden_states(ids, layers),
        "bridge": lambda: bridge.run_with_cache(ids, names_filter=names, return_type=None, stop_at_layer=layers.stop),
    }


def draft_ways(kind: str, batch: int, anchors: int) -> Ways:
    """Residual streams at depths 0…L, and every hook point, of one full pass."""
    draft, inputs = make_draft(kind).float().eval(), make_inputs(batch, anchors)
    hooked = HookedDraft(copy.deepcopy(draft))
    names = residual_names(hooked.draft)
    modules = [draft.get_submodule(name) for name in names]
    return {
        "plain forward": lambda: draft(*inputs),
        "torch hooks": torch_hooks(modules, lambda: draft(*inputs)),
        "HookedDraft, idle": lambda: hooked(*inputs),
        "HookedDraft, residual streams": lambda: hooked.run_with_cache(*inputs, names_filter=names),
        "HookedDraft, every hook point": lambda: hooked.run_with_cache(*inputs),
    }


def make_inputs(batch: int, anchors: int) -> tuple[Tensor, Tensor, Tensor]:
    taps = torch.randn(batch, CONTEXT, 5 * 576, generator=GENERATOR)
    tokens = torch.randint(0, 8192, (batch, anchors), generator=GENERATOR)
    places_ = torch.randint(CONTEXT // 2, CONTEXT, (batch, anchors), generator=GENERATOR)
    return taps, tokens, places_


# ---- sweep


def make_sites(draft: Draft) -> list[Site]:
    """100 sites spread evenly over the streams and the outputs of attention, MLP and injection."""
    outputs = ("hook_attn_out", "hook_mlp_out", "inject.hook_out")
    added = [
        Site(name, slot)
        for name in places(draft)
        if name.endswith(outputs)
        for slot in range(int(name.endswith("inject.hook_out")), draft.config.block_size)
    ]
    every = residual_sites(draft) + added
    return [every[index * len(every) // SITES] for index in range(SITES)]


def sweep_ways(kind: str, batch: int, anchors: int) -> tuple[Ways, float]:
    """The three ways, and the largest difference between their scores."""
    draft = make_draft(kind).float().eval()
    if isinstance(draft, DSpine):
        for write in draft.injection.writes:
            nn.init.normal_(write.weight, std=0.05, generator=GENERATOR)
    hooked, sites = HookedDraft(copy.deepcopy(draft)), make_sites(draft)
    taps, tokens, at = make_inputs(batch, anchors)
    corrupted = torch.randint(0, 8192, tokens.shape, generator=GENERATOR)
    right, wrong = (torch.randint(0, 8192, (tokens.numel(), 7), generator=GENERATOR) for _ in range(2))
    _, clean = hooked.run_with_cache(taps, tokens, at, names_filter=sorted({site.name for site in sites}))
    values = dict(clean.items())
    direction = draft.head[right] - draft.head[wrong]

    def score(hidden: Tensor, block: Tensor) -> Tensor:
        """Logit difference of two labels; it takes two rows of the head, not all of them."""
        return (hidden * direction[block]).sum(-1)

    def naive() -> Tensor:
        found = []
        for site in sites:
            row = site.slot - site.name.endswith("inject.hook_out")

            def patch(value: Tensor, hook: object, name: str = site.name, row: int = row) -> Tensor:
                value = value.clone()
                value[:, row] = values[name][:, row]
                return value

            with torch.no_grad():
                logits = hooked.run_with_hooks(taps, corrupted, at, fwd_hooks=[(site.name, patch)])
            found.append((logits.gather(-1, right[..., None]) - logits.gather(-1, wrong[..., None])).squeeze(-1))
        return torch.stack(found)

    def shared() -> Tensor:
        with torch.no_grad():
            blocks = Blocks(hooked.encode_context(taps), corrupted, at)
        return sweep_one_by_one(hooked, blocks, sites, values, score)

    def swept() -> Tensor:
        with torch.no_grad():
            blocks = Blocks(draft.encode_context(taps), corrupted, at)
        return sweep(draft, blocks, sites, values, score).patched

    reference = naive()
    apart = float(torch.stack([(way() - reference).abs().max() for way in (shared, swept)]).max())
    return {"sweep": swept, "one full forward per site": naive, "one block pass per site": shared}, apart


# ---- the whole


def capture_part(rounds: int) -> dict[str, Any]:
    target = make_target()
    found: dict[str, Any] = {}
    with torch.no_grad():
        for rows in (1, 4):
            found[f"target, {rows} × {CONTEXT} tokens"] = over(
                timed(target_ways(target, rows), rounds), "plain forward"
            )
        for kind in ("dflash", "dspine"):
            for batch, anchors in ((1, 1), (8, 8)):
                name = f"{kind}, {batch * anchors} blocks of {batch} sequences"
                found[name] = over(timed(draft_ways(kind, batch, anchors), rounds), "plain forward")
    return found


def sweep_part(rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("dflash", "dspine"):
        for batch, anchors in ((1, 1), (8, 4)):
            ways, apart = sweep_ways(kind, batch, anchors)
            if not apart < 1e-3:
                raise SystemExit(f"{kind}: sweep and loop differ by {apart}")
            name = f"{kind}, {SITES} sites, {batch * anchors} blocks of {batch} sequences"
            found[name] = over(timed(ways, rounds), "sweep") | {"largest difference": apart}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=("capture", "sweep"), default=("capture", "sweep"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for part, measure in (("capture", capture_part), ("sweep", sweep_part)):
        if part in options.parts:
            result = {**made(), "threads": options.threads, part: measure(options.rounds)}
            save(result, RESULTS / f"probing_{part}.json")
            print(json.dumps(result[part], indent=2, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
