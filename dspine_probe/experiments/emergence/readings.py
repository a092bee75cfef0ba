"""Residual streams of a draft, read so that every slot has the same labels.

Where anchors land decides how hard the tokens behind them are. So token i is read at every slot t, each time from the
block whose anchor is token i − t: all slots then have the identical set of labels, and what differs is the distance
from the anchor alone. Entry points: `choose_windows` (which tokens), `read_draft` (states at every depth and slot).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dspine_probe.errors import UsageError
from dspine_probe.experiments.patching import residual_names
from dspine_probe.hook_checks import Hook
from dspine_probe.hooks import HookedDraft

Hooks = Sequence[tuple[str, Hook]]


class TargetSequence(Protocol):
    """A prompt with the target's greedy response and the target's tapped states, as a feature store gives them."""

    @property
    def tokens(self) -> Int[Tensor, "n"]: ...

    @property
    def prompt_length(self) -> int: ...

    @property
    def taps(self) -> Float[Tensor, "n taps_d_model"]: ...


@dataclass(frozen=True)
class Window:
    """Consecutive labels of one sequence, and the anchors from which every slot reads them."""

    sequence: int
    first_label: int
    labels: int
    slots: int

    @property
    def anchors(self) -> range:
        """Anchor positions, one block each, from (first label − T) to (last label − 1)."""
        return range(self.first_label - self.slots, self.first_label + self.labels - 1)

    def block(self, label: int, slot: int) -> int:
        """Which of the blocks holds `label` (0, 1, … of this window) in `slot` (1…T)."""
        return label + self.slots - slot


@dataclass(frozen=True)
class SlotReadings:
    """States of N labels at every depth and slot. Depth 0 is the block embedding, depth l the stream after layer l.

    states: at [d, n, t − 1], the state of slot t that predicts label n.
    anchors: the token that slot's block starts from.
    sequence: which sequence a label belongs to.
    """

    states: Float[Tensor, "depth label draft_slot d_model"]
    labels: Int[Tensor, "label"]
    anchors: Int[Tensor, "label draft_slot"]
    sequence: Int[Tensor, "label"]


def choose_windows(
    sequences: Iterable[TargetSequence], slots: int, labels: int, generator: torch.Generator
) -> list[Window]:
    """A window of up to `labels` consecutive response tokens at a random place of every sequence.

    All anchors lie in the response, as they do in decoding. Sequences whose response is shorter than `slots` + 1 tokens
    have no window.
    """
    windows = []
    for index, sequence in enumerate(sequences):
        length = len(sequence.tokens)
        earliest = sequence.prompt_length + slots
        count = min(labels, length - earliest)
        draw = float(torch.rand((), generator=generator))
        if count >= 1:
            shift = int(draw * (length - earliest - count + 1))
            windows.append(Window(index, earliest + shift, count, slots))
    return windows


@torch.no_grad()
def read_draft(
    hooked: HookedDraft,
    sequences: Sequence[TargetSequence],
    windows: Sequence[Window],
    *,
    fwd_hooks: Hooks = (),
    batch: int = 4,
) -> SlotReadings:
    """The draft's states for every label of every window, under `fwd_hooks`.

    Raises:
        UsageError: there are no windows, or the sequences hold other taps than the draft reads.
    """
    if not windows:
        raise UsageError("no response is long enough to be read at every slot; give longer responses.")
    _refuse_foreign_taps(hooked, sequences)
    order = sorted(range(len(windows)), key=lambda w: len(sequences[windows[w].sequence].tokens))
    parts: dict[int, Tensor] = {}
    for start in range(0, len(order), batch):
        members = order[start : start + batch]
        states = _run([windows[w] for w in members], hooked, sequences, fwd_hooks)
        parts |= dict(zip(members, states, strict=True))
    pairs = list(_label_positions(windows))
    tokens = [sequences[window.sequence].tokens for window, _ in pairs]
    slots = torch.arange(1, windows[0].slots + 1)
    return SlotReadings(
        torch.cat([parts[w] for w in range(len(windows))], dim=1),
        torch.stack([row[label] for row, (_, label) in zip(tokens, pairs, strict=True)]).long(),
        torch.stack([row[label - slots] for row, (_, label) in zip(tokens, pairs, strict=True)]).long(),
        torch.tensor([window.sequence for window, _ in pairs]),
    )


def _run(
    windows: list[Window], hooked: HookedDraft, sequences: Sequence[TargetSequence], fwd_hooks: Hooks
) -> Iterator[Float[Tensor, "depth label draft_slot d_model"]]:
    """One pass over the blocks of a few windows; short windows repeat their last anchor to fill the batch."""
    draft, slots = hooked.draft, windows[0].slots
    device, dtype = draft.fc.weight.device, draft.fc.weight.dtype
    members = [sequences[window.sequence] for window in windows]
    # A block sees only rows before its anchor, so padding on the right is never read.
    longest = max(window.anchors[-1] for window in windows)
    taps = pad_sequence([member.taps[:longest].to(dtype) for member in members], batch_first=True).to(device)
    per_window = max(len(window.anchors) for window in windows)
    anchors = torch.tensor(
        [[*window.anchors] + [window.anchors[-1]] * (per_window - len(window.anchors)) for window in windows]
    )
    tokens = torch.stack([m.tokens.long()[row] for m, row in zip(members, anchors, strict=True)])
    names = residual_names(draft)
    with hooked.hooks(fwd_hooks):
        context = hooked.encode_context(taps)
        cache, caching, _ = hooked.get_caching_hooks(names)
        with hooked.hooks(caching):
            draft.run(context, tokens.to(device), anchors.to(device), width=slots + 1)
    states = torch.stack([cache[name] for name in names]).unflatten(1, anchors.shape)
    slot = torch.arange(1, slots + 1, device=device)
    for row, window in enumerate(windows):
        label = torch.arange(window.labels, device=device)[:, None]
        yield states[:, row, label + slots - slot, slot]


def _label_positions(windows: Sequence[Window]) -> Iterator[tuple[Window, int]]:
    for window in windows:
        for label in range(window.labels):
            yield window, window.first_label + label


def _refuse_foreign_taps(hooked: HookedDraft, sequences: Sequence[TargetSequence]) -> None:
    wanted, given = hooked.draft.fc.in_features, sequences[0].taps.shape[-1]
    if wanted != given:
        raise UsageError(
            f"the sequences hold {given} tap values a token and the draft reads {wanted}; "
            f"compute them with taps {list(hooked.draft.config.target_layer_ids)} of the draft's own target."
        )
