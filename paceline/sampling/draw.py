"""From a distribution and random numbers to a token. Both ways sum in float64 and never pick a token of probability 0.

Shapes: V vocabulary, N tokens that have any probability, B blocks of them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.sampling.distribution import Distribution

_BLOCK = 256


def inverse_cdf(distribution: Distribution, uniform: float) -> int:
    """The token whose share of the cumulated probabilities (normalised or not) contains `uniform` in [0, 1)."""
    probs_N, start = distribution.probs, 0
    if len(probs_N) > _BLOCK:  # sums of blocks first: most of a long row need not be cumulated
        mass_B = np.add.reduceat(probs_N, np.arange(0, len(probs_N), _BLOCK), dtype=np.float64).cumsum()
        block = _place(mass_B, uniform)
        before = mass_B[block - 1] if block else 0.0
        uniform = (uniform * mass_B[-1] - before) / (mass_B[block] - before)
        start = block * _BLOCK
        probs_N = probs_N[start : start + _BLOCK]
    place = start + _place(probs_N.astype(np.float64).cumsum(), uniform)
    return place if distribution.ids is None else int(distribution.ids[place])


def _place(mass: npt.NDArray[np.float64], uniform: float) -> int:
    """Where the share is that contains `uniform`. Rounding may put it behind the last place that adds anything, and
    then it is that one."""
    total = mass[-1]
    return min(int(mass.searchsorted(uniform * total, side="right")), int(mass.searchsorted(total)))


def race(distribution: Distribution, uniforms_V: npt.NDArray[np.float64]) -> int:
    """The winner of an exponential race, argmax of p / E with E = -log(1 - u): token i wins with probability p[i].

    This is argmax of log p + Gumbel noise in other words. Two distributions that race with the same numbers choose the
    same token as often as coupling without communication allows (Daliri et al. 2024, arXiv 2408.07978).
    """
    probs_N, ids_N = distribution.probs, distribution.ids
    uniforms_N = uniforms_V if ids_N is None else uniforms_V[ids_N]
    # E exceeds u, so p / u has to reach what the favourite has: few tokens are left whose logarithm is needed.
    favourite = probs_N.argmax()
    bar = (1 - 1e-12) * probs_N[favourite] / _exponential(uniforms_N[favourite])
    running = np.flatnonzero(probs_N >= bar * uniforms_N)
    place = running[(probs_N[running] / _exponential(uniforms_N[running])).argmax()]
    return int(place if ids_N is None else ids_N[place])


def _exponential(uniforms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.maximum(-np.log1p(-uniforms), 1e-300)
