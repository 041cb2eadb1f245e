"""Confidence intervals: how far a figure could have come out otherwise with other prompts.

Every figure here is a function of totals over prompts (a mean is a total over a count, a speed-up a ratio of ratios of
totals), so one bootstrap serves all: prompts are drawn anew with replacement, whole, with everything measured on them,
and the function is applied to the new totals. Completions of one prompt are not independent, prompts are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
Z = 1.959963984540054
"""The normal quantile of (1 + CONFIDENCE)/2."""
RESAMPLES = 10_000

Totals = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A figure, and the 95% interval around it: from -inf to inf where one prompt alone says nothing about others."""

    value: float
    low: float
    high: float

    def record(self) -> dict[str, float | None]:
        """As JSON has it, which knows no infinity."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}


def bootstrap(function: Callable[..., Totals], *columns: Sequence[float], seed: int = 0) -> Estimate | None:
    """`function` of the totals of `columns`, each with one value a prompt, and its percentile interval over prompts.

    `function` must take and give arrays. None where it is not finite (nothing was counted); resamples in which it is
    not are left out. Percentile intervals are a little narrow for few prompts: of 20, about 92% of them cover.
    """
    table_CN = np.array(columns, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(function(*table_CN.sum(axis=1)))
        if not math.isfinite(value):
            return None
        prompts = table_CN.shape[1]
        if prompts == 1:
            return Estimate(value, -math.inf, math.inf)
        rng = np.random.default_rng(seed)
        counts_BN = rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=RESAMPLES)
        found_B = function(*(counts_BN @ table_CN.T).T)
    found_B = found_B[np.isfinite(found_B)]
    low, high = np.quantile(found_B, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value, float(low), float(high))


def mean(values: Sequence[float], *, seed: int = 0) -> Estimate | None:
    """Of one value a prompt. Where all are 0 or 1 it is a share and has Wilson's interval, which does not shrink to
    nothing where all prompts failed or all passed."""
    if values and set(values) <= {0.0, 1.0}:
        return wilson(int(sum(values)), len(values))
    return bootstrap(np.divide, values, [1] * len(values), seed=seed) if values else None


def ratio(above: Sequence[float], below: Sequence[float], *, seed: int = 0) -> Estimate | None:
    """Of totals."""
    return bootstrap(np.divide, above, below, seed=seed) if above else None


def wilson(successes: int, trials: int) -> Estimate:
    """The share of successes in independent trials, with Wilson's score interval."""
    share = successes / trials
    shrink = 1 / (1 + Z * Z / trials)
    middle = shrink * (share + Z * Z / (2 * trials))
    half = shrink * Z * math.sqrt(share * (1 - share) / trials + (Z / (2 * trials)) ** 2)
    return Estimate(share, max(0.0, middle - half), min(1.0, middle + half))
