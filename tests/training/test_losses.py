"""Losses against finite differences, closed forms, and rows that tempt logarithms of zero."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from paceline.training.losses import DECAY, LOSSES, Loss, forward_kl, lk_alpha, lk_lambda, total_variation

FIXED: dict[str, Loss] = {**LOSSES, "lk-lambda": partial(lk_lambda, weight=0.3)}
"""With a constant weight: a weight that follows alpha is not part of the gradient, so differences would see it."""


def rows(seed: int, *, mass: float = 1.0, count: int = 5, size: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    p_RD = mass * (2 * torch.randn(count, size, generator=rng, dtype=torch.float64)).softmax(-1)
    return p_RD, 2 * torch.randn(count, size, generator=rng, dtype=torch.float64)


def gradient(loss: Loss, p_RD: torch.Tensor, logits_RD: torch.Tensor) -> torch.Tensor:
    leaf = logits_RD.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(p_RD, leaf).sum(), leaf)
    return found


@pytest.mark.parametrize("mass", [1.0, 0.6])
@pytest.mark.parametrize("name", FIXED)
def test_gradients_are_those_of_finite_differences(name: str, mass: float) -> None:
    loss = FIXED[name]
    p_RD, logits_RD = rows(1, mass=mass)
    found_RD = gradient(loss, p_RD, logits_RD)
    step = 1e-6
    for d in range(logits_RD.shape[1]):
        shift_D = torch.zeros(logits_RD.shape[1], dtype=torch.float64)
        shift_D[d] = step
        difference_R = (loss(p_RD, logits_RD + shift_D) - loss(p_RD, logits_RD - shift_D)) / (2 * step)
        torch.testing.assert_close(found_RD[:, d], difference_R, rtol=1e-6, atol=1e-8)
    assert found_RD.abs().max() > 0.01


def test_closed_forms() -> None:
    p_RD = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    logits_RD = torch.tensor([[0.2, 0.2, 0.6]], dtype=torch.float64).log() + 7  # logits are free to a constant
    kl = 0.5 * math.log(0.5 / 0.2) + 0.3 * math.log(0.3 / 0.2) + 0.2 * math.log(0.2 / 0.6)
    assert forward_kl(p_RD, logits_RD).item() == pytest.approx(kl)
    assert total_variation(p_RD, logits_RD).item() == pytest.approx(1 - 0.6)
    assert lk_alpha(p_RD, logits_RD).item() == pytest.approx(-math.log(0.6))
    assert lk_lambda(p_RD, logits_RD, 0.25).item() == pytest.approx(0.25 * kl + 0.75 * 0.4)
    weight = math.exp(-DECAY * 0.6)
    assert lk_lambda(p_RD, logits_RD).item() == pytest.approx(weight * kl + (1 - weight) * 0.4)


def test_total_variation_is_half_the_absolute_difference() -> None:
    p_RD, logits_RD = rows(2)
    half_R = 0.5 * (p_RD - logits_RD.softmax(-1)).abs().sum(-1)
    torch.testing.assert_close(total_variation(p_RD, logits_RD), half_R)


def test_a_reduced_vocabulary_counts_what_it_leaves_out_as_lost() -> None:
    """p over ten tokens, a draft that has the first six: q is zero on the others."""
    p_RD, logits_RD = rows(3, size=10)
    q_RD = torch.zeros_like(p_RD)
    q_RD[:, :6] = logits_RD[:, :6].softmax(-1)
    half_R = 0.5 * (p_RD - q_RD).abs().sum(-1)
    torch.testing.assert_close(total_variation(p_RD[:, :6], logits_RD[:, :6]), half_R)


def test_the_gradient_of_kl_is_mass_times_q_minus_p() -> None:
    p_RD, logits_RD = rows(4, mass=0.7)
    torch.testing.assert_close(gradient(forward_kl, p_RD, logits_RD), 0.7 * logits_RD.softmax(-1) - p_RD)


def test_the_gradient_of_lk_alpha_is_that_of_total_variation_over_alpha() -> None:
    p_RD, logits_RD = rows(5)
    alpha_R1 = 1 - total_variation(p_RD, logits_RD)[:, None]
    expected_RD = gradient(total_variation, p_RD, logits_RD) / alpha_R1
    torch.testing.assert_close(gradient(lk_alpha, p_RD, logits_RD), expected_RD)


def test_a_weight_that_follows_alpha_is_a_constant_to_the_gradient() -> None:
    p_RD, logits_RD = rows(6)
    weight_R1 = (-DECAY * (1 - total_variation(p_RD, logits_RD)))[:, None].exp()
    kl_RD, tv_RD = (gradient(loss, p_RD, logits_RD) for loss in (forward_kl, total_variation))
    torch.testing.assert_close(gradient(lk_lambda, p_RD, logits_RD), weight_R1 * kl_RD + (1 - weight_R1) * tv_RD)


@pytest.mark.parametrize("name", LOSSES)
def test_a_draft_equal_to_the_target_loses_nothing(name: str) -> None:
    p_RD, _ = rows(7)
    loss_R = LOSSES[name](p_RD, p_RD.log() - 3)
    torch.testing.assert_close(loss_R, torch.zeros_like(loss_R))


@pytest.mark.parametrize("name", LOSSES)
def test_rows_do_not_depend_on_each_other(name: str) -> None:
    p_RD, logits_RD = rows(8)
    alone = torch.cat([LOSSES[name](p_RD[r : r + 1], logits_RD[r : r + 1]) for r in range(len(p_RD))])
    torch.testing.assert_close(LOSSES[name](p_RD, logits_RD), alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_zeros_everywhere_give_finite_losses_and_gradients(name: str, dtype: torch.dtype) -> None:
    p_RD = torch.zeros(4, 50)
    p_RD[0, 3] = 1  # certain, and the draft holds it impossible
    p_RD[1, 3] = 1  # certain, and the draft is certain of it too
    p_RD[2, 3] = 1e-40  # denormal
    logits_RD = torch.zeros(4, 50)  # row 3: nothing of p lies in the draft's vocabulary
    logits_RD[0, 3], logits_RD[0, 4] = -1e4, 1e4
    logits_RD[1, 3] = 1e4
    leaf = logits_RD.to(dtype).requires_grad_()
    loss_R = LOSSES[name](p_RD, leaf)
    loss_R.sum().backward()
    assert loss_R.dtype == torch.float32
    assert loss_R.isfinite().all(), loss_R
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()
    assert not leaf.grad[3].any(), "nothing the draft does changes a row that p does not touch"
    assert loss_R[1].abs() < 1e-6


@pytest.mark.parametrize("name", ["forward-kl", "lk-alpha", "lk-lambda"])
def test_a_draft_that_is_far_off_is_still_pulled(name: str) -> None:
    """Total variation is not among these: its gradient vanishes there."""
    p_RD, logits_RD = torch.zeros(1, 50), torch.zeros(1, 50)
    p_RD[0, 3], logits_RD[0, 4] = 1, 60.0
    assert gradient(LOSSES[name], p_RD, logits_RD)[0, 3] < -0.5
    assert gradient(total_variation, p_RD, logits_RD).abs().max() < 1e-6
