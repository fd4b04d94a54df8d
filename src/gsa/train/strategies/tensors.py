"""Tensors of a training state: which part of them is here, and whether they are the ones expected."""

from __future__ import annotations

from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
Shapes = dict[str, tuple[int, ...]]


def optimizer_shapes(shapes: Shapes) -> Shapes:
    """The shapes of what an optimiser keeps of parameters with these shapes."""
    return {**{f"{moment}.{name}": shape for moment in MOMENTS for name, shape in shapes.items()}, "step": ()}


def own_part(x: Tensor) -> Tensor:
    """The part of a sharded tensor that is on this process, sharing its memory; any other tensor as it is."""
    return x.to_local() if hasattr(x, "to_local") else x


def check_tensors(tensors: dict[str, Tensor], expected: Shapes) -> str | None:
    """What is wrong with tensors that should have these names and shapes; None if nothing is."""
    for name, shape in expected.items():
        if name not in tensors:
            return f"tensor {name} is missing"
        x = tensors[name]
        if tuple(x.shape) != shape:
            return f"tensor {name} is {list(x.shape)}, expected {list(shape)}"
        if not x.is_floating_point():
            return f"tensor {name} is {x.dtype}, expected floating point"
    unknown = next((name for name in tensors if name not in expected), None)
    return None if unknown is None else f"tensor {unknown} is not part of the model"
