"""Hooks on a draft: TransformerLens `HookPoint`s in the places the draft marks with Identity modules.

`HookedDraft(draft)` swaps the marks for hook points under the same names, shares every weight, and puts the marks back
on `close()` (or at the end of a `with`, or when it is garbage collected). A hook is a function of (tensor, hook point)
that returns a tensor of the same shape and dtype to edit the value, or None to leave it.

The hook points sit in the draft itself, so whatever runs the draft inside `hooks()`, a decoding loop included, feels
them. Entry points: `run_with_cache`, `run_with_hooks`, `hooks`, `hook_table`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Literal, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint, LensHandle

from dspine_probe.drafts import Context, Draft
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.hook_cache import DraftCache, lens_config
from dspine_probe.hook_checks import Hook, adapted, checked, refuse_frozen
from dspine_probe.hook_names import HookRow, describe, fires_in_pass

Names = str | Collection[str] | Callable[[str], bool] | None
Seam = tuple[nn.Module, str, nn.Module]


class DraftHookPoint(HookPoint):
    """A hook point whose copies and pickles are the draft's own mark: a copied draft has no hooks."""

    def __reduce__(self) -> tuple[type[nn.Identity], tuple[()]]:
        return nn.Identity, ()


class HookedDraft(HookedRootModule):
    """A draft whose marked values can be read and edited."""

    draft: Draft
    hook_dict: dict[str, HookPoint]

    def __init__(self, draft: Draft) -> None:
        """Hook `draft`, which stays usable by itself.

        Raises:
            UsageError: the draft has no marks, is hooked already, or is compiled or captured so that hooks would be
                ignored without a word.
        """
        super().__init__()
        refuse_frozen(draft)
        if any(isinstance(module, HookPoint) for module in draft.modules()):
            raise UsageError("this draft is hooked already; use that HookedDraft, or close() it first.")
        seams: list[Seam] = [
            (parent, name, child)
            for parent in draft.modules()
            for name, child in parent.named_children()
            if name.startswith("hook_") and isinstance(child, nn.Identity)
        ]
        if not seams:
            raise UsageError(f"{type(draft).__name__} has no hook_* modules; give a DFlash or DSpine draft.")
        for parent, name, _ in seams:
            setattr(parent, name, DraftHookPoint())
        self.draft = draft
        self.cfg = lens_config(draft)
        self._restore = weakref.finalize(self, _put_back, seams)
        self._restore.atexit = False
        self.hook_dict = {n: m for n, m in self.draft.named_modules() if isinstance(m, HookPoint)}
        for name, point in self.hook_dict.items():
            point.name = name
        self.mod_dict = self.hook_dict

    def close(self) -> None:
        """Remove every hook and put the draft's own marks back; later calls of this object are refused."""
        if self._restore.alive:
            self.reset_hooks(including_permanent=True)
            self._restore()

    def __reduce__(self) -> tuple[type[HookedDraft], tuple[Draft]]:
        """A copy or pickle hooks a copy of the draft, without the hooks that are on."""
        return type(self), (self.draft,)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- running

    def forward(
        self,
        taps: Float[Tensor, "batch ctx taps_d_model"],
        anchor_tokens: Int[Tensor, "batch anchor"],
        anchors: Int[Tensor, "batch anchor"],
        *,
        width: int | None = None,
    ) -> Float[Tensor, "block draft_slot draft_vocab"]:
        """The draft's full pass: unary scores of slots 1…T. Every hook point fires once, `last_write.*` not at all."""
        self._refuse_unusable()
        return self.draft(taps, anchor_tokens, anchors, width=width)

    def run_with_hooks(
        self,
        taps: Float[Tensor, "batch ctx taps_d_model"],
        anchor_tokens: Int[Tensor, "batch anchor"],
        anchors: Int[Tensor, "batch anchor"],
        *,
        width: int | None = None,
        fwd_hooks: Iterable[tuple[Names, Hook]] = (),
    ) -> Float[Tensor, "block draft_slot draft_vocab"]:
        """One full pass under `fwd_hooks`, which are gone afterwards, also when one of them raises.

        For hooks on gradients use `hooks(bwd_hooks=…)` around the forward and the backward pass.

        Raises:
            UsageError: a name is unknown, or names a hook point that the full pass does not reach.
        """
        with self.hooks([(self._in_pass(names), hook) for names, hook in fwd_hooks]):
            return self(taps, anchor_tokens, anchors, width=width)

    def run_with_cache(
        self,
        taps: Float[Tensor, "batch ctx taps_d_model"],
        anchor_tokens: Int[Tensor, "batch anchor"],
        anchors: Int[Tensor, "batch anchor"],
        *,
        width: int | None = None,
        names_filter: Names = None,
        device: torch.device | str | None = None,
        grad: bool = False,
    ) -> tuple[Float[Tensor, "block draft_slot draft_vocab"], DraftCache]:
        """One full pass and a copy of what the chosen hook points saw.

        Hooks that are on already act first, so the cache holds edited values.

        Args:
            names_filter: a name, a collection of names, or a predicate on names; by default everything in the pass.
            device: where to keep the copies; by default where they are made.
            grad: build the autograd graph; cached tensors are detached either way.

        Raises:
            UsageError: a name is unknown, the filter matches nothing, or names what the full pass does not reach.
        """
        cache, fwd_hooks, _ = self.get_caching_hooks(self._in_pass(names_filter), device)
        # Whatever mode the caller is in; tensors made in inference mode have no gradient, their copies do.
        with torch.inference_mode(False), torch.set_grad_enabled(grad), self.hooks(fwd_hooks):
            taps, anchor_tokens, anchors = (
                given.clone() if given.is_inference() else given for given in (taps, anchor_tokens, anchors)
            )
            logits = self(taps, anchor_tokens, anchors, width=width)
        return logits, DraftCache(cache, self)

    def encode_context(
        self, taps: Float[Tensor, "batch ctx taps_d_model"], *, start: int | Int[Tensor, "batch"] = 0
    ) -> Context:
        """The draft's `encode_context`, under whatever hooks are on."""
        self._refuse_unusable()
        return self.draft.encode_context(taps, start=start)

    def draft_greedy(
        self,
        context: Context,
        anchor_tokens: Int[Tensor, "batch anchor"],
        anchors: Int[Tensor, "batch anchor"],
        *,
        width: int | None = None,
    ) -> Int[Tensor, "block draft_slot"]:
        """The tokens the draft would propose, under whatever hooks are on.

        A DSpine chooses its candidates by the hooked scores but ranks them by its last-write refinement, which starts
        from the last layer's state before the injection: edits up to that state reach both, edits after it reach the
        candidates alone, and edits at `last_write.*` reach the ranking alone.
        """
        self._refuse_unusable()
        return self.draft.draft_greedy(context, anchor_tokens, anchors, width=width)

    # ---- hooks

    @contextmanager
    def hooks(
        self, fwd_hooks: Iterable[tuple[Names, Hook]] = (), bwd_hooks: Iterable[tuple[Names, Hook]] = ()
    ) -> Iterator[Self]:
        """Hooks for the length of a `with` block; those set outside it are left alone.

        Raises:
            UsageError: a name is unknown or a hook cannot be called with (tensor, hook point); nothing is hooked then.
        """
        self._refuse_unusable()
        forward = [(name, checked(fn)) for names, fn in fwd_hooks for name in self.names(names)]
        backward = [(name, adapted(fn)) for names, fn in bwd_hooks for name in self.names(names)]
        with super().hooks(forward, backward):
            yield self

    def add_hook(
        self,
        name: Names,
        hook: Hook,
        dir: Literal["fwd", "bwd"] = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> list[LensHandle]:
        """A hook that stays until `reset_hooks()` or `close()`; prefer `hooks()`. Arguments as in TransformerLens."""
        self._refuse_unusable()
        wrapped = checked(hook) if dir == "fwd" else adapted(hook)
        handles = []
        for point in (self.hook_dict[n] for n in self.names(name)):
            handle = point.add_hook(wrapped, dir=dir, is_permanent=is_permanent, level=level, prepend=prepend)
            handle.user_hook = hook
            handles.append(handle)
        return handles

    def get_caching_hooks(
        self, names_filter: Names = None, device: torch.device | str | None = None
    ) -> tuple[dict[str, Tensor], list[tuple[str, Hook]], list[tuple[str, Hook]]]:
        """An empty cache, the forward hooks that fill it with copies, and no backward hooks."""
        cache: dict[str, Tensor] = {}

        def save(tensor: Tensor, hook: HookPoint) -> None:
            if hook.name in cache:
                raise ProbeError(f"{hook.name} fired twice in one pass; cache one pass at a time.")
            cache[str(hook.name)] = tensor.detach().to(device, copy=True)

        return cache, [(name, save) for name in self.names(names_filter)], []

    def names(self, wanted: Names = None) -> list[str]:
        """The hook points that `wanted` (a name, names, a predicate, or None for all) stands for.

        Raises:
            UsageError: one name is unknown, or nothing matches.
        """
        if wanted is None:
            return list(self.hook_dict)
        if callable(wanted):
            found = [name for name in self.hook_dict if wanted(name)]
        else:
            found = list(dict.fromkeys([wanted] if isinstance(wanted, str) else wanted))
            for name in found:
                if name not in self.hook_dict:
                    nearest = get_close_matches(str(name), self.hook_dict, n=1, cutoff=0.3)
                    advice = f"did you mean {nearest[0]!r}?" if nearest else "hook_table() lists them."
                    raise UsageError(f"there is no hook point {name!r} in this {type(self.draft).__name__}; {advice}")
        if not found:
            raise UsageError("the filter matches no hook point; hook_table() lists them.")
        return found

    def hook_table(self) -> list[HookRow]:
        """Name, shape, dtype, occasion and meaning of every hook point, in the order in which they lie in the draft."""
        return [describe(name, self.draft) for name in self.hook_dict]

    # ---- refusals

    def _in_pass(self, wanted: Names) -> list[str]:
        """Names that the full pass reaches; one asked for by name that it does not reach is refused."""
        found = self.names(wanted)
        reached = [name for name in found if fires_in_pass(name, self.draft)]
        by_name = wanted is not None and not callable(wanted)
        if not reached or (by_name and len(reached) < len(found)):
            late = next(name for name in found if not fires_in_pass(name, self.draft))
            raise UsageError(
                f"{late} fires when the transition cache is built, not in the full pass; "
                "put hooks() or get_caching_hooks() around draft_greedy."
            )
        return reached

    def _refuse_unusable(self) -> None:
        if not self._restore.alive:
            raise ProbeError("this HookedDraft is closed; wrap the draft again.")
        refuse_frozen(self)


def _put_back(seams: list[Seam]) -> None:
    for parent, name, identity in seams:
        setattr(parent, name, identity)
