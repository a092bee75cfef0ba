"""A lean forward pass over a frozen Llama or Qwen3 for many sequences at once.

`LeanDecoder` fuses the q/k/v and gate/up weights of a loaded model and keeps one preallocated key/value cache cut into
pages of positions, so that every matrix product reads whole contiguous pages and short rows skip later ones.
`prefill` runs several prompts packed end to end with no padding; `step` runs one token of every row; `select` moves
rows. It computes what `transformers` computes and nothing else: no training, no other architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from dspine_probe.errors import UsageError

SUPPORTED = ("llama", "qwen3")
CPU_PAGE = 64
DEVICE_PAGE = 256  # fewer launches; the kernels there do not mind longer keys


@dataclass(frozen=True)
class _Layer:
    """Weights of one decoder layer, q/k/v and gate/up fused along the output axis."""

    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    norm_in: Tensor
    norm_mlp: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


def check_supported(model: PreTrainedModel) -> None:
    """Refuse a model whose forward pass `LeanDecoder` does not reproduce."""
    config = model.config
    kind = getattr(config, "model_type", type(model).__name__)
    rope = getattr(config, "rope_parameters", None) or {}
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    unusual = rope.get("rope_type", "default") in ("dynamic", "longrope")
    if kind not in SUPPORTED or sliding or unusual:
        fault = (
            "sliding-window attention"
            if sliding
            else "length-dependent rope"
            if unusual
            else f"type {kind!r}"
        )
        raise UsageError(
            f"batched decoding was given a model with {fault}; it handles full-attention {' and '.join(SUPPORTED)} "
            "models, so use model.generate for this one"
        )


def _fuse(*modules: torch.nn.Linear) -> tuple[Tensor, Tensor | None]:
    weight = torch.cat([m.weight.detach() for m in modules])
    if modules[0].bias is None:
        return weight, None
    return weight, torch.cat([m.bias.detach() for m in modules])


def _layer(block: Any) -> _Layer:
    attention, mlp = block.self_attn, block.mlp
    qkv, qkv_bias = _fuse(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up, gate_up_bias = _fuse(mlp.gate_proj, mlp.up_proj)
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return _Layer(
        qkv,
        qkv_bias,
        attention.o_proj.weight.detach(),
        attention.o_proj.bias,
        gate_up,
        gate_up_bias,
        mlp.down_proj.weight.detach(),
        mlp.down_proj.bias,
        block.input_layernorm.weight.detach(),
        block.post_attention_layernorm.weight.detach(),
        *[None if norm is None else norm.weight.detach() for norm in norms],
    )


def _causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Float[Tensor, "token heads_head_dim"]:
    """Attention inside one prompt; q, k, v are [token, head, head_dim]."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return mixed[0].transpose(0, 1).flatten(1)


