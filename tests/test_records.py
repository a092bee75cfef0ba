"""Bootstrap intervals, and records on disk."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.experiments.common.intervals import Estimate, draw_counts, estimate, ratio_samples
from dspine_probe.experiments.common.records import read_record, write_record


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ratio_estimate(
    numerator: torch.Tensor, denominator: torch.Tensor, *, generator: torch.Generator, resamples: int
) -> Estimate:
    counts = draw_counts(len(numerator), generator=generator, resamples=resamples)
    value = ratio_samples(numerator, denominator, torch.ones(1, len(numerator)).double())[0]
    return estimate(value, ratio_samples(numerator, denominator, counts))


def test_every_resample_draws_as_many_groups_as_there_are():
    counts = draw_counts(7, generator=seeded(), resamples=50)
    assert counts.shape == (50, 7)
    assert (counts.sum(1) == 7).all()


def test_pooled_ratio_lies_in_its_interval_and_repeats_under_a_seed():
    tokens, rounds = torch.tensor([6.0, 9.0, 4.0, 10.0]), torch.tensor([3.0, 3.0, 4.0, 2.0])
    found = ratio_estimate(tokens, rounds, generator=seeded(1), resamples=500)
    again = ratio_estimate(tokens, rounds, generator=seeded(1), resamples=500)
    assert found.value == 29 / 12
    assert 1 <= found.low < found.value < found.high <= 5
    assert (found.low, found.high) == (again.low, again.high)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    generator = seeded(2)
    hits = 0
    for _ in range(200):
        rounds = torch.randint(5, 20, (60,), generator=generator).double()
        tokens = rounds * 2 + torch.randn(60, generator=generator).double() * rounds.sqrt()
        found = ratio_estimate(tokens, rounds, generator=generator, resamples=200)
        hits += int(found.low <= 2 <= found.high)
    assert 0.88 < hits / 200 < 0.995


def test_trailing_axes_and_zero_denominators():
    numerator, denominator = torch.ones(3, 2, 4), torch.full((3, 2, 4), 2.0)
    numerator[:, 1, 3] = denominator[:, 1, 3] = 0
    found = ratio_estimate(numerator, denominator, generator=seeded(), resamples=20)
    assert found.value.shape == (2, 4)
    assert found.value[0, 0] == found.low[0, 0] == 0.5
    assert found.value[1, 3].isnan() and found.low[1, 3].isnan()


def test_shared_draws_make_a_paired_comparison_exact():
    counts = draw_counts(5, generator=seeded(), resamples=100)
    rounds = torch.arange(1.0, 6.0)
    one, two = (ratio_samples(rounds * factor, rounds, counts) for factor in (2.0, 3.0))
    torch.testing.assert_close(two / one, torch.full_like(one, 1.5))


@dataclass(frozen=True)
class Settings:
    rate: float
    layers: tuple[int, ...]


def test_a_record_comes_back_with_the_versions(tmp_path: Path):
    record = {"config": Settings(float("nan"), (1, 2)), "seed": 3, "folder": tmp_path, "curve": torch.ones(2)}
    write_record(tmp_path / "run", "toy", record)
    loaded = read_record(tmp_path / "run", "toy")
    assert loaded["config"] == {"rate": None, "layers": [1, 2]}
    assert loaded["seed"] == 3 and loaded["curve"] == [1.0, 1.0] and loaded["folder"] == str(tmp_path)
    assert {"torch", "transformers", "dspine_probe"} <= set(loaded["versions"])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["toy.json"]


def test_absent_and_broken_records_are_named(tmp_path: Path):
    with pytest.raises(UsageError, match="toy.json was not found"):
        read_record(tmp_path, "toy")
    (tmp_path / "toy.json").write_text('{"half":')
    with pytest.raises(ProbeError, match="make it again"):
        read_record(tmp_path, "toy")
