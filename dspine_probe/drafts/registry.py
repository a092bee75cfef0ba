"""The kinds of drafts: what each is called, what its config adds, and who trains it.

A draft's own module registers its class (`@register`), and everything else finds kinds here: checkpoints by the
architecture they name, commands by the kind's name, the trainer by its objective. Objectives are named, not imported,
so drafts do not depend on training. Importing `dspine_probe.drafts` registers the drafts of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from dspine_probe.config import DFLASH, SHARED_KEY, ConfigPart, DraftConfig
from dspine_probe.drafts.public_config import checked
from dspine_probe.errors import UsageError

Class = TypeVar("Class", bound=type)


@dataclass(frozen=True)
class Kind:
    """One kind of draft.

    name: as commands spell it.
    architecture: the public name in `config.json`.
    draft: the class, a `Backbone`.
    objective: "module:class" of what it is trained to do, built from the draft alone.
    part: the class of its own part of the config, if it has one.
    causal: whether its slots may only see earlier ones.
    layers: how many it always has, if that is fixed.
    """

    name: str
    architecture: str
    draft: Any
    objective: str
    part: type[ConfigPart] | None = None
    causal: bool = False
    layers: int | None = None

    def load_objective(self) -> Any:
        """The objective's class, imported now."""
        module, _, name = self.objective.partition(":")
        return getattr(import_module(module), name)

    def check(self, config: DraftConfig) -> None:
        """Refuse a config that does not describe this kind.

        Raises:
            UsageError: another architecture, a part that is missing or foreign, or a bidirectional block.
        """
        if config.architecture != self.architecture:
            raise UsageError(f"the config describes a {config.architecture}, from which no {self.name} can be built.")
        if type(config.part) is not (self.part or type(None)):
            wanted = f"needs a {self.part.KEY or self.part.__name__}" if self.part else "takes no part of another kind"
            raise UsageError(f"{self.architecture} {wanted}; give the config of a {self.name}.")
        if self.layers not in (None, config.num_hidden_layers):
            raise UsageError(f"{self.name} has {self.layers} layer, not {config.num_hidden_layers}.")
        if self.causal and not config.is_causal:
            raise UsageError(
                f"{self.draft.__name__} needs is_causal=True: a bidirectional block would read its own labels."
            )


KINDS: dict[str, Kind] = {}
"""Every kind by its name."""


def register(
    name: str,
    *,
    architecture: str,
    objective: str,
    part: type[ConfigPart] | None = None,
    causal: bool = False,
    layers: int | None = None,
) -> Callable[[Class], Class]:
    """Make a `Backbone` class known under `name`; the arguments are the fields of `Kind`."""

    def known(draft: Class) -> Class:
        kind = Kind(name, architecture, draft, objective, part, causal, layers)
        KINDS[name] = kind
        draft.kind = kind  # type: ignore[attr-defined]
        return draft

    return known


def kind_named(name: str) -> Kind:
    """The kind of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in KINDS:
        raise UsageError(f"draft kind {name!r} is unknown; use one of {', '.join(KINDS)}.")
    return KINDS[name]


def read_config(raw: Mapping[str, Any]) -> tuple[Kind, DraftConfig]:
    """The kind and configuration that a public `config.json` describes.

    Raises:
        UsageError: the architecture is unknown, the config is not in the public layout, or it asks for
            what is not computed.
    """
    named = raw.get("architectures") or [None]
    shared = raw.get(SHARED_KEY)
    head = KINDS.get(str(shared.get("projector_type"))) if isinstance(shared, Mapping) else None
    if named[0] == DFLASH and head is not None and hasattr(head.part, "projector_type"):
        # Some public checkpoints name the backbone's architecture and, beside it, the head that makes another kind.
        named = [head.architecture]
        raw = {**raw, "architectures": named}
    kind = next((kind for kind in KINDS.values() if kind.architecture == named[0]), None)
    if kind is None:
        known = ", ".join(kind.architecture for kind in KINDS.values())
        raise UsageError(f"draft architecture {named[0]!r} is unknown; known are {known}.")
    config = DraftConfig.from_dict(checked(raw, kind.part), kind.part)
    kind.check(config)
    return kind, config
