"""Token verification, the paper's own rule (Chen et al. 2023, arXiv 2302.01318, Algorithm 2 and Theorem 1).

Also what block verification shares with it. Knows no model: distributions and random numbers in, tokens out.

Shapes: K drafted tokens, S = K + 1 target distributions. The q of a draft is extended by one of no probability at all,
which makes the bonus token the recovered token of a draft that proposes nothing: max(0, p - 0) is p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.sampling.distribution import Distribution
from paceline.sampling.draft import Draft
from paceline.sampling.draw import inverse_cdf
from paceline.sampling.streams import Purpose, Stream


@dataclass(frozen=True)
class Verdict:
    """How a round ends: the first `accepted` drafted tokens stand, `token` follows them.

    `token` is the bonus token where the whole draft was accepted, the recovered one otherwise.
    """

    accepted: int
    token: int


def likelihood_ratio(p_S: Sequence[Distribution], draft: Draft, t: int) -> float:
    """p(x)/q(x) of a drafted token. q(x) is positive, since x was drawn from q."""
    x = draft.tokens[t]
    q = draft.probs[t].of(x)
    assert q > 0, f"the draft's token {x} at {t} has no probability by its own q"
    return p_S[t].of(x) / q


def residual(p: Distribution, draft: Draft, accepted: int, scale: float = 1.0) -> Distribution:
    """max(0, scale p - q) behind `accepted` tokens, not normalised; p itself behind the whole draft.

    Where rounding leaves nothing (p equals q, so this branch had probability 0 but for rounding), p itself.
    """
    if accepted == len(draft) or (p.ids is not None and len(p.ids) == 1):  # of one token there is nothing to choose
        return p
    rest = p.minus(draft.probs[accepted], scale)
    return rest if rest.probs.max() > 0 else p


def thresholds(p_S: Sequence[Distribution], draft: Draft) -> npt.NDArray[np.float64]:
    """[K] the probability that token t stands, given that all before it do: min(1, p/q)."""
    return np.array([min(likelihood_ratio(p_S, draft, t), 1.0) for t in range(len(draft))])


def decide(p_S: Sequence[Distribution], draft: Draft, uniforms_K: npt.NDArray[np.float64]) -> tuple[int, Distribution]:
    """How many tokens stand, and the distribution (not normalised) of the one that follows.

    `p_S` are the target's distributions. Token t stands iff all before it do and u_t is below its threshold.
    """
    return _decide(p_S, draft, uniforms_K.item)


def _decide(p_S: Sequence[Distribution], draft: Draft, uniform: Callable[[int], float]) -> tuple[int, Distribution]:
    """Looks at no token behind the first that falls, and asks only for numbers that decide something: all of them are
    at least 0 and below 1."""
    accepted = 0
    while accepted < len(draft):
        ratio = likelihood_ratio(p_S, draft, accepted)
        if ratio < 1 and (ratio <= 0 or uniform(accepted) >= ratio):
            break
        accepted += 1
    return accepted, residual(p_S[accepted], draft, accepted)


def verify(p_S: Sequence[Distribution], draft: Draft, stream: Stream, anchor: int) -> Verdict:
    """`decide` with this round's numbers, then the token that ends it. `anchor` is the committed length."""
    accepted, rest = _decide(p_S, draft, lambda t: stream.uniform(Purpose.ACCEPT, anchor + t, anchor))
    return Verdict(accepted, next_token(rest, stream, anchor, accepted))


def accept_uniforms(draft: Draft, stream: Stream, anchor: int) -> npt.NDArray[np.float64]:
    return np.array([stream.uniform(Purpose.ACCEPT, anchor + t, anchor) for t in range(len(draft))])


def next_token(rest: Distribution, stream: Stream, anchor: int, accepted: int) -> int:
    return _drawn(rest, stream, Purpose.NEXT, anchor + accepted, anchor)


def propose(q: Distribution, stream: Stream, position: int, anchor: int) -> int:
    """Draw a token to propose, with numbers that acceptance and recovery never see."""
    return _drawn(q, stream, Purpose.PROPOSE, position, anchor)


def _drawn(distribution: Distribution, stream: Stream, purpose: Purpose, position: int, anchor: int) -> int:
    if distribution.ids is not None and len(distribution.ids) == 1:  # whatever the number is
        return distribution.ids.item(0)
    return inverse_cdf(distribution, stream.uniform(purpose, position, anchor))
