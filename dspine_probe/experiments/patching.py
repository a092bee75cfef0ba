"""Patching, one place at a time: put another value into one slot at one hook point, and see what becomes of the block.

A loop over places runs the whole draft once for each. `sweep` runs it once for all of them: the unpatched stream walks
through the layers, and where a place is reached a copy of it is patched and walks along as one more block of the same
sequence. No copy passes a layer that lies before its patch, and a layer's weights are read once for all copies.

Places are the hook points on the residual path (`places`): the stream itself, and what attention, MLP and injection add
to it. Values come from anywhere: the cache of a clean run (denoising), of a corrupted one (noising), zeros (ablation).
Entry points: `sweep`, `residual_sites`; `sweep_one_by_one` is the loop, kept as the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from dspine_probe.drafts import Context, Draft
from dspine_probe.errors import UsageError
from dspine_probe.hooks import HookedDraft

Score = Callable[[Float[Tensor, "row draft_slot d_model"], Int[Tensor, "row"]], Float[Tensor, "row *score"]]
Values = Mapping[str, Tensor]
MOST_ROWS = 512
"""More blocks side by side no longer save weights read, and their states leave the cache."""


@dataclass(frozen=True)
class Site:
    """One slot (0 is the anchor's) at one hook point."""

    name: str
    slot: int


@dataclass(frozen=True)
class Blocks:
    """What one pass is given: a context, and the anchors of its blocks. All slots of the block are used."""

    context: Context
    anchor_tokens: Int[Tensor, "batch anchor"]
    anchors: Int[Tensor, "batch anchor"]


@dataclass(frozen=True)
class SweepScores:
    """Scores of every block: without a patch, and under each site's patch, in the order of the sites."""

    unpatched: Float[Tensor, "block *score"]
    patched: Float[Tensor, "site block *score"]


def places(draft: Draft) -> list[str]:
    """Hook points on the residual path, in the order in which a pass meets them."""
    names = ["hook_embed"]
    for layer in range(len(draft.blocks)):
        names.append(f"blocks.{layer}.hook_resid_pre")
        names += [name for stage in draft.stages(layer) for name in (stage.added, stage.after)]
    return names


def residual_names(draft: Draft) -> list[str]:
    """Hook points of depths 0…L: the block embedding, then the stream after each layer and what follows it."""
    return ["hook_embed"] + [draft.stages(layer)[-1].after for layer in range(len(draft.blocks))]


def residual_sites(draft: Draft) -> list[Site]:
    """Every slot of the stream at depths 0…L."""
    return [Site(name, slot) for name in residual_names(draft) for slot in range(draft.config.block_size)]


@torch.no_grad()
def sweep(
    draft: Draft, blocks: Blocks, sites: Sequence[Site], values: Values, score: Score, *, most_rows: int = MOST_ROWS
) -> SweepScores:
    """Scores of `blocks` under the patch of every site, one at a time.

    Args:
        blocks: the run that is patched.
        sites: in any order.
        values: by hook point, the values to put in for all blocks and slots, shaped as that hook point is.
        score: given final-normed states of some rows (blocks, several times over) and each row's block, their scores.
        most_rows: blocks walked side by side, copies included; bounds the memory.

    Raises:
        UsageError: a site does not lie on the residual path or in the block, lacks a value, or hooks are on.
    """
    order = {name: place for place, name in enumerate(places(draft))}
    _check(draft, blocks, sites, values, order)
    chunk = max(1, most_rows // blocks.anchors.numel() - 1)
    by_place = sorted(range(len(sites)), key=lambda i: order[sites[i].name])
    found: dict[int, Tensor] = {}
    for start in range(0, len(by_place), chunk):
        part = by_place[start : start + chunk]
        scores = _scores(draft, blocks, [sites[i] for i in part], values, score)
        found.update(zip(part, scores[1:], strict=True))
    return SweepScores(scores[0], torch.stack([found[i] for i in range(len(sites))]))


@torch.no_grad()
def sweep_one_by_one(
    hooked: HookedDraft, blocks: Blocks, sites: Sequence[Site], values: Values, score: Score
) -> Float[Tensor, "site block *score"]:
    """What `sweep` gives, by one hooked pass for every site."""
    rows = torch.arange(blocks.anchors.numel(), device=blocks.anchors.device)
    scores = []
    for site in sites:

        def patch(value: Tensor, hook: HookPoint, site: Site = site) -> Tensor:
            row, new = _row(site), values[site.name].to(value)
            return torch.cat([value[:, :row], new[:, row : row + 1], value[:, row + 1 :]], dim=1)

        with hooked.hooks([(site.name, patch)]):
            states = hooked.draft.run(blocks.context, blocks.anchor_tokens, blocks.anchors)
        scores.append(score(states.hidden[:, 1:], rows))
    return torch.stack(scores)


def recovered(
    patched: Float[Tensor, "site block"],
    unpatched: Float[Tensor, "block"],
    goal: Float[Tensor, "block"],
    *,
    least: float,
) -> Float[Tensor, "site block"]:
    """How much of the way from `unpatched` to `goal` a patch goes: 0 none, 1 all of it.

    NaN where the two lie closer than `least`: there is no way to go, and noise would be divided by nothing.
    """
    gap = goal - unpatched
    return (patched - unpatched) / torch.where(gap.abs() < least, torch.nan, gap)


@dataclass
class _Streams:
    """The unpatched stream, copy 0, and behind it one copy for each site passed so far (indices in `started`)."""

    x: Float[Tensor, "batch anchor copy slot d_model"]
    sites: Sequence[Site]
    values: Values
    started: list[int] = field(default_factory=list)

    @property
    def copies(self) -> int:
        return self.x.shape[2]

    def advance(self, added: str, after: str, rows: Float[Tensor, "row slot d_model"]) -> None:
        """Move on to `rows`, the stream at `after`; patches at `added` replace what came to the stream since."""
        before, self.x = self.x[:, :, 0], rows.view(self.x.shape)
        self.fork(added, before)
        self.fork(after)

    def fork(self, name: str, before: Float[Tensor, "batch anchor slot d_model"] | None = None) -> None:
        """Start the copies patched at `name`: their slot holds the new value, on top of `before` if that is given."""
        here = [index for index, site in enumerate(self.sites) if site.name == name]
        if not here:
            return
        new = self.x[:, :, :1].repeat(1, 1, len(here), 1, 1)
        values = self.values[name].to(new).unflatten(0, new.shape[:2])
        for copy, site in enumerate(self.sites[index] for index in here):
            value = values[:, :, _row(site)]
            new[:, :, copy, site.slot] = value if before is None else before[:, :, site.slot] + value
        self.x = torch.cat([self.x, new], dim=2)
        self.started += here


def _scores(
    draft: Draft, blocks: Blocks, sites: Sequence[Site], values: Values, score: Score
) -> Float[Tensor, "site_and_one block *score"]:
    """One walk through the layers; first the unpatched scores, then those of every site in its order."""
    width = draft.config.block_size
    embedded = draft.embed_block(blocks.anchor_tokens, width)
    streams = _Streams(embedded.view(*blocks.anchors.shape, 1, *embedded.shape[1:]), sites, values)
    streams.fork("hook_embed")
    for layer in range(len(draft.blocks)):
        streams.fork(f"blocks.{layer}.hook_resid_pre")
        for stage in draft.stages(layer):
            tokens, anchors = (
                each.repeat_interleave(streams.copies, dim=1) for each in (blocks.anchor_tokens, blocks.anchors)
            )
            inputs = draft.block_inputs(blocks.context, tokens, anchors, width)
            streams.advance(stage.added, stage.after, stage.step(streams.x.flatten(0, 2), inputs))
    hidden = draft.ln_final(streams.x.flatten(0, 2))[:, 1:]
    block = torch.arange(blocks.anchors.numel(), device=hidden.device).repeat_interleave(streams.copies)
    scores = score(hidden, block).unflatten(0, (-1, streams.copies)).transpose(0, 1)
    place = torch.empty(len(sites), dtype=torch.long)
    place[torch.tensor(streams.started)] = torch.arange(1, streams.copies)
    return torch.cat([scores[:1], scores[place.to(scores.device)]])


def _row(site: Site) -> int:
    """Where the site's slot lies in what its hook point carries; injections write to slots 1…T only."""
    return site.slot - site.name.endswith("inject.hook_out")


def _check(draft: Draft, blocks: Blocks, sites: Sequence[Site], values: Values, order: Mapping[str, int]) -> None:
    if any(isinstance(module, HookPoint) and (module.fwd_hooks or module.bwd_hooks) for module in draft.modules()):
        raise UsageError(
            "hooks are on, and a sweep would let some of them act and pass others by; leave hooks() first."
        )
    if not sites:
        raise UsageError("there is no site to patch; name one or more, for example residual_sites(draft).")
    width, d_model = draft.config.block_size, draft.config.hidden_size
    for site in sites:
        if site.name not in order:
            raise UsageError(
                f"{site.name!r} does not lie on the residual path; use hooks there, or name one of places(draft)."
            )
        if site.name not in values:
            raise UsageError(f"no value was given for {site.name}; cache it in the run that values come from.")
        if _row(site) < 0 or site.slot >= width:
            raise UsageError(f"{site.name} has no slot {site.slot} in a block of {width} slots.")
        given, wanted = (
            tuple(values[site.name].shape),
            (blocks.anchors.numel(), width - site.slot + _row(site), d_model),
        )
        if given != wanted:
            raise UsageError(f"the values for {site.name} are {given}; these blocks need {wanted}.")
