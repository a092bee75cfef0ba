"""Controls of the emergence experiment: what a reader finds when there is less, or nothing, to find.

* an untrained draft: what the context feature and a random network give by themselves;
* attention cut inside the block: every slot sees the context and itself, no other slot and no anchor;
* the same with the injection's writes removed, for a draft that also connects slots there;
* labels shuffled within each prompt: what a reader gets from knowing the prompt's tokens but not their places.
"""

from __future__ import annotations

import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from dspine_probe.drafts import Draft
from dspine_probe.experiments.emergence.readings import Hooks

TRAINED, SHUFFLED, UNTRAINED, ATTENTION_CUT, BLOCK_CUT = (
    "trained",
    "shuffled labels",
    "untrained draft",
    "attention cut",
    "attention and injection cut",
)
CONTROLS = (ATTENTION_CUT, BLOCK_CUT, UNTRAINED, SHUFFLED)
TRANSLATOR = "translator"


def untrained(draft: Draft, generator: torch.Generator) -> Draft:
    """The same architecture with fresh random weights: normal with variance 1/fan-in, gains 1, injection writes 0.

    The target's embedding, head and codes are shared with `draft`, not copied.
    """
    fresh = copy.deepcopy(draft, {id(value): value for value in draft.buffers()})
    with torch.no_grad():
        for module in fresh.modules():
            if isinstance(module, nn.Linear):
                noise = torch.randn(module.weight.shape, generator=generator) * module.in_features**-0.5
                module.weight.copy_(noise)
        for parameter in fresh.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
        fresh.zero_writes()
    return fresh


def cut_attention(layers: int) -> Hooks:
    """Hooks after which no slot attends to another slot of its block; context rows stay visible."""
    return [(f"blocks.{layer}.attn.hook_attn_scores", _own_slot_only) for layer in range(layers)]


def cut_injection(draft: Draft) -> Hooks:
    """Hooks that remove what is added to the stream behind attention and MLP; none for a draft that adds nothing."""
    stages = [stage for layer in range(draft.config.num_hidden_layers) for stage in draft.stages(layer)[2:]]
    return [(stage.added, _nothing) for stage in stages]


def shuffle_within(
    labels: Int[Tensor, "label"], sequence: Int[Tensor, "label"], generator: torch.Generator
) -> Int[Tensor, "label"]:
    """Labels permuted inside each sequence, so that every sequence keeps its multiset."""
    shuffled = labels.clone()
    for index in sequence.unique():
        rows = (sequence == index).nonzero().squeeze(1)
        shuffled[rows] = labels[rows[torch.randperm(len(rows), generator=generator)]]
    return shuffled


def _own_slot_only(
    scores: Float[Tensor, "block head slot key"], hook: HookPoint
) -> Float[Tensor, "block head slot key"]:
    slots = scores.shape[-2]
    others = ~torch.eye(slots, dtype=torch.bool, device=scores.device)
    context, own = scores.split([scores.shape[-1] - slots, slots], dim=-1)
    return torch.cat([context, own.masked_fill(others, float("-inf"))], dim=-1)


def _nothing(written: Tensor, hook: HookPoint) -> Tensor:
    return torch.zeros_like(written)
