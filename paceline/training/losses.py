"""What training makes small: distances between the target's distribution p and the draft's q, row by row.

Each is a function of p_RD, the target's probabilities of the draft's vocabulary, and logits_RD, the draft's, and gives
[R] losses in the precision of the logits, float32 at least. Rows never depend on each other, so they may be computed
some at a time. p may sum to less than 1: the rest lies on tokens that the draft does not have, where q is zero.

The probability that a token drafted from q is accepted is alpha = sum min(p, q) = 1 - TV(p, q). All sums over
probabilities are taken of their logarithms, so that a p that is zero nearly everywhere, or a q that rounds to zero,
gives finite losses and gradients. Gradients flow to the logits alone.

Shapes: R rows, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

DECAY = 3.0
"""How fast LK-lambda leaves KL as alpha grows."""


def forward_kl(p_RD: torch.Tensor, logits_RD: torch.Tensor) -> torch.Tensor:
    """KL(p || q) where p sums to 1. Where it does not, the part of that sum over the draft's vocabulary, which may be
    negative; its gradient is that of the cross entropy all the same."""
    return _kl(p_RD, _log_q(logits_RD))


def total_variation(p_RD: torch.Tensor, logits_RD: torch.Tensor) -> torch.Tensor:
    """TV(p, q) = 1 - alpha. Its gradient vanishes where q is zero: a poor loss to begin with."""
    return 1 - _log_alpha(p_RD, _log_q(logits_RD)).exp()


def lk_alpha(p_RD: torch.Tensor, logits_RD: torch.Tensor) -> torch.Tensor:
    """-log alpha: its gradient is that of total variation, divided by alpha."""
    return -_log_alpha(p_RD, _log_q(logits_RD))


def lk_lambda(p_RD: torch.Tensor, logits_RD: torch.Tensor, weight: float | None = None) -> torch.Tensor:
    """weight * KL + (1 - weight) * (1 - alpha). Without a weight given, it is each row's exp(-3 alpha), taken as a
    constant by the gradient: KL where the draft is far off, total variation where it is near."""
    log_q_RD = _log_q(logits_RD)
    alpha_R = _log_alpha(p_RD, log_q_RD).exp()
    weight_R = (-DECAY * alpha_R.detach()).exp() if weight is None else weight
    return weight_R * _kl(p_RD, log_q_RD) + (1 - weight_R) * (1 - alpha_R)


LOSSES: dict[str, Loss] = {
    "forward-kl": forward_kl,
    "total-variation": total_variation,
    "lk-alpha": lk_alpha,
    "lk-lambda": lk_lambda,
}


def _log_q(logits_RD: torch.Tensor) -> torch.Tensor:
    if logits_RD.dtype != torch.float64:
        logits_RD = logits_RD.float()
    return logits_RD.log_softmax(-1)


def _kl(p_RD: torch.Tensor, log_q_RD: torch.Tensor) -> torch.Tensor:
    return (torch.xlogy(p_RD, p_RD) - p_RD * log_q_RD).sum(-1)


def _log_alpha(p_RD: torch.Tensor, log_q_RD: torch.Tensor) -> torch.Tensor:
    # A row without any p here has alpha = 0 whatever q is; the floor makes that a constant without a gradient.
    log_p_RD = p_RD.clamp_min(torch.finfo(log_q_RD.dtype).tiny).log()
    return torch.minimum(log_p_RD, log_q_RD).logsumexp(-1)
