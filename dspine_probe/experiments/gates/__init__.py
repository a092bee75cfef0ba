"""What the gates of a DSpine follow, and what it costs to clamp them. Entry point: `gates`."""

from dspine_probe.experiments.gates.measure import GatesConfig, gates
from dspine_probe.experiments.gates.table import GatesResult

__all__ = ["GatesConfig", "GatesResult", "gates"]
