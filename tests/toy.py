"""Drafts and sequences of random numbers, with no target behind them."""

from __future__ import annotations

import torch
from torch import Tensor

from dspine_probe.config import DFLASH, DSPINE, DraftConfig
from dspine_probe.drafts import DFlash, DSpine
from dspine_probe.drafts.injection import DSpineConfig
from dspine_probe.training.features import FeatureMeta, FeatureStore, Sequence

VOCAB, D_MODEL, LAYERS, BLOCK, TAPS = 32, 16, 3, 4, 2


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def toy_config(kind: str, *, causal: bool, draft_vocab: int | None = None) -> DraftConfig:
    return DraftConfig(
        architecture=DSPINE if kind == "dspine" else DFLASH,
        hidden_size=D_MODEL,
        intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        vocab_size=VOCAB,
        block_size=BLOCK,
        mask_token_id=3,
        target_layer_ids=tuple(range(TAPS)),
        num_target_layers=TAPS + 2,
        is_causal=causal,
        draft_vocab_size=draft_vocab,
        part=DSpineConfig(transfer_rank=8, message_size=5, top_k=4) if kind == "dspine" else None,
    )


def toy_draft(
    kind: str, *, causal: bool | None = None, seed: int = 0, vocabulary: Tensor | None = None, writes: bool = True
) -> DFlash | DSpine:
    """A random draft; `writes=False` leaves DSpine at its identity start."""
    generator = seeded(seed)
    causal = kind == "dspine" if causal is None else causal
    config = toy_config(kind, causal=causal, draft_vocab=None if vocabulary is None else len(vocabulary))
    head = torch.randn(VOCAB, D_MODEL, generator=generator)
    embedding = torch.randn(VOCAB, D_MODEL, generator=generator)
    draft = (DSpine if kind == "dspine" else DFlash)(config, embedding, head, vocabulary=vocabulary)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            start = name.startswith("injection.") and not writes
            if parameter.ndim == 2 and not start:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
    return draft.eval()


def toy_sequence(length: int = 14, prompt: int = 4, seed: int = 0) -> Sequence:
    generator = seeded(seed)
    return Sequence(
        f"toy/{seed}",
        torch.randint(0, VOCAB, (length,), generator=generator),
        prompt,
        torch.randn(length, TAPS * D_MODEL, generator=generator),
        torch.randn(length, D_MODEL, generator=generator),
    )


def toy_store(lengths: tuple[int, ...] = (9, 14, 11, 6, 12, 10), prompt: int = 3) -> FeatureStore:
    """A store in memory."""
    sequences = [toy_sequence(length, prompt, seed) for seed, length in enumerate(lengths)]
    meta = FeatureMeta(
        "toy", tuple(range(TAPS)), D_MODEL, tuple(s.id for s in sequences), lengths, (prompt,) * len(lengths)
    )
    tokens, taps, final = (torch.cat([getattr(s, name) for s in sequences]) for name in ("tokens", "taps", "final"))
    return FeatureStore([(meta, (tokens, taps, final))])
