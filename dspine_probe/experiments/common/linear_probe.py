"""A linear probe that cannot be fooled by its split: standardised logistic regression on three parts of whole groups.

Rows of one prompt resemble each other, so a split by row lets a probe recognise the prompt: it then finds labels that
are not in the state at all. `Parts` can only be made of groups, and no group is in two parts. The penalty is chosen on
the validation part, a fit that did not converge is never used and is counted, and the test part is touched once.

A control task gives every token type a random class (`control_labels`; Hewitt and Liang, arXiv 1909.03368): what a
probe learns there it owes to its own capacity. `online_bits` is the description length of labels given states, by
online coding (Voita and Titov, arXiv 2003.12298). Emergence and probing both read with it. Entry points:
`split_groups`, `fit_probe`.
"""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from dspine_probe.errors import ProbeError, UsageError

UNASKED = -1
"""Class of a row that is not asked for anything."""
PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
PORTIONS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)


@dataclass(frozen=True)
class ProbeConfig:
    """Inverse penalties to choose from (C, log-spaced), the most rows to train on, and when a fit has failed."""

    penalties: tuple[float, ...] = PENALTIES
    rows: int = 2048
    max_iterations: int = 1000


@dataclass(frozen=True)
class Parts:
    """Rows to train on, to choose on and to report on; rows may be in none, but no group is in two.

    Raises:
        UsageError: there are fewer than two groups, a part is empty, or a group is in two parts.
    """

    group: Int[Tensor, "row"]
    train: Bool[Tensor, "row"]
    validation: Bool[Tensor, "row"]
    test: Bool[Tensor, "row"]

    def __post_init__(self) -> None:
        if len(self.group.unique()) < 2:
            raise UsageError("all rows are of one prompt; a probe needs prompts to train on and others to test on.")
        seen: set[int] = set()
        for name in ("train", "validation", "test"):
            members = set(self.group[getattr(self, name)].tolist())
            if not members:
                raise UsageError(f"the {name} part is empty; give more prompts or other shares.")
            if members & seen:
                raise UsageError(f"a prompt of the {name} part is in another part too; split by prompt.")
            seen |= members

    def only(self, rows: Bool[Tensor, "row"], *, test_too: bool = True) -> Parts:
        """The same parts without the other rows; with `test_too=False` the test part keeps them."""
        test = self.test & rows if test_too else self.test
        return Parts(self.group, self.train & rows, self.validation & rows, test)

    def repeat(self, times: int) -> Parts:
        """Every row that many times in place, as for the slots of a block."""
        masks = (self.group, self.train, self.validation, self.test)
        return Parts(*(mask.repeat_interleave(times) for mask in masks))


@dataclass(frozen=True)
class Probe:
    """A fitted probe: the penalty that validation chose, how many penalties failed to converge, and scores so far."""

    model: Pipeline
    penalty: float
    failed: int
    rows: int
    train_accuracy: float
    validation_accuracy: float

    def predict(self, x: Float[Tensor, "row d"]) -> Int[Tensor, "row"]:
        """The class of every row."""
        return torch.from_numpy(self.model.predict(_array(x)))

    def ranks(self, x: Float[Tensor, "row d"], y: Int[Tensor, "row"]) -> Int[Tensor, "row"]:
        """Place of every row's class in the probe's ranking, 0 first; a class that it was not trained on comes last."""
        order = np.argsort(-self.model.predict_log_proba(_array(x)), axis=1)
        hits = self.model.classes_[order] == y.numpy()[:, None]
        return torch.from_numpy(np.where(hits.any(1), hits.argmax(1), len(self.model.classes_)))


def split_groups(
    group: Int[Tensor, "row"] | None,
    *,
    train_share: float = 0.5,
    validation_share: float = 0.15,
    stratum: Int[Tensor, "row"] | None = None,
    generator: torch.Generator,
) -> Parts:
    """Assign whole groups to three parts at random, in the same shares within every stratum.

    Raises:
        UsageError: no groups are given, the shares leave no test part, or there are too few groups for three parts.
    """
    if group is None:
        raise UsageError("a probe needs the prompt of every row; give group=, or it would be tested on what it knows.")
    if min(train_share, validation_share) <= 0 or train_share + validation_share >= 1:
        raise UsageError(f"shares {train_share} and {validation_share} must be above 0 and leave a test part.")
    stratum = torch.zeros_like(group) if stratum is None else stratum
    part = torch.full((int(group.max()) + 1,), -1)
    for value in stratum.unique():
        members = group[stratum == value].unique()
        members = members[torch.randperm(len(members), generator=generator)]
        validation = max(1, round(validation_share * len(members)))
        train = max(1, min(round(train_share * len(members)), len(members) - validation - 1))
        part[members[:train]] = 0
        part[members[train : train + validation]] = 1
        part[members[train + validation :]] = 2
    return Parts(group, *(part[group] == index for index in range(3)))


