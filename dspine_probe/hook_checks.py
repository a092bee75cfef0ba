"""What makes hooks safe: drafts that would run past them and edits that do not fit are refused.

`refuse_frozen` looks for compiled and graph-captured parts; `adapted` brings a hook into TransformerLens' calling form,
and `checked` also looks at what it returns, because a wrong shape would broadcast and a wrong dtype spread unseen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from dspine_probe.errors import UsageError

Hook = Callable[[Tensor, HookPoint], Tensor | None]


def refuse_frozen(module: nn.Module) -> None:
    """Refuse modules that would run past their hooks.

    Raises:
        UsageError: a part is compiled, scripted or replaced by a captured graph, or a CUDA graph is being captured.
    """
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        raise UsageError("hooks cannot act inside torch.compile or a CUDA graph; run the draft eagerly.")
    for name, part in module.named_modules():
        # torch.compile(module) wraps, module.compile() sets the second, graphed and compiled callables put a `forward`.
        compiled = hasattr(part, "_orig_mod") or part._compiled_call_impl is not None or "forward" in vars(part)
        compiled |= any(hasattr(value, "_torchdynamo_orig_callable") for value in vars(part).values())
        if compiled or isinstance(part, torch.jit.ScriptModule):
            where = f"its part {name!r}" if name else "it"
            raise UsageError(
                f"hooks on this {type(module).__name__} would be ignored because {where} is compiled or "
                "graph-captured; hook the draft before compiling it, or load it again."
            )


def adapted(hook: Hook) -> Callable[..., Tensor | None]:
    """The hook in TransformerLens' calling form, whatever its second parameter is called."""
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):
        raise UsageError(f"{hook!r} is no hook; give a function of (tensor, hook point).") from None
    if _binds(signature, 2):
        return lambda tensor, *, hook, call=hook: call(tensor, hook)
    if _binds(signature, 1, "hook"):
        return hook
    raise UsageError(f"the hook {hook!r} takes {signature}; it must take (tensor, hook point).")


def _binds(signature: inspect.Signature, positional: int, *keywords: str) -> bool:
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


def checked(hook: Hook) -> Callable[..., Tensor | None]:
    """The hook in that form; results that are no tensor of the shape, dtype and device it was given are refused."""
    call = adapted(hook)

    def run(tensor: Tensor, *, hook: HookPoint) -> Tensor | None:
        edited: Any = call(tensor, hook=hook)
        if edited is None:
            return None
        if not isinstance(edited, Tensor):
            raise UsageError(f"the hook on {hook.name} returned a {type(edited).__name__}; return a tensor or None.")
        for what in ("shape", "dtype", "device"):
            given, wanted = getattr(edited, what), getattr(tensor, what)
            if given != wanted:
                given, wanted = (tuple(each) if what == "shape" else each for each in (given, wanted))
                raise UsageError(f"the hook on {hook.name} returned {what} {given}; this hook point carries {wanted}.")
        return edited

    return run
