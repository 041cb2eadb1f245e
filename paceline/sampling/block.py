"""Block verification (Sun et al. 2024, arXiv 2403.10444): decides about the whole block, never expects fewer tokens.

Shapes: K drafted tokens, S = K + 1 target distributions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.sampling.distribution import Distribution
from paceline.sampling.draft import Draft
from paceline.sampling.rejection import (
    Verdict,
    accept_uniforms,
    likelihood_ratio,
    next_token,
    propose,
    residual,
)
from paceline.sampling.streams import Stream

__all__ = ["decide", "propose", "verify"]


def thresholds(p_S: Sequence[Distribution], draft: Draft) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """[K] h: a prefix of i tokens is a candidate with probability h_i; and [K + 1] r: how much of the target's
    probability is still to be spent behind i tokens.

    r_i = min(1, r_{i-1} p/q) with r_0 = 1; h_i = S_i / (S_i + 1 - r_i) with S_i = sum max(0, r_i p - q) over the
    distributions behind i tokens. Behind the whole draft q is zero, so S_K = r_K and h_K = r_K.
    """
    size = len(draft)
    h_K, r_S = np.zeros(size), np.ones(size + 1)
    for i in range(1, size + 1):
        r = r_S[i] = min(1.0, r_S[i - 1] * likelihood_ratio(p_S, draft, i - 1))
        if i == size:
            h_K[i - 1] = r
            continue
        surplus = float(p_S[i].minus(draft.probs[i], r).probs.sum(dtype=np.float64))
        # 0 / 0 is p = q behind a prefix with r = 1: the next r is 1 again, and a longer prefix stands with certainty.
        h_K[i - 1] = surplus / (surplus + 1 - r) if surplus > 0 else 0
    return h_K, r_S


def decide(p_S: Sequence[Distribution], draft: Draft, uniforms_K: npt.NDArray[np.float64]) -> tuple[int, Distribution]:
    """How many tokens stand, and the distribution (not normalised) of the one that follows.

    The longest candidate stands. Every uniform counts: the coupling is over the whole block, there is no early exit.
    """
    h_K, r_S = thresholds(p_S, draft)
    accepted = int(max(np.flatnonzero(uniforms_K < h_K) + 1, default=0))
    return accepted, residual(p_S[accepted], draft, accepted, float(r_S[accepted]))


def verify(p_S: Sequence[Distribution], draft: Draft, stream: Stream, anchor: int) -> Verdict:
    """`decide` with this round's numbers, then the token that ends it. `anchor` is the committed length."""
    accepted, rest = decide(p_S, draft, accept_uniforms(draft, stream, anchor))
    return Verdict(accepted, next_token(rest, stream, anchor, accepted))
