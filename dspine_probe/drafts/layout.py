"""The public tensor layout of DFlash and DSpine checkpoints, and the drafts it describes.

`to_public` names a draft's tensors as public checkpoints do; `from_public` builds the draft back and refuses tensors
that are unknown, missing or of another shape. Embedding and head are the target's and never part of the layout. A
trimmed vocabulary is `d2t` (offsets: token id = index + d2t[index]) and `t2d` (which token ids are kept). DSpine's
codes are stored as the public table, or as the much smaller map from which the target's head gives them. No files are
touched here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dspine_probe.config import DSPINE, DraftConfig
from dspine_probe.drafts import DFlash, Draft, DSpine
from dspine_probe.drafts.dspine import require_dspine
from dspine_probe.errors import UsageError
from dspine_probe.transfer import codes_from_projection

CODES, READY, MEAN, PROJECTION = "transfer_codes", "transfer_ready", "transfer_mean", "transfer_projection"
_PUBLIC = {
    "blocks": "layers",
    "attn": "self_attn",
    "ln1": "input_layernorm",
    "ln2": "post_attention_layernorm",
    "ln_final": "norm",
}


def to_public(draft: Draft, dtype: torch.dtype, *, full_codes: bool = False) -> dict[str, Tensor]:
    """The draft's tensors under public names: weights in `dtype`, transfer tensors in fp32, all on CPU.

    A DSpine that was loaded from a table of codes has no map, so it is stored with the table in any case.
    """
    tensors = {
        public_name(name): weight.detach().to("cpu", dtype) for name, weight in draft.named_parameters()
    }
    if draft.vocabulary is not None:
        kept = draft.vocabulary.cpu()
        tensors["d2t"] = kept - torch.arange(len(kept))
        tensors["t2d"] = torch.zeros(draft.config.vocab_size, dtype=torch.bool).index_fill_(0, kept, True)
    if isinstance(draft, DSpine):
        tensors |= _transfer(draft, full_codes)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def from_public(
    config: DraftConfig,
    tensors: Mapping[str, Tensor],
    embedding: Float[Tensor, "vocab d_model"],
    head: Float[Tensor, "vocab d_model"],
) -> Draft:
    """The draft of a checkpoint's tensors, beside the target's embedding and head, in their dtype and on their device.

    Raises:
        UsageError: a tensor is unknown, missing, or does not have the shape that the config gives it.
    """
    left = {name: tensor.to(head.device) for name, tensor in tensors.items()}
    vocabulary = _take_vocabulary(left, config)
    # Built without storage: every parameter is then assigned from the file.
    if config.architecture == DSPINE:
        codes, mean, projection = _take_codes(left, config, head)
        with torch.device("meta"):
            spine = DSpine(config, embedding, head, vocabulary=vocabulary, codes=codes)
        spine.transfer_mean, spine.transfer_projection = mean, projection
        draft: Draft = spine
    else:
        with torch.device("meta"):
            draft = DFlash(config, embedding, head, vocabulary=vocabulary)
    _assign(draft, left, head.dtype)
    return draft


def public_name(name: str) -> str:
    """The public name of a parameter of ours."""
    return ".".join(_PUBLIC.get(part, part) for part in name.split("."))


def _assign(draft: Draft, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    ours = {public_name(name): name for name, _ in draft.named_parameters()}
    _refuse("unknown tensors", tensors.keys() - ours.keys(), draft.config)
    _refuse("no tensors", ours.keys() - tensors.keys(), draft.config)
    for public, name in ours.items():
        owner, _, leaf = name.rpartition(".")
        module = draft.get_submodule(owner)
        _check_shape(public, tensors[public], tuple(getattr(module, leaf).shape), draft.config)
        setattr(module, leaf, nn.Parameter(tensors[public].to(dtype)))


def _refuse(fault: str, names: set[str], config: DraftConfig) -> None:
    if names:
        first = sorted(names)
        more = f" and {len(first) - 3} more" if len(first) > 3 else ""
        raise UsageError(
            f"the checkpoint has {fault} {', '.join(first[:3])}{more}; its config.json describes a "
            f"{config.architecture} of {config.num_hidden_layers} layers, whose tensors must be there exactly"
        )


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...], config: DraftConfig) -> None:
    found = tuple(tensor.shape)
    if found == expected:
        return
    if name == "fc.weight":
        raise UsageError(
            f"fc.weight is {found}, but {len(config.target_layer_ids)} taps {list(config.target_layer_ids)} of width "
            f"{config.hidden_size} need {expected}; give the target_layer_ids that the draft was trained with"
        )
    raise UsageError(
        f"{name} is {found}, but config.json asks for {expected}; the two belong to different drafts"
    )


def _take_vocabulary(tensors: dict[str, Tensor], config: DraftConfig) -> Int[Tensor, "draft_vocab"] | None:
    if config.draft_vocab_size is None:
        return None
    _refuse("no tensors", {"d2t", "t2d"} - tensors.keys(), config)
    offsets, kept = tensors.pop("d2t").long(), tensors.pop("t2d").bool()
    _check_shape("d2t", offsets, (config.draft_vocab_size,), config)
    _check_shape("t2d", kept, (config.vocab_size,), config)
    tokens = offsets + torch.arange(len(offsets), device=offsets.device)
    if not torch.equal(tokens.sort().values, kept.nonzero()[:, 0]):
        raise UsageError(
            "d2t and t2d name different tokens; d2t must hold offsets (token id minus draft id), not ids"
        )
    return tokens


def _transfer(draft: DSpine, full_codes: bool) -> dict[str, Tensor]:
    if full_codes or draft.transfer_mean is None or draft.transfer_projection is None:
        return {CODES: draft.codes.float().cpu(), READY: torch.tensor(True)}
    return {MEAN: draft.transfer_mean.float().cpu(), PROJECTION: draft.transfer_projection.float().cpu()}


def _take_codes(
    tensors: dict[str, Tensor], config: DraftConfig, head: Float[Tensor, "vocab d_model"]
) -> tuple[
    Float[Tensor, "vocab rank"], Float[Tensor, "d_model"] | None, Float[Tensor, "d_model rank"] | None
]:
    """Codes of every token, with the map that makes them if that is what the checkpoint stores."""
    rank = require_dspine(config).transfer_rank
    if CODES in tensors:
        codes, ready = tensors.pop(CODES).float(), tensors.pop(READY, None)
        _check_shape(CODES, codes, (config.vocab_size, rank), config)
        if ready is not None and not bool(ready):
            raise UsageError(
                "transfer_ready is false, so the transfer codes were never filled in; save the draft again"
            )
        return codes, None, None
    _refuse("no tensors", {MEAN, PROJECTION} - tensors.keys(), config)
    mean, projection = tensors.pop(MEAN).float(), tensors.pop(PROJECTION).float()
    _check_shape(MEAN, mean, (config.hidden_size,), config)
    _check_shape(PROJECTION, projection, (config.hidden_size, rank), config)
    return codes_from_projection(head, mean, projection), mean, projection
