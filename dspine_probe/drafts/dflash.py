"""DFlash: every slot of the block predicted in parallel, each from its own marginal (arXiv 2602.06036).

The plain backbone is the whole draft; DSpine reduces to it when its writes are zero.
"""

from __future__ import annotations

from dspine_probe.config import DFLASH
from dspine_probe.drafts.backbone import Backbone
from dspine_probe.drafts.registry import register


@register("dflash", architecture=DFLASH, objective="dspine_probe.training.objectives.dflash:DFlashObjective")
class DFlash(Backbone):
    """The plain parallel draft."""
