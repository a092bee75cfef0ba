"""Targets and drafts of public geometries with random weights: how long a pass takes does not depend on their values.

What acceptance they would reach does, so that is never measured here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.functional import normalize
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.gpu.gru import GRUHead
from benchmarks.gpu.markov import MarkovHead
from dspine_probe.config import DSPINE, DraftConfig, default_taps
from dspine_probe.drafts import DSpine
from dspine_probe.drafts.injection import DSpineConfig
from dspine_probe.target import Target


@dataclass(frozen=True)
class Geometry:
    """Sizes of a target, of the DSpine that drafts for it, and of the serial heads it is compared with."""

    name: str
    d_model: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    d_head: int
    vocab: int
    tied: bool
    block: int = 16
    draft_layers: int = 5
    rank: int = 1024
    message: int = 512
    k: int = 16
    serial_rank: int = 256
    serial_state: int = 1024
    selector_rank: int = 256


QWEN3_8B = Geometry("Qwen3-8B", 4096, 12_288, 36, 32, 8, 128, 151_936, tied=False)
QWEN3_4B = Geometry("Qwen3-4B", 2560, 9_728, 36, 32, 8, 128, 151_936, tied=True)
TINY = Geometry("tiny", 64, 96, 6, 4, 2, 16, 300, True, 5, 2, 24, 16, 4, 8, 16, 8)


@dataclass(frozen=True)
class Models:
    """Everything that is timed at one geometry."""

    geometry: Geometry
    target: Target
    draft: DSpine
    markov: MarkovHead
    gru: GRUHead
    selector: Selector


@dataclass(frozen=True)
class Selector:
    """DFlash2's candidate selector: S_t(a, b) = U_t(b) + ⟨A[a] ⊙ (H h_t), B[b]⟩."""

    before: torch.Tensor
    after: torch.Tensor
    hidden: torch.Tensor


def build(geometry: Geometry, device: torch.device, dtype: torch.dtype) -> Models:
    """Fill all weights with random numbers on the device."""
    g = geometry
    with _made_in(device, dtype):
        target = Target.from_model(Qwen3ForCausalLM(_config(g)), name=g.name, stop_ids=())
        codes = normalize(torch.randn(g.vocab, g.rank, dtype=torch.float32), dim=-1)
        draft = DSpine(_draft_config(g), target.embedding, target.head, codes=codes)
        state = g.serial_state
        return Models(
            g,
            target,
            draft.eval().requires_grad_(False),
            MarkovHead(torch.randn(g.vocab, g.serial_rank), torch.randn(g.vocab, g.serial_rank)),
            GRUHead(
                torch.randn(g.vocab, 3 * state),
                torch.randn(3 * state, state),
                torch.randn(g.serial_rank, g.d_model),
                torch.randn(g.serial_rank, state),
                torch.randn(g.vocab, g.serial_rank),
            ),
            Selector(
                torch.randn(g.vocab, g.selector_rank),
                torch.randn(g.vocab, g.selector_rank),
                torch.randn(g.selector_rank, g.d_model),
            ),
        )


def _config(g: Geometry) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=g.vocab,
        hidden_size=g.d_model,
        intermediate_size=g.inner,
        num_hidden_layers=g.layers,
        num_attention_heads=g.heads,
        num_key_value_heads=g.kv_heads,
        head_dim=g.d_head,
        tie_word_embeddings=g.tied,
        max_position_embeddings=40_960,
    )


def _draft_config(g: Geometry) -> DraftConfig:
    return DraftConfig(
        architecture=DSPINE,
        hidden_size=g.d_model,
        intermediate_size=g.inner,
        num_hidden_layers=g.draft_layers,
        num_attention_heads=g.heads,
        num_key_value_heads=g.kv_heads,
        head_dim=g.d_head,
        vocab_size=g.vocab,
        block_size=g.block,
        mask_token_id=g.vocab - 1,
        target_layer_ids=default_taps(g.layers, min(5, g.layers - 3)),
        num_target_layers=g.layers,
        is_causal=True,
        part=DSpineConfig(transfer_rank=g.rank, message_size=g.message, top_k=g.k),
    )


@contextmanager
def _made_in(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Tensors and modules are made on the device and in the type, and not on the host first."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)
