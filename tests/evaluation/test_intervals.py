"""Intervals against known cases, and how often they cover."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.evaluation import intervals
from paceline.evaluation.intervals import Estimate, bootstrap, mean, ratio, wilson


def test_the_mean_and_its_interval_of_many_values_are_those_of_the_normal_distribution() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, size=2000)
    found = mean(list(values))
    assert found
    half = 1.96 * values.std() / np.sqrt(2000)
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.01)
    assert found.high == pytest.approx(values.mean() + half, abs=0.01)


def test_a_ratio_is_one_of_totals_and_of_constants_is_exact() -> None:
    found = ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert found
    assert (found.value, found.low, found.high) == (2, 2, 2)
    weighted = ratio([10.0, 90.0], [10.0, 10.0])
    assert weighted
    assert weighted.value == 5
    assert (weighted.low, weighted.high) == (1, 9), "one item drawn twice"


def test_pairing_is_kept() -> None:
    """A machine that is ten times slower on some items does not blur a speed-up that is the same on all."""
    slow = np.where(np.arange(50) % 2, 10.0, 1.0)
    paired = bootstrap(lambda a, b: a / b, list(2 * slow), list(slow))
    broken = bootstrap(lambda a, b: a / b, list(2 * slow), list(np.random.default_rng(0).permutation(slow)))
    assert paired
    assert broken
    assert paired.low == paired.high == 2
    assert broken.high - broken.low > 0.5, "the control: without pairing it would be blurred"


def test_the_same_seed_gives_the_same_interval_and_another_one_another() -> None:
    values = list(np.random.default_rng(1).random(30))
    assert mean(values, seed=1) == mean(values, seed=1) != mean(values, seed=2)


def test_one_prompt_says_nothing_about_others() -> None:
    found = ratio([3.0], [2.0])
    assert found == Estimate(1.5, -math.inf, math.inf)
    assert found.record() == {"value": 1.5, "low": None, "high": None}
    assert mean([1.0]) == wilson(1, 1), "of a share it says a little"


def test_nothing_counted_is_no_figure() -> None:
    assert mean([]) is None
    assert ratio([], []) is None
    assert ratio([0.0, 0.0], [0.0, 0.0]) is None
    partly = ratio([3.0, 0.0], [1.0, 0.0])
    assert partly
    assert (partly.value, partly.low, partly.high) == (3, 3, 3), "resamples of nothing are left out"


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (45, 164, 0.2119, 0.3473)],
)
def test_wilson_against_published_values(successes: int, trials: int, low: float, high: float) -> None:
    found = wilson(successes, trials)
    assert found.value == successes / trials
    assert [found.low, found.high] == pytest.approx([low, high], abs=1e-4)


def test_shares_have_an_interval_even_where_all_failed() -> None:
    assert mean([0.0] * 10) == wilson(0, 10)
    assert mean([1.0, 0.0, 1.0]) == wilson(2, 3)
    scores = [0.0, 0.5, 1.0]
    assert mean(scores) == bootstrap(np.divide, scores, [1] * 3)


def coverage(confidence: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """How often intervals for the mean of 60 skewed values hold the true one."""
    monkeypatch.setattr(intervals, "CONFIDENCE", confidence)
    monkeypatch.setattr(intervals, "RESAMPLES", 1000)
    rng = np.random.default_rng(5)
    covered = 0
    for trial in range(400):
        found = mean(list(rng.gamma(2.0, 1.0, size=60)), seed=trial)
        assert found
        covered += found.low <= 2.0 <= found.high
    return covered / 400


def test_intervals_cover_as_often_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    # Three standard errors of 400 trials are 0.033; percentile intervals of 60 values are about a point narrow.
    assert 0.905 <= coverage(0.95, monkeypatch) <= 0.985
    assert 0.72 <= coverage(0.80, monkeypatch) <= 0.86, "the control: narrower ones cover less"


def test_wilson_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(6)
    found = [wilson(int(rng.binomial(50, 0.1)), 50) for _ in range(2000)]
    assert 0.93 <= np.mean([f.low <= 0.1 <= f.high for f in found]) <= 0.98
