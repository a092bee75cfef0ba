"""Parallel draft models: one file, one idea."""

from dspine_probe.drafts.backbone import Backbone, Context
from dspine_probe.drafts.dflash import DFlash
from dspine_probe.drafts.dspine import DSpine

Draft = DFlash | DSpine

__all__ = ["Backbone", "Context", "DFlash", "DSpine", "Draft"]
