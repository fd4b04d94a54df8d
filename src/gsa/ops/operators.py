"""How an engine's kernels become part of torch: custom operators, with autograd and with fake kernels.

To torch an operator is opaque, so autograd uses the backward pass written by hand, and torch.compile leaves it whole.
"""

from __future__ import annotations

from typing import Any, Generic, cast, get_type_hints

import torch
from torch import Tensor

from gsa.errors import raised_by
from gsa.ops.calls import Call, Gradients, Kernels, Operation, Tensors, sums_dtype, tensors_of
from gsa.ops.memory import require_memory
from gsa.ops.transforms import Derivative, recorded, transformed

_SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", float: "float", int: "int", str: "str", bool: "bool"}


class Operator(Generic[Call]):
    """An operator of an engine: from a call to its results.

    Torch knows it as gsa::{engine}_{short name}, for example gsa::native_gsa, and its backward pass as
    gsa::native_gsa_backward. The first takes the fields of a call, and returns the results and what is saved. The
    second takes the gradients of the results, the fields of the call and what was saved, and returns the gradients of
    the call's tensors.
    """

    def __init__(self, engine: str, kernels: Kernels[Call], operation: Operation[Call], *, direct: bool = False):
        """With `direct`, forward is called without torch's operator where nothing needs to see one, which is faster for
        a few tokens. Autocast is not turned off then, and memory not looked for, so it is only for kernels that do not
        compute in torch."""
        self.direct = direct
        self.kernels: Kernels[Call] = kernels
        self.operation: Operation[Call] = operation
        name, fields = f"gsa::{engine}_{operation.short}", schema_of(operation.record)
        first, *others = (f"d_{result}" for result in operation.results)
        gradients = ", ".join([f"Tensor {first}", *(f"Tensor? {other}" for other in others)])
        saved = ", ".join(f"Tensor {x}" for x in operation.saved)
        self._backward_names = [
            *(f"the gradient of {result}" for result in operation.results),
            *operation.record._fields,
            *operation.saved,
        ]
        self.forward = torch.library.custom_op(
            name,
            self._forward,
            mutates_args=(),
            schema=f"({fields}) -> ({_tensors(len(operation.results) + len(operation.saved))})",
        )
        self.backward = torch.library.custom_op(
            f"{name}_backward",
            self._backward,
            mutates_args=(),
            schema=f"({gradients}, {fields}, {saved}) -> ({_tensors(len(operation.differentiable))})",
        )
        self.forward.register_fake(self._fake_forward)
        self.backward.register_fake(self._fake_backward)
        self.derivative = Derivative(
            operation.name, engine, self.forward, self.backward, self._remember, self._differentiate
        )

    def __call__(self, call: Call) -> Tensors:
        """The results, as part of autograd's graph if there is one."""
        if not self._has_graph(call):
            call = cast("Call", call._replace(save="nothing"))
            if self.direct and not needs_operator(*call):
                with raised_by(self.operation.name):
                    return self.kernels.forward(call)[0]
        return self.derivative.forward(*call)[: len(self.operation.results)]

    def _has_graph(self, call: Call) -> bool:
        """Whether a backward pass may follow."""
        self.derivative.refuse_forward_mode()
        return torch.is_grad_enabled() and (any(x.requires_grad for x in tensors_of(call)) or transformed())

    def _forward(self, *fields: Any) -> Tensors:
        call = self.operation.record(*fields)
        # Whatever autocast says, sums are carried in full precision.
        with torch.autocast(call[0].device.type, enabled=False), raised_by(self.operation.name):
            if not self.direct:
                require_memory(call._asdict())
            results, saved = self.kernels.forward(call)
        return (*results, *saved)

    def _fake_forward(self, *fields: Any) -> Tensors:
        call = self.operation.record(*fields)
        first, dtype = call[0], sums_dtype(call)
        o, *states = call.result_shapes()
        kept = self.kernels.saved_shapes(call)
        return first.new_empty(o), *(first.new_empty(shape, dtype=dtype) for shape in (*states, *kept))

    def _backward(self, *arguments: Any) -> Tensors:
        gradients, call, saved = self._split(arguments)
        with torch.autocast(call[0].device.type, enabled=False), raised_by(self.operation.name):
            if not self.direct:  # otherwise C++ is given nothing else
                require_memory(dict(zip(self._backward_names, arguments, strict=True)))
            found = self.kernels.backward(call, saved, gradients)
        results = []
        for name, dx in zip(self.operation.differentiable, found, strict=True):
            x = getattr(call, name)
            if x is None:
                results.append(call[0].new_empty(0))
            else:
                assert dx is not None
                results.append(dx.contiguous() if _is_state(name) else laid_out_like(x, dx))
        return tuple(results)

    def _fake_backward(self, *arguments: Any) -> Tensors:
        _, call, _ = self._split(arguments)
        results = []
        for name in self.operation.differentiable:
            x = getattr(call, name)
            if x is None:
                results.append(call[0].new_empty(0))
            else:
                results.append(x.new_empty(x.shape, dtype=sums_dtype(call)) if _is_state(name) else torch.empty_like(x))
        return tuple(results)

    def _split(self, arguments: tuple[Any, ...]) -> tuple[Gradients, Call, Tensors]:
        """The arguments of the backward operator: gradients of the results, the call, and what forward saved."""
        start = len(self.operation.results)
        stop = start + len(self.operation.record._fields)
        return arguments[:start], self.operation.record(*arguments[start:stop]), arguments[stop:]

    def _remember(self, ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        tensors = self.operation.tensor_count
        ctx.save_for_backward(*inputs[:tensors], *output[len(self.operation.results) :])
        ctx.rest, ctx.shape = inputs[tensors:], output[0].shape
        ctx.set_materialize_grads(False)

    def _differentiate(self, ctx: Any, *gradients: Tensor | None) -> Gradients:
        # Read once: under activation checkpointing, a second look at ctx.saved_tensors raises.
        remembered, count = ctx.saved_tensors, self.operation.tensor_count
        tensors, saved = remembered[:count], remembered[count:]
        first, *others = gradients[: len(self.operation.results)]
        first = tensors[0].new_zeros(ctx.shape) if first is None else first
        found = self.derivative.backward(first, *others, *tensors, *ctx.rest, *saved)
        counts = self.operation.counts
        given = (None if x is None else dx for x, dx in zip(tensors[: -len(counts)], found, strict=True))
        return *given, *(None for _ in (*counts, *ctx.rest))  # counts, numbers and words have no gradient


def schema_of(record: Any) -> str:
    """The fields of a record as torch's schemas have them."""
    hints = get_type_hints(record)
    return ", ".join(f"{_SCHEMA_TYPES[hints[name]]} {name}" for name in record._fields)


def needs_operator(*arguments: Any) -> bool:
    """Whether torch must see an operator, since calls are recorded or transformed, or tensors have a class of their
    own."""
    return (
        recorded()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or any(isinstance(x, Tensor) and type(x) not in (Tensor, torch.nn.Parameter) for x in arguments)
    )


def laid_out_like(x: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of x as torch.empty_like(x) would lie, which is what compiled code expects."""
    if x.is_contiguous() and gradient.is_contiguous():
        return gradient
    like = torch.empty_like(x)
    return gradient if like.stride() == gradient.stride() else like.copy_(gradient)


def _is_state(name: str) -> bool:
    """Whether a field holds states; their gradients are dense and of the dtype sums are carried in."""
    return name.startswith("initial")


def _tensors(count: int) -> str:
    return ", ".join(["Tensor"] * count)
