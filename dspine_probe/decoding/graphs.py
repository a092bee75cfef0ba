"""Steps of fixed shape: captured once as a CUDA graph and replayed, or run as they are with the reason why.

A `FixedStep` owns the buffers its function reads. A caller hands in values, which are copied there, and gets the
function's outputs; after a capture these are the same tensors every time, overwritten by the next call. Nothing in a
step waits for the device, so a round of several steps has one wait, where its result is fetched.

A captured pass runs past hooks. `frozen` marks a module, as captured modules are marked by torch, so that `HookedDraft`
refuses it. Entry points: `FixedStep`, `capturing`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspine_probe.errors import UsageError

Outputs = tuple[Tensor, ...]
Replay = Callable[[], None]
Capture = Callable[[Callable[[], Outputs]], tuple[Replay, Outputs]]

WARM_UPS = 2  # lets kernels compile and libraries allocate what must not happen during capture


@dataclass(frozen=True)
class Capturing:
    """How the steps of an engine are captured; without `capture` they run eagerly, for `reason`."""

    capture: Capture | None
    reason: str | None = None


def capturing(device: torch.device) -> Capturing:
    """CUDA graphs that share one memory pool, or why there are none."""
    if device.type != "cuda":
        return Capturing(None, f"CUDA graphs need a CUDA device, and the weights are on {device}")
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        main, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                run()
        main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            outputs = run()
        return graph.replay, outputs

    return Capturing(capture)


class FixedStep:
    """A function of tensors whose shapes never change.

    The function must give the same results when run again on the same values (what it writes elsewhere, such as a
    cache, included), because a capture runs it several times.

    Args:
        function: takes tensors by name, returns tensors.
        how: how to capture it.
        source: a step whose outputs the function takes first. They stay where they are only if that step is captured,
            so this one is captured only then, and called only after it.
    """

    def __init__(self, function: Callable[..., Outputs], how: Capturing, *, source: FixedStep | None = None) -> None:
        self.function, self.how, self.source = function, how, source
        self.buffers: dict[str, Tensor] = {}
        self.reason = how.reason
        self.outputs: Outputs = ()
        self._replay: Replay | None = None

    def __call__(self, **values: Tensor) -> Outputs:
        """Results for these values. The first call fixes shapes and types, and captures.

        Raises:
            UsageError: the values are not those of the first call in name, shape, type or device.
        """
        self._take(values)
        if self._replay is None and self.reason is None:
            self._capture()
        if self._replay is None:
            self.outputs = self._run()
        else:
            self._replay()
        return self.outputs

    @property
    def captured(self) -> bool:
        """Whether calls replay a graph."""
        return self._replay is not None

    def _run(self) -> Outputs:
        return self.function(*(self.source.outputs if self.source else ()), **self.buffers)

    def _take(self, values: dict[str, Tensor]) -> None:
        if not self.buffers:
            self.buffers = {name: value.clone() for name, value in values.items()}
            return
        if values.keys() != self.buffers.keys():
            raise UsageError(f"this step takes {sorted(self.buffers)}, but was given {sorted(values)}")
        for name, value in values.items():
            buffer = self.buffers[name]
            for what in ("shape", "dtype", "device"):
                given, fixed = getattr(value, what), getattr(buffer, what)
                if given != fixed:
                    raise UsageError(
                        f"{name} has {what} {given}, but this step was made for {fixed}; make another step for it"
                    )
            buffer.copy_(value, non_blocking=True)

    def _capture(self) -> None:
        assert self.how.capture is not None
        if self.source is not None and not self.source.captured:
            self.reason = f"the step before it is not captured ({self.source.reason})"
            return
        try:
            self._replay, self.outputs = self.how.capture(self._run)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # an operation that a graph cannot hold
            self.reason = f"the capture failed: {str(error).splitlines()[0]}"


def frozen(module: nn.Module, owner: object) -> None:
    """Mark a module as run by other means, as long as `owner` lives."""
    held = vars(module)
    held["forward"] = module.forward  # what `torch.cuda.make_graphed_callables` leaves, too
    held["_frozen_by"] = held.get("_frozen_by", 0) + 1
    weakref.finalize(owner, _thaw, held).atexit = False


def _thaw(held: dict[str, object]) -> None:
    owners = held["_frozen_by"] = int(held["_frozen_by"]) - 1  # type: ignore[call-overload]
    if not owners:
        del held["forward"], held["_frozen_by"]
