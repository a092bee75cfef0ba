"""The public tensor layout of draft checkpoints, and the drafts it describes.

`to_public` names a draft's tensors as public checkpoints do; `from_public` builds the draft back and refuses tensors
that are unknown, missing or of another shape. Embedding and head are the target's; some public releases hold copies. A
trimmed vocabulary is `d2t` (offsets: token id = index + d2t[index]) and `t2d` (which token ids are kept). What a kind
stores in addition it names itself (`Borrowed.own_tensors`, `Borrowed.build`). No files are touched here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dspine_probe.config import DraftConfig
from dspine_probe.drafts.backbone import Backbone
from dspine_probe.drafts.borrowed import Borrowed
from dspine_probe.drafts.registry import Kind
from dspine_probe.errors import UsageError

_PUBLIC = {
    "blocks": "layers",
    "attn": "self_attn",
    "ln1": "input_layernorm",
    "ln2": "post_attention_layernorm",
    "ln_final": "norm",
}


def to_public(draft: Backbone, dtype: torch.dtype, *, full_codes: bool = False) -> dict[str, Tensor]:
    """The draft's tensors under public names: weights in `dtype`, transfer tensors in fp32, all on CPU.

    `full_codes` spells out a table of codes where the draft has a small map that makes them, and the target's
    matrices where public releases of the kind hold them.
    """
    tensors = {public_name(name): weight.detach().to("cpu", dtype) for name, weight in draft.named_parameters()}
    if draft.vocabulary is not None:
        kept = draft.vocabulary.cpu()
        tensors["d2t"] = kept - torch.arange(len(kept))
        tensors["t2d"] = torch.zeros(draft.config.vocab_size, dtype=torch.bool).index_fill_(0, kept, True)
    tensors |= draft.own_tensors(full=full_codes)
    if full_codes and draft.stores_borrowed:
        tensors |= _borrowed_tensors(draft)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def from_public(
    kind: Kind,
    config: DraftConfig,
    tensors: Mapping[str, Tensor],
    embedding: Float[Tensor, "vocab d_model"],
    head: Float[Tensor, "vocab d_model"],
) -> Backbone:
    """The draft of a checkpoint's tensors, beside the target's embedding and head, in their dtype and on their device.

    Raises:
        UsageError: a tensor is unknown, missing, or does not have the shape that the config gives it.
    """
    left = {name: tensor.to(head.device) for name, tensor in tensors.items()}
    vocabulary = _take_vocabulary(left, config)
    # Built without storage: every parameter is then assigned from the file.
    draft: Backbone = kind.draft.build(config, embedding, head, vocabulary, left)
    if draft.stores_borrowed:
        _take_borrowed(draft, left)
    _assign(draft, left, head.dtype)
    return draft


def public_name(name: str) -> str:
    """The public name of a parameter of ours."""
    return ".".join(_PUBLIC.get(part, part) for part in name.split("."))


def _assign(draft: Backbone, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    ours = {public_name(name): name for name, _ in draft.named_parameters()}
    refuse_names("unknown tensors", tensors.keys() - ours.keys(), draft.config)
    refuse_names("no tensors", ours.keys() - tensors.keys(), draft.config)
    for public, name in ours.items():
        owner, _, leaf = name.rpartition(".")
        module = draft.get_submodule(owner)
        check_shape(public, tensors[public], tuple(getattr(module, leaf).shape), draft.config)
        setattr(module, leaf, nn.Parameter(tensors[public].to(dtype)))


def refuse_names(fault: str, names: set[str], config: DraftConfig) -> None:
    """Refuse a checkpoint with that fault if any name has it."""
    if names:
        first = sorted(names)
        more = f" and {len(first) - 3} more" if len(first) > 3 else ""
        raise UsageError(
            f"the checkpoint has {fault} {', '.join(first[:3])}{more}; its config.json describes a "
            f"{config.architecture} of {config.num_hidden_layers} layers, whose tensors must be there exactly"
        )


def _borrowed_tensors(draft: Borrowed) -> dict[str, Tensor]:
    """The target's matrices under the names of releases that store them."""
    # Cloned: a file may not hold the same storage twice, which tied matrices would be.
    matrices = {"embed_tokens.weight": draft.embedding, "lm_head.weight": draft.head}
    return {name: matrix.cpu().clone() for name, matrix in matrices.items()}


def _take_borrowed(draft: Borrowed, tensors: dict[str, Tensor]) -> None:
    """Take copies of the target's matrices, where a checkpoint stores them, out of `tensors`.

    Raises:
        UsageError: they are not the target's own, to bf16.
    """
    for name, matrix in (("embed_tokens.weight", draft.embedding), ("lm_head.weight", draft.head)):
        stored = tensors.pop(name, None)
        if stored is None:
            continue
        check_shape(name, stored, tuple(matrix.shape), draft.config)
        if not torch.equal(stored.bfloat16(), matrix.bfloat16()):
            raise UsageError(f"{name} of the checkpoint is not the target's; load the target it belongs to")


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...], config: DraftConfig) -> None:
    """Refuse a tensor that does not have the shape which the config gives it."""
    found = tuple(tensor.shape)
    if found == expected:
        return
    if name == "fc.weight":
        raise UsageError(
            f"fc.weight is {found}, but {len(config.target_layer_ids)} taps {list(config.target_layer_ids)} of width "
            f"{config.hidden_size} need {expected}; give the target_layer_ids that the draft was trained with"
        )
    raise UsageError(f"{name} is {found}, but config.json asks for {expected}; the two belong to different drafts")


def _take_vocabulary(tensors: dict[str, Tensor], config: DraftConfig) -> Int[Tensor, "draft_vocab"] | None:
    if config.draft_vocab_size is None:
        return None
    refuse_names("no tensors", {"d2t", "t2d"} - tensors.keys(), config)
    offsets, kept = tensors.pop("d2t").long(), tensors.pop("t2d").bool()
    check_shape("d2t", offsets, (config.draft_vocab_size,), config)
    check_shape("t2d", kept, (config.vocab_size,), config)
    tokens = offsets + torch.arange(len(offsets), device=offsets.device)
    if not torch.equal(tokens.sort().values, kept.nonzero()[:, 0]):
        raise UsageError("d2t and t2d name different tokens; d2t must hold offsets (token id minus draft id), not ids")
    return tokens
