"""Probe the draft models of speculative decoding: hook them, train them, measure them.

    import dspine_probe as dp
    print(dp.Lab().generate("Name three rivers."))

The names below are imported when first used, so that importing the package costs nothing; everything else is in the
modules themselves.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspine_probe.decoding.generate import generate
    from dspine_probe.drafts.checkpoint import load_draft
    from dspine_probe.hooks import HookedDraft
    from dspine_probe.lab import Lab, load_target

__version__ = "0.1.0"
__all__ = ["HookedDraft", "Lab", "generate", "load_draft", "load_target"]

_HOMES = {
    "HookedDraft": "dspine_probe.hooks",
    "Lab": "dspine_probe.lab",
    "generate": "dspine_probe.decoding.generate",
    "load_draft": "dspine_probe.drafts.checkpoint",
    "load_target": "dspine_probe.lab",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
