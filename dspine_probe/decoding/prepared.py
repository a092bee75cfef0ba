"""What fast engines prepare of models (packed or fused weights): kept while a model lives, made anew if it changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError
from dspine_probe.target import Target

Made = TypeVar("Made")


class Prepared(Generic[Made]):
    """Prepared forms of targets or drafts, by model.

    Args:
        make: prepares a model; what it returns must not hold on to the model.
    """

    def __init__(self, make: Callable[[Any], Made]) -> None:
        self.make = make
        self._kept: weakref.WeakKeyDictionary[Target | Draft, tuple[Hashable, Made]] = weakref.WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, model: Target | Draft) -> Made:
        """The prepared form of a model as it is now.

        Raises:
            UsageError: a hook is set on it, which the prepared form would run past.
        """
        if isinstance(model, Target):
            module, name = model.model, f"target '{model.name}'"
        else:
            module, name = model, f"the {type(model).__name__}"
        refuse_hooked(module, name)
        state = tuple(_state(tensor) for tensor in (*module.parameters(), *module.buffers()))
        kept = self._kept.get(model)
        if kept is None or kept[0] != state:
            kept = self._kept[model] = state, self.make(model)
        return kept[1]


def refuse_hooked(module: nn.Module, name: str) -> None:
    """Refuse a module that has hooks.

    Raises:
        UsageError: naming the part that a fast engine would run past.
    """
    for path, part in module.named_modules():
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            raise UsageError(
                f"a hook is set on {path or 'the module'} of {name}, and a fast engine would run past it; remove the "
                "hook, or decode with the reference engine"
            )


def _state(tensor: Tensor) -> Hashable:
    """What changes when a tensor is replaced or written to; writes to inference tensors leave no trace."""
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version
