"""How slot scores become slot weights: softmax in the paper, the others in its ablation (Table 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Readout(NamedTuple):
    """A function of the slot scores and its derivative, written by hand for the engines' backward."""

    apply: Callable[[Tensor], Tensor]
    """scores [..., M] -> weights [..., M]"""
    backward: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(scores, weights, grad of weights) -> grad of scores"""


def _softmax_backward(x: Tensor, p: Tensor, dp: Tensor) -> Tensor:
    return torch._softmax_backward_data(dp, p, -1, p.dtype)


def _swish_backward(x: Tensor, p: Tensor, dp: Tensor) -> Tensor:
    sigmoid = x.sigmoid()
    return dp * (sigmoid + p * (1 - sigmoid))


READOUTS: dict[str, Readout] = {
    "softmax": Readout(lambda x: x.softmax(-1), _softmax_backward),
    "identity": Readout(lambda x: x, lambda x, p, dp: dp),
    "swish": Readout(torch.nn.functional.silu, _swish_backward),
    "relu": Readout(torch.relu, lambda x, p, dp: dp * (x > 0)),
    "relu2": Readout(lambda x: x.relu().square(), lambda x, p, dp: dp * 2 * x.relu()),
}
