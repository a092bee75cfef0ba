"""The arms of the injection experiment: what each trains, and the module that runs it.

An `Arm` says where the predecessor's code enters (a depth, or every depth through one shared injector), which code it
is, what stands behind the last layer, how reliable the code is in training, and whether the draft stays frozen.
`arms_of` lists the arms of a draft by group, in the order in which they are worth training; `build` makes an arm's
module, which leaves the draft's scores exactly as they are until it is trained.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments.injection_depth.blocks import BlockPass, Sites
from dspine_probe.experiments.injection_depth.injectors import (
    NOISE,
    RANDOM,
    TRANSFER,
    CodeInjector,
    Codes,
    ExtraLayers,
    ExtraMLP,
    MarkovHead,
)

ALL = "all"
MLP, LAYERS, MARKOV = "mlp", "layers", "markov"
DEPTHS, CODES, LATE, RELIABILITY, LEAK, UNFROZEN = (
    "depths", "codes", "late", "reliability", "leak", "unfrozen",
)  # fmt: skip
GROUPS = (DEPTHS, CODES, LATE, RELIABILITY, LEAK, UNFROZEN)
_LATE: dict[str, type[ExtraMLP] | type[ExtraLayers]] = {MLP: ExtraMLP, LAYERS: ExtraLayers}
UNRELIABLE = (0.0, 0.5, 0.75)
"""Shares of true codes below one in the reliability sweep."""


@dataclass(frozen=True)
class Arm:
    """One trained condition.

    depth: 0 (block embedding) … L (after the last layer), or "all".
    code: TRANSFER, RANDOM or NOISE.
    late: MLP or LAYERS behind the last layer, or MARKOV in place of an injector.
    reliability: share of sites whose code is the true predecessor's in training; the rest get the draft's own guess.
    unfrozen: the whole draft is trained along.
    leak: all slots of a bidirectional block at once, to show the fault.
    """

    depth: int | str
    code: str = TRANSFER
    late: str | None = None
    reliability: float = 1.0
    unfrozen: bool = False
    leak: bool = False

    @property
    def name(self) -> str:
        """The arm in tables and file names."""
        if self.late == MARKOV:
            return MARKOV
        parts = [ALL if self.depth == ALL else f"depth-{self.depth}"]
        parts += [self.code] * (self.code != TRANSFER) + [self.late or ""] * (self.late is not None)
        parts += [f"rho-{self.reliability:.2f}"] * (self.reliability < 1)
        parts += ["unfrozen"] * self.unfrozen + ["leak"] * self.leak
        return "-".join(parts)

    def depths(self, layers: int) -> tuple[int, ...]:
        """The depths at which its injector stands, in a draft of that many layers."""
        return tuple(range(layers + 1)) if self.depth == ALL else (cast(int, self.depth),)


def check_depth(depth: int | str, layers: int) -> None:
    """Refuse a depth that a draft of that many layers does not have.

    Raises:
        UsageError: naming the allowed depths.
    """
    if depth == ALL or (isinstance(depth, int) and 0 <= depth <= layers):
        return
    raise UsageError(
        f"depth {depth!r} lies outside this draft; allowed are 0 (block embedding), 1…{layers} (after that layer) "
        f"and {ALL!r}."
    )


def contrasted(layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shallow and late depths to contrast: (1, 2) and (L − 1, L), or one each in a draft of two or three layers."""
    width = min(2, layers // 2)
    if width < 1:
        raise UsageError("a draft of one layer has no shallow and late depth to compare; give two or more layers.")
    return tuple(range(1, width + 1)), tuple(range(layers - width + 1, layers + 1))


def arms_of(
    draft: Draft,
    *,
    groups: Sequence[str] = GROUPS,
    depths: Sequence[int | str] | None = None,
    control_depths: Sequence[int] | None = None,
) -> dict[str, tuple[Arm, ...]]:
    """The arms of the chosen groups.

    Args:
        draft: what they are for; a causal one has no leak to show.
        groups: some of GROUPS.
        depths: of the first group; by default every depth, and all together.
        control_depths: where controls stand; by default after the first and after the last layer.

    Raises:
        UsageError: a group is unknown, or a depth lies outside the draft.
    """
    layers = draft.config.num_hidden_layers
    depths = (*range(layers + 1), ALL) if depths is None else tuple(depths)
    two = (1, layers) if control_depths is None else tuple(control_depths)
    for depth in (*depths, *two):
        check_depth(depth, layers)
    unknown = [group for group in groups if group not in GROUPS]
    if unknown:
        raise UsageError(f"arm group {unknown[0]!r} is unknown; groups are {', '.join(GROUPS)}.")
    every = {
        DEPTHS: tuple(Arm(depth) for depth in depths),
        CODES: tuple(Arm(depth, code=code) for code in (RANDOM, NOISE) for depth in two),
        LATE: tuple(Arm(layers, late=late) for late in (MARKOV, MLP, LAYERS)),
        RELIABILITY: tuple(Arm(depth, reliability=share) for share in UNRELIABLE for depth in two),
        LEAK: () if draft.config.is_causal else tuple(Arm(depth, leak=True) for depth in two),
        UNFROZEN: tuple(Arm(depth, unfrozen=True) for depth in two),
    }
    return {group: every[group] for group in groups}


class ArmModule(nn.Module):
    """An arm's trainable parts. `own` is the draft of an unfrozen arm, `fast` what tolerates high learning rates."""

    def __init__(
        self,
        arm: Arm,
        injector: CodeInjector | None,
        *,
        after: ExtraMLP | ExtraLayers | None = None,
        markov: MarkovHead | None = None,
        own: Draft | None = None,
    ) -> None:
        super().__init__()
        self.arm = arm
        self.injector, self.after, self.markov, self.own = injector, after, markov, own

    @property
    def fast(self) -> list[nn.Parameter]:
        """Parameters made for this experiment that start from nothing: injector and Markov head."""
        return [p for part in (self.injector, self.markov) if part is not None for p in part.parameters()]

    @property
    def slow(self) -> list[nn.Parameter]:
        """Pretrained or very wide parts: the draft itself and what stands behind its last layer."""
        return [p for part in (self.after, self.own) if part is not None for p in part.parameters()]

    def pass_over(self, shared: BlockPass) -> BlockPass:
        """The pass this arm builds on: the frozen draft's, or its own as far as it is needed."""
        if self.own is None:
            return shared
        return BlockPass.of(self.own, shared.batch, depth=self.arm.depths(len(self.own.blocks))[0])

    def forward(
        self, blocks: BlockPass, sites: Sites, predecessors: Int[Tensor, "site"], codes: Float[Tensor, "site rank"]
    ) -> Float[Tensor, "site draft_vocab"]:
        """Scores at the sites when they are given `predecessors`, whose codes are `codes`."""
        if self.markov is not None:
            return blocks.scores(sites.of(blocks.stream[-1])) + self.markov(predecessors)
        assert self.injector is not None
        last = len(blocks.draft.blocks)
        depths = self.arm.depths(last)
        x = blocks.stream[depths[0]]
        for depth, following in zip(depths, (*depths[1:], last), strict=True):
            x = sites.put(x, self.injector(sites.of(x), codes))
            x = blocks.layers(x, depth, following)
        if self.after is not None:
            x = self.after(x, blocks, sites)
        return blocks.scores(sites.of(x))


def build(arm: Arm, draft: Draft, codes: Codes, *, message: int, seed: int) -> ArmModule:
    """An untrained module for `arm` beside `draft`; what is random in it depends on the seed alone."""
    layers = draft.config.num_hidden_layers
    check_depth(arm.depth, layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if arm.late == MARKOV:
            module = ArmModule(arm, None, markov=MarkovHead(codes, draft.head.shape[0]))
        else:
            module = ArmModule(
                arm,
                CodeInjector(codes.basis.cpu(), message),
                after=None if arm.late is None else _LATE[arm.late](draft, layers - 1),
                own=_trainable(draft) if arm.unfrozen else None,
            )
    return module.to(draft.head.device)


def borrowed(draft: Draft) -> Draft:
    """A copy of the draft with parameters of its own, beside the same embedding, head and codes."""
    shared = {id(buffer): buffer for buffer in draft.buffers()}
    return copy.deepcopy(draft, shared)


def _trainable(draft: Draft) -> Draft:
    own = borrowed(draft)
    for parameter in own.parameters():
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)
    return own
