"""How many tokens a round commits: acceptance of drafts on prompts. Entry point: `evaluate`."""

from dspine_probe.experiments.acceptance.counts import AcceptanceCounts, RequestCounts, count_rounds
from dspine_probe.experiments.acceptance.measure import evaluate
from dspine_probe.experiments.acceptance.table import AcceptanceResult

__all__ = ["AcceptanceCounts", "AcceptanceResult", "RequestCounts", "count_rounds", "evaluate"]
