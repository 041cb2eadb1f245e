"""Token verification, the paper's own rule (Chen et al. 2023, arXiv 2302.01318, Algorithm 2 and Theorem 1).

Also what block verification shares with it. Knows no model: distributions and random numbers in, tokens out.

Shapes: K drafted tokens, V vocabulary. The q of a draft is extended by a row of zeros, which makes the bonus token the
recovered token of a draft that proposes nothing: max(0, p - 0) is p.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

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


def likelihood_ratios(p_SV: torch.Tensor, draft: Draft) -> npt.NDArray[np.float64]:
    """[K] p(x)/q(x) of the drafted tokens. q(x) is positive, since x was drawn from q."""
    if not draft.tokens:
        return np.zeros(0)
    tokens_K1 = torch.tensor(draft.tokens, device=p_SV.device)[:, None]
    p_K = p_SV[: len(draft)].gather(-1, tokens_K1)[:, 0].double().cpu().numpy()
    q_K = draft.probs.gather(-1, tokens_K1)[:, 0].double().cpu().numpy()
    assert (q_K > 0).all(), f"the draft holds a token that its q gives no probability: {q_K}"
    return p_K / q_K


def residual(p_V: torch.Tensor, draft: Draft, accepted: int, scale: float = 1.0) -> torch.Tensor:
    """max(0, scale p - q) behind `accepted` tokens, not normalised; p itself behind the whole draft.

    Where rounding leaves nothing (p equals q, so this branch had probability 0 but for rounding), p itself.
    """
    if accepted == len(draft):
        return p_V
    rest_V = (scale * p_V - draft.probs[accepted]).clamp_(min=0)
    return rest_V if bool(rest_V.any()) else p_V


def thresholds(p_SV: torch.Tensor, draft: Draft) -> npt.NDArray[np.float64]:
    """[K] the probability that token t stands, given that all before it do: min(1, p/q)."""
    return np.minimum(likelihood_ratios(p_SV, draft), 1)


def decide(p_SV: torch.Tensor, draft: Draft, uniforms_K: npt.NDArray[np.float64]) -> tuple[int, torch.Tensor]:
    """How many tokens stand, and the [V] distribution (not normalised) of the one that follows.

    p_SV [K + 1, V] are the target's distributions. Token t stands iff all before it do and u_t is below its
    threshold.
    """
    accepted = int((uniforms_K < thresholds(p_SV, draft)).cumprod().sum())
    return accepted, residual(p_SV[accepted], draft, accepted)


def verify(p_SV: torch.Tensor, draft: Draft, stream: Stream, anchor: int) -> Verdict:
    """`decide` with this round's numbers, then the token that ends it. `anchor` is the committed length."""
    accepted, rest_V = decide(p_SV, draft, accept_uniforms(draft, stream, anchor))
    return Verdict(accepted, next_token(rest_V, stream, anchor, accepted))


def accept_uniforms(draft: Draft, stream: Stream, anchor: int) -> npt.NDArray[np.float64]:
    return np.array([stream.uniform(Purpose.ACCEPT, anchor + t, anchor) for t in range(len(draft))])


def next_token(rest_V: torch.Tensor, stream: Stream, anchor: int, accepted: int) -> int:
    return inverse_cdf(rest_V, stream.uniform(Purpose.NEXT, anchor + accepted, anchor))


def propose(q_V: torch.Tensor, stream: Stream, position: int, anchor: int) -> int:
    """Draw a token to propose, with numbers that acceptance and recovery never see."""
    return inverse_cdf(q_V, stream.uniform(Purpose.PROPOSE, position, anchor))
