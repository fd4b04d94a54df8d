"""Derivatives of the engines' operators: backward in autograd and under torch.func, and a sentence for what they lack.

torch's custom operators cannot be transformed by torch.func, but its autograd functions can. So there is one of each:
the operator, which compilers see and which costs less, and functions around it for grad, vjp, jacrev and vmap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType

from gsa.errors import GSAError


class Derivative:
    """An operator `forward` with its derivative, the operator `backward`, which has no derivative of its own.

    `remember(ctx, inputs, output)` and `differentiate(ctx, *gradients)` are as torch.library.register_autograd takes
    them; the second must call `backward` of this object.
    """

    def __init__(
        self,
        operation: str,
        engine: str | None,
        forward: Any,
        backward: Any,
        remember: Callable[..., None],
        differentiate: Callable[..., Any],
    ):
        """`engine` leads the sentences; None if several use these operators."""
        self.operation, self.engine = operation, engine
        self._operators = forward, backward

        def first(ctx: Any, *gradients: Tensor | None) -> Any:
            self.refuse_forward_mode()
            return differentiate(ctx, *gradients)

        def second(ctx: Any, *gradients: Tensor | None) -> Any:
            raise self._lacks("second derivative")

        forward.register_autograd(first, setup_context=remember)
        backward.register_autograd(second)
        self._functions = _function(operation, forward, remember, first), _function(operation, backward, None, second)

    def forward(self, *arguments: Any) -> tuple[Tensor, ...]:
        found = self._functions[0].apply(*arguments) if transformed() else self._operators[0](*arguments)
        return tuple(found)

    def backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        found = self._functions[1].apply(*arguments) if transformed() else self._operators[1](*arguments)
        return tuple(found)

    def refuse_forward_mode(self) -> None:
        """Raises inside jvp, where the operator would pass on no derivative at all."""
        if in_forward_mode():
            raise self._lacks("forward-mode derivative (jvp)")

    def _lacks(self, what: str) -> GSAError:
        who = "this backend" if self.engine is None else f"backend {self.engine!r}"
        return GSAError(f"{self.operation}: {who} has no {what}; backend='reference' has one")


def recorded() -> bool:
    """Whether something records calls, and tensors may have no numbers: a compiler, a tracer, or a dispatch mode, such
    as that of fake tensors."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


def transformed() -> bool:
    """Whether torch.func transforms what is called: differentiates it, or maps it over a dimension."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return False
    stack = torch._C._functorch.get_interpreter_stack() or []
    return all(level.key() != TransformType.Functionalize for level in stack)  # that one wants operators


def in_forward_mode() -> bool:
    return not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0


def _function(name: str, operator: Any, remember: Callable[..., None] | None, differentiate: Callable[..., Any]) -> Any:
    """An autograd function that calls the operator, and that torch.func can transform."""

    class Transformable(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> tuple[Tensor, ...]:
            return tuple(operator(*arguments))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            if remember is not None:
                remember(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> Any:
            return differentiate(ctx, *gradients)

        @staticmethod
        def vmap(info: Any, dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
            return _one_by_one(name, Transformable.apply, info, dims, *arguments)

    operator.register_vmap(lambda *arguments: _one_by_one(name, operator, *arguments))  # for compiled code
    return Transformable


def _one_by_one(
    name: str, call: Callable[..., Any], info: Any, dims: tuple[int | None, ...], *arguments: Any
) -> tuple[Any, Any]:
    """All samples of vmap, one call each: what is saved for backward differs in shape from engine to engine."""
    if info.batch_size == 0:
        raise GSAError(f"{name}: vmap needs at least one sample, got a dimension of size 0")
    results = [
        call(*(x if d is None else x.select(d, i) for x, d in zip(arguments, dims, strict=True)))
        for i in range(info.batch_size)
    ]
    stacked = tuple(torch.stack(column) for column in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)
