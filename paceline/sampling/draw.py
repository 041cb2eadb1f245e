"""From a distribution and random numbers to a token. Both ways sum in float64 and never pick a token of probability 0.

Shapes: V vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def inverse_cdf(probs_V: torch.Tensor, uniform: float) -> int:
    """The token whose share of the cumulated probabilities (normalised or not) contains `uniform` in [0, 1)."""
    mass_V = probs_V.cumsum(-1, dtype=torch.float64)
    total = mass_V[-1:]
    token = torch.searchsorted(mass_V, total * uniform, right=True)
    # total * uniform may round up to total, which lies behind the last token that has any probability
    return int(torch.minimum(token, torch.searchsorted(mass_V, total)))


def race(probs_V: torch.Tensor, uniforms_V: npt.NDArray[np.float64]) -> int:
    """The winner of an exponential race, argmax of p / E with E = -log(1 - u): token i wins with probability p[i].

    This is argmax of log p + Gumbel noise in other words. Two distributions that race with the same numbers choose the
    same token as often as coupling without communication allows (Daliri et al. 2024, arXiv 2408.07978).
    """
    exponentials_V = torch.from_numpy(np.maximum(-np.log1p(-uniforms_V), 1e-300)).to(probs_V.device)
    return int((probs_V.double() / exponentials_V).argmax())
