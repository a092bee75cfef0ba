"""Draft configurations: one frozen dataclass, one Hugging Face style `config.json`.

`DraftConfig` holds what the public checkpoints of parallel drafts keep in their `config.json`, with the same keys
(`dflash_config`, Qwen3 geometry). What only one kind of draft has is a `ConfigPart`, defined beside that draft and
stored under a key of its own (DSpine: `dspine_config`). Training settings are not held, except those that a public
layout stores beside the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from dspine_probe.errors import UsageError

DFLASH = "DFlashDraftModel"
DSPINE = "DSpineDraftModel"
SHARED_KEY = "dflash_config"
"""Architecture names of the public checkpoints, which results record too, and the key of what all kinds share."""


@dataclass(frozen=True)
class ConfigPart:
    """What one kind of draft adds to the configuration; field names are the public keys under `KEY`.

    KEY: a key of its own; "dflash_config", which is shared with mask and taps; or "" for the top level.
    SHIFTED: slot k predicts the token at p + k + 1, so the public `block_size` counts drafted tokens alone.
    FLAT: the public layout keeps mask and taps at the top level, not in `dflash_config`.
    """

    KEY: ClassVar[str]
    SHIFTED: ClassVar[bool] = False
    FLAT: ClassVar[bool] = False

    @classmethod
    def for_target(cls, hidden_size: int) -> Self:
        """The default of a new draft for a target of that width."""
        return cls()

    @classmethod
    def completed(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """A public `config.json` with what files of this kind leave out."""
        return raw

    def write(self, out: dict[str, Any]) -> None:
        """Put the fields where a public `config.json` has them."""
        place = out.setdefault(self.KEY, {}) if self.KEY else out
        place.update(dataclasses.asdict(self))
        if self.FLAT:
            out.update(out.pop(SHARED_KEY))
        out["block_size"] -= self.SHIFTED

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Self | None:
        """The part that a public `config.json` holds; None if it holds none. Only a key of its own is read strictly."""
        place = raw.get(cls.KEY) if cls.KEY else raw
        if place is not None and cls.KEY in ("", SHARED_KEY):
            place = {f.name: place[f.name] for f in dataclasses.fields(cls) if f.name in place} or None
        return None if place is None else cls(**place)


@dataclass(frozen=True)
class DraftConfig:
    """Geometry of a block-parallel draft.

    Slots are unshifted: slot 0 holds the anchor at position p, slot k predicts the token at p + k. Shifted kinds
    (`ConfigPart.SHIFTED`) need one slot less for as many tokens; `block_size` is always the number of drafted tokens
    plus one. `target_layer_ids` are zero-based layers of the target; id l is the residual stream after layer l
    (`hidden_states[l + 1]`). `part` holds what only this kind of draft has. `target_name` says, for messages and
    cards, which target the draft was trained for.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    is_causal: bool
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 40960
    draft_vocab_size: int | None = None
    part: ConfigPart | None = None
    target_name: str | None = None

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise UsageError(
                f"block_size is {self.block_size}; a block needs the anchor and at least one draft slot (2)."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise UsageError(
                f"{self.num_attention_heads} heads cannot share {self.num_key_value_heads} key/value heads evenly."
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise UsageError(
                f"mask_token_id {self.mask_token_id} lies outside the target's embedding (0…{self.vocab_size - 1}); "
                "pass the id of an unused row."
            )
        if not self.target_layer_ids:
            raise UsageError("target_layer_ids is empty; name at least one target layer.")
        check_taps(self.target_layer_ids, self.num_target_layers)

    @property
    def num_slots(self) -> int:
        """Drafted tokens per block, T = block_size − 1."""
        return self.block_size - 1

    def to_dict(self) -> dict[str, Any]:
        """The `config.json` of the public layout."""
        out: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            SHARED_KEY: {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.target_layer_ids)},
        }
        for name in _FLAT_KEYS:
            out[name] = getattr(self, name)
        if self.draft_vocab_size is not None:
            out["draft_vocab_size"] = self.draft_vocab_size
        if self.target_name is not None:
            out["target_name"] = self.target_name
        if self.part is not None:
            self.part.write(out)
        return out

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], part: type[ConfigPart] | None = None) -> DraftConfig:
        """Read a public `config.json` of a kind with that part (`drafts.registry.read_config` knows the kind).

        `block_size` is taken from the top level or from `dflash_config`.
        """
        try:
            raw = raw if part is None else part.completed(raw)
            nested = raw if part is not None and part.FLAT else raw[SHARED_KEY]
            architecture = raw["architectures"][0]
            fields = {name: raw[name] for name in _FLAT_KEYS if name in raw}
            fields.setdefault("block_size", nested.get("block_size"))
            # Full-attention checkpoints without the key are bidirectional in every public release.
            fields.setdefault("is_causal", nested.get("is_causal", False))
            fields["block_size"] += part is not None and part.SHIFTED
            return cls(
                architecture=architecture,
                mask_token_id=nested["mask_token_id"],
                target_layer_ids=tuple(nested["target_layer_ids"]),
                draft_vocab_size=raw.get("draft_vocab_size"),
                part=None if part is None else part.read(raw),
                target_name=raw.get("target_name"),
                **fields,
            )
        except (KeyError, IndexError, TypeError) as error:
            raise UsageError(f"The draft's config.json is not in the public DFlash/DSpine layout: {error}.") from error


_FLAT_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "block_size",
    "num_target_layers",
    "is_causal",
    "rms_norm_eps",
    "rope_theta",
    "max_position_embeddings",
)


def check_taps(taps: Sequence[int], num_target_layers: int) -> None:
    """Refuse taps that are no list of distinct target layers below the last one, which only exists final-normed.

    Raises:
        UsageError: naming the taps and the allowed range.
    """
    if len(set(taps)) != len(taps):
        raise UsageError(f"taps {list(taps)} repeat a layer; name each once.")
    bad = [tap for tap in taps if not 0 <= tap < num_target_layers - 1]
    if bad:
        raise UsageError(
            f"taps {bad} do not fit a target of {num_target_layers} layers; allowed are 0…{num_target_layers - 2} "
            "(the state after the last layer is normed)."
        )


def default_taps(num_target_layers: int, count: int = 5) -> tuple[int, ...]:
    """Evenly spread taps from layer 1 to the third last, as in the public recipes."""
    if count == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count))