class LeanDecoder:
    """Fused weights of one model and a cache of `rows` sequences of at most `capacity` tokens each."""

    def __init__(self, model: PreTrainedModel, *, rows: int, capacity: int) -> None:
        check_supported(model)
        config = model.config
        self.rows, self.capacity = rows, capacity
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps = config.rms_norm_eps
        self.act = model.model.layers[0].mlp.act_fn
        self.embedding = model.model.embed_tokens.weight.detach()
        self.head, self.head_bias = model.lm_head.weight.detach(), model.lm_head.bias
        self.norm = model.model.norm.weight.detach()
        self.layers = [_layer(block) for block in model.model.layers]
        device, dtype = self.embedding.device, self.embedding.dtype
        self.page = CPU_PAGE if device.type == "cpu" else DEVICE_PAGE
        pages = -(-capacity // self.page)
        self.positions = torch.arange(pages * self.page, device=device)
        with torch.inference_mode():
            cos, sin = model.model.rotary_emb(self.embedding[:1, None], self.positions[None, :capacity])
        self.cos, self.sin = cos[0, :, None], sin[0, :, None]
        shape = (len(self.layers), pages, rows, self.kv_heads, self.page, self.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros((*shape[:-2], shape[-1], shape[-2]), device=device, dtype=dtype)
        self.prefix: tuple[int, ...] = ()
        self.prefix_states: list[tuple[Tensor, Tensor]] = []

    @torch.inference_mode()
    def share_prefix(self, prefix: Sequence[int]) -> None:
        """Compute once what every later prompt begins with, such as the system line of a chat template."""
        if not prefix:
            return
        self.prefix = tuple(prefix)
        at = self.positions[: len(prefix)]
        mask = torch.ones(len(prefix), len(prefix), dtype=torch.bool, device=at.device).tril()
        x = self.embedding[torch.tensor(prefix, device=at.device)]
        for layer in self.layers:
            q, k, v = self._qkv(layer, x, at)
            self.prefix_states.append((k, v))
            x = self._finish(layer, x, _causal(q, k, v, mask))

    @torch.inference_mode()
    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Float[Tensor, "prompt vocab"]:
        """Fill the cache of `rows` with `prompts` and return the logits after each prompt's last token.

        Every prompt must begin with the shared prefix and go on after it.
        """
        skip, device = len(self.prefix), self.embedding.device
        lengths = [len(prompt) - skip for prompt in prompts]
        ids = torch.tensor([token for prompt in prompts for token in prompt[skip:]], device=device)
        at = torch.cat([self.positions[skip : skip + n] for n in lengths])
        owners = torch.tensor(rows, device=device)
        owner = owners.repeat_interleave(torch.tensor(lengths, device=device))
        masks = [torch.ones(n, skip + n, dtype=torch.bool, device=device).tril(skip) for n in lengths]
        x = self.embedding[ids]
        for number, (layer, keys, values) in enumerate(zip(self.layers, self.keys, self.values, strict=True)):
            q, k, v = self._qkv(layer, x, at)
            self._store(keys, values, owner, at, k, v)
            before_k, before_v = k[:0], v[:0]
            if skip:
                before_k, before_v = self.prefix_states[number]
                self._store(keys, values, owners[:, None], self.positions[:skip], before_k, before_v)
            split = zip(q.split(lengths), k.split(lengths), v.split(lengths), masks, strict=True)
            parts = [
                _causal(q_i, torch.cat([before_k, k_i]), torch.cat([before_v, v_i]), mask)
                for q_i, k_i, v_i, mask in split
            ]
            x = self._finish(layer, x, torch.cat(parts))
        last = torch.tensor(lengths, device=device).cumsum(0) - 1
        return self._logits(x[last])

    @torch.inference_mode()
    def step(self, tokens: Int[Tensor, "row"], lengths: Sequence[int]) -> Float[Tensor, "row vocab"]:
        """Append `tokens[r]` at position `lengths[r]` of the first rows and return the logits after it.

        `lengths` counts the tokens already cached. Rows out of use may be given token 0 and length 0.
        """
        at = torch.tensor(lengths, device=tokens.device)
        owner = torch.arange(len(lengths), device=tokens.device)
        spans = self._spans(lengths)
        hidden = self.positions[: len(spans) * self.page] > at[:, None]
        mask = torch.zeros(hidden.shape, device=at.device, dtype=self.embedding.dtype)
        mask = mask.masked_fill_(hidden, float("-inf"))[:, None]
        x = self.embedding[tokens]
        for layer, keys, values in zip(self.layers, self.keys, self.values, strict=True):
            q, k, v = self._qkv(layer, x, at)
            self._store(keys, values, owner, at, k, v)
            x = self._finish(layer, x, self._attend(q, keys, values, spans, mask))
        return self._logits(x)

    def select(self, rows: Sequence[int], length: int) -> None:
        """Move cached `rows` to rows 0, 1, ... in that order; only the first `length` positions are kept."""
        index = torch.tensor(rows, device=self.embedding.device)
        pages = -(-length // self.page)
        for cache in (self.keys, self.values):
            for layer in cache:
                layer[:pages, : len(rows)] = layer[:pages, index]

    def _spans(self, lengths: Sequence[int]) -> list[tuple[int, int]]:
        """For each page the range of rows that reach into it; narrow when rows are sorted by length."""
        spans = []
        for start in range(0, max(lengths) + 1, self.page):
            users = [row for row, length in enumerate(lengths) if length >= start]
            spans.append((users[0], users[-1] + 1))
        return spans

    def _attend(
        self, q: Tensor, keys: Tensor, values: Tensor, spans: list[tuple[int, int]], mask: Tensor
    ) -> Float[Tensor, "row heads_head_dim"]:
        """Attention of one query token per row; the query heads that share a key head are its query rows."""
        rows, page = len(q), self.page
        q = (q * self.head_dim**-0.5).view(rows * self.kv_heads, -1, self.head_dim)
        score = q.new_full((*q.shape[:2], len(spans) * page), float("-inf"))
        for number, (start, stop) in enumerate(spans):
            part = slice(start * self.kv_heads, stop * self.kv_heads)
            block = keys[number, start:stop].flatten(0, 1)
            score[part, :, number * page : (number + 1) * page] = torch.bmm(q[part], block.transpose(1, 2))
        score.view(rows, -1, len(spans) * page).add_(mask)
        weight = score.softmax(-1)
        out = torch.bmm(
            weight[..., :page], values[0, :rows].flatten(0, 1).transpose(1, 2)
        )  # every row has page 0
        for number, (start, stop) in enumerate(spans[1:], 1):
            part = slice(start * self.kv_heads, stop * self.kv_heads)
            block = values[number, start:stop].flatten(0, 1)
            out[part] += torch.bmm(
                weight[part, :, number * page : (number + 1) * page], block.transpose(1, 2)
            )
        return out.view(rows, -1)

    def _store(self, keys: Tensor, values: Tensor, owner: Tensor, at: Tensor, k: Tensor, v: Tensor) -> None:
        page, offset = at // self.page, at % self.page
        keys[page, owner, :, offset] = k
        values[page, owner, :, :, offset] = v

    def _qkv(self, layer: _Layer, x: Tensor, at: Int[Tensor, "token"]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys and the values, each [token, head, head_dim]."""
        fused = F.linear(self._rms(x, layer.norm_in), layer.qkv, layer.qkv_bias)
        fused = fused.view(len(x), -1, self.head_dim)
        turned = fused[:, : self.heads + self.kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = turned.split([self.heads, self.kv_heads], 1)
            turned = torch.cat([self._rms(q, layer.q_norm), self._rms(k, layer.k_norm)], 1)
        low, high = turned.chunk(2, -1)
        turned = turned * self.cos[at] + torch.cat([-high, low], -1) * self.sin[at]
        q, k = turned.split([self.heads, self.kv_heads], 1)
        return q, k, fused[:, self.heads + self.kv_heads :]

    def _finish(self, layer: _Layer, x: Tensor, mixed: Tensor) -> Tensor:
        """Output projection and MLP with their residual connections."""
        x = x + F.linear(mixed, layer.out, layer.out_bias)
        gate, up = F.linear(self._rms(x, layer.norm_mlp), layer.gate_up, layer.gate_up_bias).chunk(2, -1)
        return x + F.linear(self.act(gate) * up, layer.down, layer.down_bias)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def _logits(self, x: Float[Tensor, "row d_model"]) -> Float[Tensor, "row vocab"]:
        return F.linear(self._rms(x, self.norm), self.head, self.head_bias)
