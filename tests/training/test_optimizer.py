"""How parameters move."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.training.optimizer import Optimizer, orthogonal


@pytest.mark.parametrize("shape", [(8, 8), (5, 30), (30, 5), (64, 16)])
def test_an_update_has_the_directions_of_its_matrix_and_lengths_of_about_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape) @ torch.diag(torch.logspace(0, -1, shape[1]))
    found = orthogonal(matrix)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    within = u.T @ found @ vh.T
    lengths = within.diagonal()
    assert ((lengths > 0.5) & (lengths < 1.3)).all()
    assert (within - torch.diag(lengths)).abs().max() < 1e-3, "directions are kept"


def test_a_matrix_moves_as_far_as_the_rate_says_and_a_vector_as_adamw_moves_it() -> None:
    torch.manual_seed(0)
    matrix, vector = nn.Parameter(torch.randn(16, 48)), nn.Parameter(torch.randn(9))
    twin = nn.Parameter(vector.detach().clone())
    mine = Optimizer([matrix, vector], lr=1.0, betas=(0.9, 0.95), weight_decay=0.0)
    theirs = torch.optim.AdamW([twin], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(3):
        before = matrix.detach().clone()
        matrix.grad, vector.grad = torch.randn(16, 48), torch.randn(9)
        twin.grad = vector.grad.clone()
        mine.step(0.01)
        theirs.step()
        moved = (matrix - before).square().mean().sqrt()
        assert 0.01 * 0.2 * 0.5 < moved < 0.01 * 0.2 * 1.3
        assert torch.equal(vector, twin)


def test_decay_is_of_matrices() -> None:
    matrix, vector = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    optimizer = Optimizer([matrix, vector], lr=1.0, betas=(0.9, 0.95), weight_decay=0.5)
    matrix.grad, vector.grad = torch.zeros(4, 4), torch.zeros(4)
    optimizer.step(0.1)
    assert matrix[0, 0].item() == pytest.approx(0.95)
    assert vector[0].item() == 1


def test_the_state_is_all_there_is_to_remember() -> None:
    def run(stop: int | None) -> list[torch.Tensor]:
        torch.manual_seed(1)
        parameters = [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4))]
        optimizer = Optimizer(parameters, lr=0.1, betas=(0.9, 0.95), weight_decay=0.01)
        for step in range(5):
            if step == stop:
                kept = [{key: value.clone() for key, value in optimizer.state(p).items()} for p in parameters]
                optimizer = Optimizer(parameters, lr=0.1, betas=(0.9, 0.95), weight_decay=0.01)
                for parameter, state in zip(parameters, kept, strict=True):
                    optimizer.state(parameter).update(state)
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
            optimizer.step(0.1)
        return [parameter.detach() for parameter in parameters]

    assert all(map(torch.equal, run(None), run(3)))
