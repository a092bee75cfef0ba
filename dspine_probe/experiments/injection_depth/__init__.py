"""What the true predecessor is worth, injected at each depth. Entry points: `train_injectors`, `injection_depth`."""

from dspine_probe.experiments.injection_depth.measure import InjectionConfig, injection_depth
from dspine_probe.experiments.injection_depth.objective import InjectionPlan
from dspine_probe.experiments.injection_depth.result import InjectionDepthResult
from dspine_probe.experiments.injection_depth.store import InjectorSet, shipped_injectors
from dspine_probe.experiments.injection_depth.training import train_injectors

__all__ = [
    "InjectionConfig",
    "InjectionDepthResult",
    "InjectionPlan",
    "InjectorSet",
    "injection_depth",
    "shipped_injectors",
    "train_injectors",
]
