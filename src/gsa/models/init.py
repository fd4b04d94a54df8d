"""Fresh weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gsa.mixers.base import Mixer
from gsa.models.backbone import SwiGLU


def initialise(module: nn.Module, deviation: float, layers: int) -> None:
    """Gives one module fresh weights; its children have theirs already (`model.apply` goes in that order).

    Matrices are normal with this standard deviation, biases 0, norms 1. The last matrix of each mixer and MLP is
    divided by the square root of 2 x layers, about how many of them add to the stream of features, so that this does
    not grow with depth. Mixers with an initialisation of their own (`reset_parameters`) apply it last.
    """
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, 0.0, deviation)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    if isinstance(module, (Mixer, SwiGLU)):
        last = module.down_proj if isinstance(module, SwiGLU) else module.o_proj
        nn.init.normal_(last.weight, 0.0, deviation / (2 * layers) ** 0.5)
    if isinstance(module, Mixer):
        module.reset_parameters()


class _Unfilled(TorchFunctionMode):
    """Leaves tensors as they are where torch.nn.init would fill them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def without_memory() -> Iterator[None]:
    """Models made inside have shapes, but no memory and no values (torch's meta device).

    Filling their tensors is skipped: it would do nothing, and import torch's compiler for it.
    """
    with torch.device("meta"), _Unfilled():
        yield
