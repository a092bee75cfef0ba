"""Parallel draft models: one file, one kind. Importing this package registers its kinds (`registry`)."""

from dspine_probe.drafts.backbone import Backbone, Context
from dspine_probe.drafts.dflash import DFlash
from dspine_probe.drafts.dflash2 import DFlash2
from dspine_probe.drafts.domino import Domino
from dspine_probe.drafts.dspark import DSpark
from dspine_probe.drafts.dspine import DSpine
from dspine_probe.drafts.eagle3 import Eagle3

Draft = Backbone

__all__ = ["Backbone", "Context", "DFlash", "DFlash2", "DSpark", "DSpine", "Domino", "Draft", "Eagle3"]
