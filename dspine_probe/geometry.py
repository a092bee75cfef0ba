"""The sizes of a target, read from its transformers configuration.

Llama- and Qwen-like configurations name the same things, but some leave a key out or moved it between versions; the
gaps are closed here where the format says how, and refused by name elsewhere, so that everything else reads plain
numbers.
"""

from typing import Any

from dspine_probe.errors import UsageError


class TargetGeometry:
    """Sizes of a decoder; `config` is the (text) configuration of transformers."""

    name: str
    config: Any

    @property
    def hidden_size(self) -> int:
        """Width d_model of the residual stream."""
        return int(self._declared("hidden_size"))

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return int(self._declared("num_hidden_layers"))

    @property
    def num_heads(self) -> int:
        """Query heads of each attention."""
        return int(self._declared("num_attention_heads"))

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads of each attention."""
        return int(getattr(self.config, "num_key_value_heads", None) or self.num_heads)

    @property
    def head_dim(self) -> int:
        """Width of one head; `num_heads * head_dim` need not equal `hidden_size` (Qwen3)."""
        return int(getattr(self.config, "head_dim", None) or self.hidden_size // self.num_heads)

    @property
    def intermediate_size(self) -> int:
        """Inner width of the MLP."""
        return int(self._declared("intermediate_size"))

    @property
    def rms_norm_eps(self) -> float:
        """Epsilon of the RMS norms."""
        return float(self._declared("rms_norm_eps"))

    @property
    def rope_theta(self) -> float:
        """Base of the rotary frequencies; of the fully attending layers where each type of layer has its own."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        theta = rope.get("full_attention", rope).get("rope_theta")
        return float(self._declared("rope_theta") if theta is None else theta)

    @property
    def max_positions(self) -> int:
        """Longest context in tokens."""
        return int(self._declared("max_position_embeddings"))

    def _declared(self, field: str) -> Any:
        value = getattr(self.config, field, None)
        if value is None:
            raise UsageError(
                f"the configuration of target '{self.name}' has no {field}; use a target built like Llama or Qwen"
            )
        return value
