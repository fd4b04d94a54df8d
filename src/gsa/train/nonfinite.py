"""Where a loss or gradient that is not finite comes from: the first tensor that broke."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def first_broken(
    model: nn.Module, forward: Callable[[], None], gradient_norms: dict[str, float]
) -> dict[str, Any] | None:
    """The first weight, else output of a module, else gradient that is not finite; None if this process has none.

    `forward` runs the model on what broke it, and the norms are those of the gradients then. Outputs come in the order
    of computing, gradients as they flow. The model runs in any case, since sharded ones compute together.
    """
    weights = [_found(name, "weight", p) for name, p in model.named_parameters()]
    with _watched(model) as outputs, torch.no_grad():
        forward()
    gradients = [
        {"tensor": name, "kind": "gradient", "norm": str(norm)}
        for name, norm in reversed(gradient_norms.items())
        if not math.isfinite(norm)
    ]
    return next((found for found in (*weights, *outputs, *gradients) if found is not None), None)


def told(found: dict[str, Any] | None) -> str:
    """A sentence about what `first_broken` returned."""
    if found is None:
        return "no weight, output or gradient of this process is to blame"
    first = f"the first that is not finite is the {found['kind']} of {found['tensor']}"
    if "norm" in found:
        return f"{first}: its norm is {found['norm']}"
    return f"{first} {found['shape']}: {found['nan']} nan and {found['inf']} inf of {found['numbers']}"


def _found(name: str, kind: str, x: Tensor) -> dict[str, Any] | None:
    """How a tensor is not finite, or None."""
    x = x.detach()
    x = x.to_local() if hasattr(x, "to_local") else x  # of a sharded one, the part that is here
    finite = torch.isfinite(x)
    if bool(finite.all()):
        return None
    return {
        "tensor": name,
        "kind": kind,
        "shape": list(x.shape),
        "dtype": str(x.dtype).removeprefix("torch."),
        "numbers": x.numel(),
        "nan": int(torch.isnan(x).sum()),
        "inf": int(torch.isinf(x).sum()),
    }


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[dict[str, Any]]]:
    """A list that gets every module's output that is not finite, in the order of computing."""
    seen: list[dict[str, Any]] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            for x in output if isinstance(output, tuple) else (output,):
                if isinstance(x, Tensor) and x.is_floating_point():
                    found = _found(f"{name} ({type(module).__name__})", "output", x)
                    seen.extend([found] if found else [])

        return look

    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