def fit_probe(
    x: Float[Tensor, "row d"], y: Int[Tensor, "row"], parts: Parts, *, config: ProbeConfig, generator: torch.Generator
) -> Probe:
    """Fit at every penalty on the training part and keep the one that is best on the validation part.

    Raises:
        UsageError: the training part shows fewer than two classes, or fewer than five penalties are given.
        ProbeError: no penalty lets the fit converge.
    """
    if len(set(config.penalties)) < 5:
        raise UsageError(f"penalties {config.penalties} are too few to choose from; give five or more, log-spaced.")
    rows = parts.train.nonzero()[:, 0]
    rows = rows[torch.randperm(len(rows), generator=generator)[: config.rows]]
    train, check = ((_array(x[rows]), y[rows].numpy()), (_array(x[parts.validation]), y[parts.validation].numpy()))
    model = _pipeline(config)
    best: tuple[float, float, Pipeline] | None = None
    failed = 0
    # From strong to weak: each fit starts where the last one ended.
    for penalty in sorted(config.penalties):
        if not _fits(model, penalty, *train):
            failed += 1
            continue
        score = float(model.score(*check))
        if best is None or score > best[0]:
            best = score, penalty, copy.deepcopy(model)
    if best is None:
        raise ProbeError(
            f"no probe converged within {config.max_iterations} iterations; allow more or give stronger penalties."
        )
    score, penalty, chosen = best
    return Probe(chosen, penalty, failed, len(rows), float(chosen.score(*train)), score)


def commonest(labels: Int[Tensor, "row"], most: int) -> Int[Tensor, "class"]:
    """The `most` labels that occur most often, ascending; negative ones are not counted."""
    kinds, counts = labels[labels >= 0].unique(return_counts=True)
    return kinds[counts.argsort(descending=True, stable=True)[:most]].sort().values


def class_of(labels: Int[Tensor, "*row"], classes: Int[Tensor, "class"]) -> Int[Tensor, "*row"]:
    """Which of the ascending `classes` each label is; UNASKED for one that is none of them."""
    found = torch.searchsorted(classes, labels.clamp(max=int(classes[-1])))
    return torch.where(classes[found] == labels, found, UNASKED)


def control_labels(
    kinds: Int[Tensor, "row"], classes: Int[Tensor, "example"], generator: torch.Generator
) -> Int[Tensor, "row"]:
    """A fixed class for every token type, drawn from the distribution of `classes`."""
    types, which = kinds.unique(return_inverse=True)
    return classes[torch.randint(len(classes), (len(types),), generator=generator)][which]


def online_bits(
    x: Float[Tensor, "row d"],
    y: Int[Tensor, "row"],
    group: Int[Tensor, "row"],
    *,
    classes: int,
    penalty: float,
    config: ProbeConfig,
    generator: torch.Generator,
) -> tuple[Float[Tensor, "row"], int]:
    """Bits that each label costs when groups are sent one portion after another, and how many fits failed.

    The first portion is sent at log₂(classes) bits a label; every later one under the probe fitted on all portions
    before it, mixed with the uniform distribution in the ratio rows : classes, so that a class not seen yet has a
    price. A fit that does not converge is used as it is (any distribution gives a valid code) and counted.
    """
    groups = group.unique()
    groups = groups[torch.randperm(len(groups), generator=generator)]
    ends = [max(1, round(portion * len(groups))) for portion in PORTIONS]
    bits = torch.full((len(y),), math.log2(classes), dtype=torch.float64)
    failed = 0
    for end, following in zip(ends, ends[1:], strict=False):
        known, coming = torch.isin(group, groups[:end]), torch.isin(group, groups[end:following])
        if end == following or not coming.any() or len(y[known].unique()) < 2:
            continue
        model = _pipeline(config)
        failed += not _fits(model, penalty, _array(x[known]), y[known].numpy())
        given = np.zeros((int(coming.sum()), classes))
        given[:, model.classes_] = model.predict_proba(_array(x[coming]))
        weight = classes / (int(known.sum()) + classes)
        mixed = (1 - weight) * given[np.arange(len(given)), y[coming].numpy()] + weight / classes
        bits[coming] = -torch.from_numpy(mixed).log2()
    return bits, failed


def _pipeline(config: ProbeConfig) -> Pipeline:
    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=config.max_iterations, warm_start=True))


def _fits(model: Pipeline, penalty: float, x: np.ndarray, y: np.ndarray) -> bool:
    """Fit in place; whether it converged."""
    if len(np.unique(y)) < 2:
        raise UsageError("the training rows are all of one class; a probe needs two classes or more.")
    model.set_params(logisticregression__C=penalty)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always", ConvergenceWarning)
        model.fit(x, y)
    return not any(issubclass(warning.category, ConvergenceWarning) for warning in raised)


def _array(x: Tensor) -> np.ndarray:
    return x.detach().float().cpu().numpy()
