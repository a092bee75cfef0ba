"""The reference engine: the target as transformers runs it and the draft's own modules, over caches allocated once.

Each row writes at its own end; rolling back means forgetting a length. What lies behind a row's end is stale and
masked. Any device, dtype, batch and hook; nothing here is fast on purpose. Entry point: `REFERENCE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dspine_probe.decoding.cache import RowCache, padded_prompts
from dspine_probe.drafts import Context, Draft
from dspine_probe.drafts.proposal import Proposal
from dspine_probe.errors import UsageError
from dspine_probe.target import Target


class ReferenceEngines:
    """Opens the reference engine; there is nothing to prepare and nothing is kept between calls."""

    @property
    def about(self) -> dict[str, Any]:
        """See `Engines.about`."""
        return {"compute": "reference modules"}

    def open_target(
        self, target: Target, *, taps: Sequence[int], rows: int, capacity: int, width: int
    ) -> ReferenceTarget:
        """See `Engines.open_target`; any target whose layers all attend to everything before them."""
        return ReferenceTarget(target, taps, rows, capacity)

    def open_draft(self, draft: Draft, *, rows: int, capacity: int, width: int) -> ReferenceDraft:
        """See `Engines.open_draft`; any draft."""
        return ReferenceDraft(draft, rows, capacity, width)


REFERENCE = ReferenceEngines()


class ReferenceTarget(RowCache):
    """A target in transformers. In a pass it stands in for their cache, of which a layer asks nothing but `update`."""

    admits = False

    def __init__(self, target: Target, taps: Sequence[int], rows: int, capacity: int) -> None:
        if "sliding_attention" in (getattr(target.config, "layer_types", None) or ()):
            raise UsageError(f"target '{target.name}' has sliding-window layers, which this loop cannot roll back")
        super().__init__(target.num_layers, rows, capacity, target.num_kv_heads, target.head_dim, target.embedding)
        self.target, self.tapped = target, tuple(taps)
        self.at = torch.empty(0, 0, dtype=torch.long)
        self.caught: dict[int, Tensor] = {}

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Float[Tensor, "row vocab"]:
        """See `TargetEngine.prefill`."""
        ids, last = padded_prompts(prompts, self.target.device)
        self.lengths = [0] * len(prompts)
        final = self._pass(ids)
        self.commit([len(prompt) for prompt in prompts])
        return self.target.logits(final[torch.arange(len(prompts), device=final.device), last])

    def forward(self, tokens: Int[Tensor, "row width"]) -> Float[Tensor, "row width vocab"]:
        """See `TargetEngine.forward`."""
        return self.target.logits(self._pass(tokens))

    def greedy(self, tokens: Int[Tensor, "row width"]) -> Int[Tensor, "row width"]:
        """See `TargetEngine.greedy`."""
        return self.forward(tokens).max(dim=-1).indices  # on CPU several times faster than argmax, same result

    @property
    def taps(self) -> Float[Tensor, "row width taps_d_model"]:
        """See `TargetEngine.taps`."""
        return torch.cat([self.caught[layer] for layer in self.tapped], dim=-1)

    def update(
        self,
        keys: Float[Tensor, "row kv_head width d_head"],
        values: Float[Tensor, "row kv_head width d_head"],
        layer: int,
        *_: object,
        **__: object,
    ) -> tuple[Tensor, Tensor]:
        """Store what a layer computed; all keys and values up to the end of the longest row."""
        self.write(layer, self.at, keys.transpose(1, 2), values.transpose(1, 2))
        view = slice(None, len(keys)), slice(None, self._reach())
        return self.keys[layer][view].transpose(1, 2), self.values[layer][view].transpose(1, 2)

    def _pass(self, tokens: Int[Tensor, "row width"]) -> Float[Tensor, "row width d_model"]:
        self.at = self.next(tokens.shape[1])
        hidden = torch.arange(self._reach(), device=tokens.device) > self.at[..., None]
        mask = torch.zeros(hidden.shape, device=tokens.device, dtype=self.target.dtype)
        mask = mask.masked_fill_(hidden, float("-inf"))[:, None]
        with self.target.capture(self.tapped) as self.caught:
            passed = self.target.model.base_model(
                input_ids=tokens, attention_mask=mask, position_ids=self.at, cache=self, use_cache=True
            )
        return passed.last_hidden_state

    def _reach(self) -> int:
        return max(self.lengths) + self.at.shape[1]


class ReferenceDraft(RowCache):
    """A draft's own modules over its context."""

    def __init__(self, draft: Draft, rows: int, capacity: int, width: int) -> None:
        c = draft.config
        super().__init__(c.num_hidden_layers, rows, capacity, c.num_key_value_heads, c.head_dim, draft.fc.weight)
        self.draft, self.width, self.lengths = draft, width, [0] * rows
        self.features: Tensor | None = None

    def extend(
        self,
        taps: Float[Tensor, "row width taps_d_model"],
        counts: Sequence[int],
        following: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """See `DraftEngine.extend`."""
        like = self.draft.fc.weight
        at, tokens = self.next(taps.shape[1]), None
        if following is not None:
            padded = [[*row[: taps.shape[1]], *[0] * (taps.shape[1] - len(row))] for row in following]
            tokens = torch.tensor(padded, device=like.device)
        new = self.draft.encode_context(taps.to(like.device, like.dtype), start=at[:, 0], following=tokens)
        if new.features is not None:
            if self.features is None:
                self.features = new.features.new_zeros(len(at), self.keys[0].shape[1], new.features.shape[-1])
            self.features[torch.arange(len(at), device=at.device)[:, None], at] = new.features
        for layer, (keys, values) in enumerate(zip(new.keys, new.values, strict=True)):
            self.write(layer, at, keys, values)
        self.commit(counts)

    def propose(
        self,
        anchor_tokens: Int[Tensor, "row"],
        *,
        temperature: float = 1.0,
        noise: Float[Tensor, "row draft_slot"] | None = None,
        on_trunk: Callable[[], None] | None = None,
    ) -> Proposal:
        """See `DraftEngine.propose`."""
        view = slice(None, len(anchor_tokens)), slice(None, max(self.lengths))
        context = Context(
            tuple(keys[view] for keys in self.keys),
            tuple(values[view] for values in self.values),
            None if self.features is None else self.features[view],
        )
        anchors, tokens = self.next(1), anchor_tokens[:, None]
        with _after(self.draft.ln_final, on_trunk):
            if noise is None:
                return Proposal(self.draft.draft_greedy(context, tokens, anchors, width=self.width))
            states = self.draft.run(context, tokens, anchors, width=self.width)
        return self.draft.propose(states, tokens, temperature=temperature, noise=noise)

    def select(self, rows: Sequence[int]) -> None:
        """See `DraftEngine.select`."""
        super().select(rows)
        self.features = None if self.features is None else self.features[list(rows)]


@contextmanager
def _after(module: nn.Module, call: Callable[[], None] | None) -> Iterator[None]:
    """While the block runs, `call` follows every pass of `module`."""

    def hook(*_: object) -> None:
        if call is not None:
            call()

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
