"""What one hooked pass saw: TransformerLens' `ActivationCache`, true to a draft's residual stream.

A draft may add to the stream after a layer (DSpine: its injection). The sums that TransformerLens forms know nothing of
that, so `decompose_resid` is formed here from the draft's own stages; its other sums are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from transformer_lens import ActivationCache
from transformer_lens.utilities import Slice

from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError

_ENDINGS = {"all": "", "attn": "hook_attn_out", "mlp": "hook_mlp_out"}
_REFUSED = (
    *("accumulated_resid", "logit_attrs", "logit_lens", "get_full_resid_decomposition", "apply_ln_to_stack"),
    *("stack_head_results", "compute_head_results", "stack_neuron_results", "get_neuron_results"),
)


def lens_config(draft: Draft) -> SimpleNamespace:
    """The fields by which an ActivationCache finds its way."""
    config = draft.config
    return SimpleNamespace(
        n_layers=config.num_hidden_layers,
        d_model=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_key_value_heads=config.num_key_value_heads,
        d_head=config.head_dim,
        d_mlp=config.intermediate_size,
        d_vocab=draft.head.shape[0],
        attn_only=False,
        normalization_type="RMS",
        eps=config.rms_norm_eps,
        device=draft.head.device,
        dtype=draft.head.dtype,
    )


class DraftCache(ActivationCache):
    """An `ActivationCache` of a draft; the arguments of its methods are those of TransformerLens."""

    def __init__(self, cache_dict: dict[str, Tensor], hooked: Any) -> None:
        super().__init__(cache_dict, hooked)
        self.draft: Draft = hooked.draft

    def decompose_resid(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        mode: str = "all",
        apply_ln: bool = False,
        pos_slice: Any = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
    ) -> Any:
        """All that was added to the stream before `layer` (by default in the whole draft); the sum is that stream.

        In the mode "all", what the draft adds after a layer is a component of its own, zero in slots it leaves alone.

        Raises:
            UsageError: a component was not cached.
        """
        layers = self.draft.config.num_hidden_layers
        depth = layers if layer is None or layer == -1 else layer
        added = [stage.added for index in range(depth) for stage in self.draft.stages(index)]
        added += [f"blocks.{depth}.hook_attn_out"] if mlp_input else []
        names = ["hook_embed"] if incl_embeds else []
        names += [name for name in added if name.endswith(_ENDINGS[mode])]
        components = self._stack(names, pos_slice)
        if apply_ln:
            if depth == layers:
                norm, name = self.draft.ln_final, self.draft.stages(depth - 1)[-1].after
            else:
                block: Any = self.draft.blocks[depth]
                norm = block.ln2 if mlp_input else block.ln1
                name = f"blocks.{depth}.hook_resid_{'mid' if mlp_input else 'pre'}"
            stream = self._stack([name], pos_slice)
            scale = (stream.float().square().mean(-1, keepdim=True) + norm.eps).rsqrt()
            components = components * (scale * norm.weight).to(components)
        labels = [name.removeprefix("blocks.").replace(".", "_").replace("hook_", "") for name in names]
        return (components, labels) if return_labels else components

    def _stack(self, names: Sequence[str], pos_slice: Any) -> Float[Tensor, "component *block slot d_model"]:
        lacking = [name for name in names if name not in self.cache_dict]
        if lacking:
            raise UsageError(f"{lacking[0]} was not cached; let names_filter keep it.")
        width = max((self.cache_dict[name].shape[-2] for name in names), default=0)
        # What is added to slots 1…T alone adds nothing to the anchor's.
        found = [F.pad(x, (0, 0, width - x.shape[-2], 0)) for x in map(self.cache_dict.__getitem__, names)]
        chosen = pos_slice if isinstance(pos_slice, Slice) else Slice(pos_slice)
        return torch.stack([chosen.apply(x, dim=-2) for x in found])


def _refuse(name: str) -> Any:
    def call(*_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"{name} is not formed for drafts, which have no weights in its form; read hook_resid_pre, or multiply "
            "what decompose_resid(apply_ln=True) gives with draft.head, yourself."
        )

    return call


for _name in _REFUSED:
    setattr(DraftCache, _name, _refuse(_name))
