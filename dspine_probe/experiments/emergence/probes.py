"""Linear probes with a control task, beside the translators of the emergence experiment.

A probe is a standardised multinomial logistic regression that names the label among the commonest label tokens; one per
depth, shared by all slots, its penalty chosen on validation prompts. The control task gives every anchor token type a
fixed random class: what a probe can learn there it owes to its own capacity. Selectivity is task minus control.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.experiments.emergence.readings import Readings

TASK, CONTROL = "trained", "control task"
Masks = Sequence[Bool[Tensor, "label"]]


@dataclass(frozen=True)
class LinearProbeConfig:
    """Size limits and the penalties to choose from (inverse strengths C, log-spaced)."""

    classes: int = 64
    rows: int = 2000
    penalties: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    max_iterations: int = 300
    seed: int = 0


@dataclass(frozen=True)
class ProbeOutcome:
    """Ranks (0 is first) of the test labels, and which of them were among the classes at all."""

    ranks: Int[Tensor, "depth label draft_slot"]
    rows: Bool[Tensor, "label"]


def linear_probes(
    readings: Readings, masks: Masks, config: LinearProbeConfig
) -> Iterator[tuple[str, ProbeOutcome]]:
    """Probe every depth for the label and for the control class.

    Args:
        masks: which labels belong to training, validation and test prompts.

    Raises:
        UsageError: the training labels show fewer than two classes, or another part shows none of them.
        ProbeError: no penalty lets the fit converge.
    """
    classes = _commonest(readings.labels[masks[0]], config.classes)
    asked = torch.isin(readings.labels, classes)
    slots = readings.anchors.shape[1]
    task = torch.searchsorted(classes, readings.labels.clamp(max=int(classes[-1])))[:, None].expand(-1, slots)
    control = _random_classes(readings.anchors, task[masks[0] & asked].flatten(), config.seed)
    parts = [mask & asked for mask in masks]
    if not all(part.any() for part in parts):
        raise UsageError(
            f"no label of one part is among the {len(classes)} commonest; give more classes or more prompts."
        )
    for condition, wanted in ((TASK, task), (CONTROL, control)):
        ranked = torch.full((len(readings.states), int(masks[2].sum()), slots), len(classes))
        for depth, states in enumerate(readings.states):
            ranked[depth, asked[masks[2]]] = _probe(states, wanted, parts, config)
        yield condition, ProbeOutcome(ranked, asked[masks[2]])


def _probe(
    states: Float[Tensor, "label slot d_model"],
    wanted: Int[Tensor, "label slot"],
    parts: Masks,
    config: LinearProbeConfig,
) -> Int[Tensor, "test slot"]:
    x = states.float().cpu().numpy()
    train_x, train_y = _sample(x, wanted.numpy(), parts[0], config)
    check_x, check_y = _sample(x, wanted.numpy(), parts[1], config)
    best, chosen = -1.0, None
    for penalty in config.penalties:
        probe = _fit(train_x, train_y, penalty, config.max_iterations)
        score = -1.0 if probe is None else probe.score(check_x, check_y)
        if score > best:
            best, chosen = score, probe
    if chosen is None:
        raise ProbeError("no linear probe converged; raise max_iterations or give stronger penalties.")
    test = parts[2].numpy()
    order = np.argsort(-chosen.decision_function(x[test].reshape(-1, x.shape[-1])), axis=1)
    ranked = chosen.classes_[order] == wanted.numpy()[test].reshape(-1, 1)
    place = np.where(ranked.any(1), ranked.argmax(1), config.classes)
    return torch.from_numpy(place).view(-1, x.shape[1])


def _fit(x: np.ndarray, y: np.ndarray, penalty: float, iterations: int) -> Pipeline | None:
    """The fitted probe, or None when it did not converge."""
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=penalty, max_iter=iterations))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        try:
            return probe.fit(x, y)
        except ConvergenceWarning:
            return None


def _sample(
    x: np.ndarray, y: np.ndarray, part: Bool[Tensor, "label"], config: LinearProbeConfig
) -> tuple[np.ndarray, np.ndarray]:
    inside = part.numpy()
    flat_x, flat_y = x[inside].reshape(-1, x.shape[-1]), y[inside].reshape(-1)
    rows = np.random.default_rng(config.seed).permutation(len(flat_y))[: config.rows]
    return flat_x[rows], flat_y[rows]


def _commonest(labels: Int[Tensor, "label"], most: int) -> Int[Tensor, "class"]:
    kinds, counts = labels.unique(return_counts=True)
    if len(kinds) < 2:
        raise UsageError("the training labels are all one token; a linear probe needs two classes or more.")
    return kinds[counts.argsort(descending=True, stable=True)[:most]].sort().values


def _random_classes(
    types: Int[Tensor, "label slot"], classes: Int[Tensor, "row"], seed: int
) -> Int[Tensor, "label slot"]:
    """A class for every token type, drawn from the task's own distribution of classes."""
    kinds, which = types.unique(return_inverse=True)
    draws = torch.randint(len(classes), (len(kinds),), generator=derive_generator(seed, "control task"))
    return classes[draws][which]
