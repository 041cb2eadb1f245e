"""How parameters move: matrices by Muon, vectors by AdamW.

Muon (Jordan et al. 2024) turns a matrix's momentum into the nearest matrix whose singular values are about 1, so that a
step moves all directions alike, those with small gradients too; docs/drafts.md tells what it gained over AdamW here.
Everything is float32: torch's own Muon computes in bfloat16, which processors without it only emulate.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x -> a x + b x^3 + c x^5, which takes singular values between 0 and 1 to between 0.7 and 1.2 in STEPS turns."""
STEPS = 5
SIZE = 0.2
"""Root mean square of an update at a learning rate of 1: about that of AdamW, so that both take the same rate."""


class Optimizer:
    def __init__(
        self, parameters: Iterable[nn.Parameter], *, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        """`weight_decay` is of matrices."""
        found = list(parameters)
        self._lr, self._weight_decay = lr, weight_decay
        self._matrices = [p for p in found if p.ndim == 2]
        self._momenta: dict[nn.Parameter, dict[str, torch.Tensor]] = {p: {} for p in self._matrices}
        vectors = [p for p in found if p.ndim != 2]
        self._adamw = torch.optim.AdamW(vectors, lr=lr, betas=betas, weight_decay=0.0) if vectors else None

    def state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """What is remembered of a parameter. Writing it all back goes on exactly."""
        if parameter in self._momenta:
            return self._momenta[parameter]
        assert self._adamw is not None
        return self._adamw.state[parameter]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for matrix in self._matrices:
            assert matrix.grad is not None
            momenta = self._momenta[matrix]
            if "momentum" not in momenta:
                momenta["momentum"] = torch.zeros_like(matrix)
            momentum = momenta["momentum"].lerp_(matrix.grad, 1 - MOMENTUM)
            update = orthogonal(matrix.grad.lerp(momentum, MOMENTUM))
            matrix.mul_(1 - lr * self._weight_decay)
            matrix.sub_(update, alpha=lr * SIZE * max(matrix.shape) ** 0.5)
        if self._adamw is not None:
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()


def orthogonal(matrix_OI: torch.Tensor) -> torch.Tensor:
    """About U V^T of the matrix U S V^T, by products alone (Newton-Schulz)."""
    wide = matrix_OI if matrix_OI.shape[0] <= matrix_OI.shape[1] else matrix_OI.T
    x = wide / (wide.norm() + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x if wide is matrix_OI else x.T
