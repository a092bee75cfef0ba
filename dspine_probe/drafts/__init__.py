"""Parallel draft models: one file, one kind. Importing this package registers its kinds (`registry`)."""

from dspine_probe.drafts.backbone import Backbone, Context
from dspine_probe.drafts.dflash import DFlash
from dspine_probe.drafts.dspine import DSpine

Draft = Backbone

__all__ = ["Backbone", "Context", "DFlash", "DSpine", "Draft"]
