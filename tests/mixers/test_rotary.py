"""Rotary positions by themselves."""

import torch
from torch import Tensor

from gsa.mixers.rotary import rotate


def test_rotary_positions_have_every_derivative() -> None:
    x, positions = torch.randn(2, 5, 3, 8, dtype=torch.float64, requires_grad=True), torch.arange(5)[None]

    def run(x: Tensor) -> Tensor:
        return rotate(x, positions, 100.0)

    assert torch.autograd.gradcheck(run, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, x)
    torch.testing.assert_close(torch.func.vmap(run)(x[None])[0], run(x))
    by_func = torch.func.grad(lambda x: run(x).square().sum())(x)
    torch.testing.assert_close(by_func, 2 * x)  # a turn changes no length
