"""torch.func and second derivatives: each either gives what the reference gives, or names the backend that has it."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from gsa.errors import GSAError
from gsa.ops import (
    SlotState,
    attention_with_bounded_memory,
    gated_linear_attention,
    gated_slot_attention,
    gated_slot_attention_step,
    selective_scan,
    use_backend,
    window_attention,
)
from tests.device import DEVICE
from tests.ops.cases import ENGINES, INTERPRETED, engines

pytestmark = pytest.mark.any_device
B, T, H, K, V, M = 1, 3, 2, 3, 2, 2

Function = Callable[[Tensor], Tensor]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, device="cpu").to(DEVICE)


def _operations(backend: str) -> dict[str, tuple[Function, Tensor, str]]:
    """By name: a function of one tensor, the tensor, and the operation that errors name."""
    torch.manual_seed(0)
    q, k, v = drawn(B, T, H, K), drawn(B, T, H, K), drawn(B, T, H, V)
    g, gk, w = -drawn(B, T, H, M).abs(), -drawn(B, T, H, K).abs(), drawn(B, T, H, M)
    u, dt, A, C = drawn(B, T, K), drawn(B, T, K).abs(), -drawn(K, M).abs(), drawn(B, T, M)
    state = SlotState(drawn(B, H, K, M), drawn(B, H, M, V))

    def final(q: Tensor) -> Tensor:
        o, after = gated_slot_attention(q, k, v, g, initial_state=state, output_final_state=True, backend=backend)
        assert after is not None
        return o.sum() + after.k.square().sum() * q.sum()

    slots, linear, abc = "gated_slot_attention", "gated_linear_attention", "attention_with_bounded_memory"
    return {
        "slots by q": (lambda q: gated_slot_attention(q, k, v, g, backend=backend)[0], q, slots),
        "slots by g": (lambda g: gated_slot_attention(q, k, v, g, backend=backend)[0], g, slots),
        "slots with states": (final, q, slots),
        "linear by gk": (lambda gk: gated_linear_attention(q, k, v, gk=gk, backend=backend)[0], gk, linear),
        "abc by w": (lambda w: attention_with_bounded_memory(q, k, v, w, backend=backend)[0], w, abc),
        "abc by k": (lambda k: attention_with_bounded_memory(q, k, v, w, normalise=True, backend=backend)[0], k, abc),
        "window by k": (
            lambda k: window_attention(q, k, v, window=3, sinks=(k, k[:, :2], v[:, :2]), backend=backend)[0],
            k,
            "window_attention",
        ),
        "scan by A": (lambda A: selective_scan(u, dt, A, C, C, backend=backend)[0], A, "selective_scan"),
    }


OPERATIONS = list(_operations("reference"))
QUICK = [name for name in ENGINES if name != INTERPRETED]
"""Interpreted kernels are behind the same operators."""


def loss(f: Function) -> Function:
    return lambda x: f(x).square().sum()


def twice(x: Tensor) -> Tensor:
    """Two samples for vmap; gates stay gates, rates rates."""
    return torch.stack((x, x * 1.5))


def pulled(f: Function, x: Tensor) -> Tensor:
    y, pull = torch.func.vjp(f, x)
    return pull(torch.ones_like(y))[0]


def batched_gradients(f: Function, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = f(x)
    return torch.autograd.grad(y, x, torch.stack((torch.ones_like(y), y.detach())), is_grads_batched=True)[0]


def graph_of_a_gradient(f: Function, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(loss(f)(x), x, create_graph=True)[0].detach()


WORK: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "grad": lambda f, x: torch.func.grad(loss(f))(x),
    "vjp": pulled,
    "vmap": lambda f, x: torch.func.vmap(f)(twice(x)),
    "vmap of another dimension": lambda f, x: torch.func.vmap(f, in_dims=-1, out_dims=-1)(twice(x).movedim(0, -1)),
    "vmap of vmap": lambda f, x: torch.func.vmap(torch.func.vmap(f))(torch.stack((twice(x), twice(x) * 0.5))),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "gradients of samples": lambda f, x: torch.func.vmap(torch.func.grad(loss(f)))(twice(x)),
    "gradient of samples": lambda f, x: torch.func.grad(lambda y: torch.func.vmap(f)(y).square().sum())(twice(x)),
    "batched gradients": batched_gradients,
    "graph of a gradient": graph_of_a_gradient,
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("transform", WORK)
def test_these_work(transform: str, name: str) -> None:
    function, x, _ = _operations("reference")[name]
    exact = WORK[transform](function, x)
    for engine in QUICK:
        function, x, _ = _operations(engine)[name]
        torch.testing.assert_close(WORK[transform](function, x), exact)


def tangent(f: Function, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.clone()))).tangent
        assert found is not None
        return found


def tangent_of_a_gradient(f: Function, x: Tensor) -> Tensor:
    """Where the derivative meets backward alone."""
    x = x.clone().requires_grad_()
    y = f(x)
    with forward_ad.dual_level():
        along = forward_ad.make_dual(torch.ones_like(y), y.detach())
        found = forward_ad.unpack_dual(torch.autograd.grad(y, x, along)[0]).tangent
        assert found is not None
        return found


def penalty(f: Function, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(f)(x), x, create_graph=True)
    return torch.autograd.grad(slope.square().sum(), x)[0]


FORWARD_MODE, SECOND = "has no forward-mode derivative (jvp)", "has no second derivative"
REFUSED: dict[str, tuple[Callable[[Function, Tensor], Tensor], str]] = {
    "jvp": (lambda f, x: torch.func.jvp(f, (x,), (x,))[1], FORWARD_MODE),
    "jacfwd": (lambda f, x: torch.func.jacfwd(f)(x), FORWARD_MODE),
    "hessian": (lambda f, x: torch.func.hessian(loss(f))(x), FORWARD_MODE),
    "forward_ad": (tangent, FORWARD_MODE),
    "forward_ad of a gradient": (tangent_of_a_gradient, FORWARD_MODE),
    "grad of grad": (lambda f, x: torch.func.grad(loss(torch.func.grad(loss(f))))(x), SECOND),
    "a penalty on gradients": (penalty, SECOND),
    "autograd's hessian": (lambda f, x: torch.autograd.functional.hessian(loss(f), x), SECOND),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("transform", REFUSED)
def test_these_say_which_backend_has_them(transform: str, name: str) -> None:
    run, lack = REFUSED[transform]
    function, x, _ = _operations("reference")[name]
    assert run(function, x).abs().sum() > 0
    for engine in (*QUICK, "auto"):
        function, x, operation = _operations(engine)[name]
        used = QUICK[-1] if engine == "auto" else engine
        # Of ABC, what is made of its logits knows no backend.
        who = (
            f"(backend {used!r}|this backend)" if operation == "attention_with_bounded_memory" else f"backend {used!r}"
        )
        sentence = f"^{operation}: {who} {re.escape(lack)}; backend='reference' has one$"
        with pytest.raises(GSAError, match=sentence):
            run(function, x)


@pytest.mark.parametrize("engine", engines(slow=INTERPRETED))
def test_grad_and_vmap_with_packed_sequences_and_half_precision(engine: str) -> None:
    """What torch.func does to all arguments at once, against autograd."""
    x = [drawn(1, 7, H, K).to(torch.bfloat16) for _ in range(3)]
    g, bounds = -drawn(1, 7, H, M).abs().to(torch.bfloat16), torch.tensor([0, 4, 4, 7], device=DEVICE)

    def f(*arguments: Tensor) -> Tensor:
        return gated_slot_attention(*arguments, cu_seqlens=bounds, backend=engine)[0].float().square().sum()

    found = torch.func.grad(f, argnums=(0, 1, 2, 3))(*x, g)
    inputs = [t.clone().requires_grad_() for t in (*x, g)]
    for a, b in zip(found, torch.autograd.grad(f(*inputs), inputs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("engine", QUICK)
def test_a_bad_gate_is_refused_inside_a_transform(engine: str) -> None:
    for backend in ("reference", engine):
        function, g, _ = _operations(backend)["slots by g"]
        with pytest.raises(GSAError, match="gated_slot_attention: g must be log gates"):
            torch.func.grad(loss(function))(-g)
        with pytest.raises(GSAError, match="gated_slot_attention: g must be log gates"):
            torch.func.vmap(function)(torch.stack((g, -g)))


@pytest.mark.parametrize("engine", ["reference", *QUICK])
def test_a_step_can_all_of_it(engine: str) -> None:
    """With the portable step, whatever the engine; in place there is no derivative, which is said."""
    state = SlotState(drawn(B, H, K, M), drawn(B, H, M, V))
    q, k, v, g = drawn(B, H, K), drawn(B, H, K), drawn(B, H, V), -drawn(B, H, M).abs()

    def f(q: Tensor, **options: Any) -> Tensor:
        with use_backend(engine):
            return gated_slot_attention_step(q, k, v, g, state=SlotState(*(x.clone() for x in state)), **options)[0]

    exact = torch.autograd.functional.hessian(loss(f), q)
    torch.testing.assert_close(torch.func.hessian(loss(f))(q), exact)
    torch.testing.assert_close(torch.func.vmap(f)(torch.stack((q, 2 * q)))[1], f(2 * q))
    for transform, x in ((torch.func.grad, q), (torch.func.jacfwd, q), (torch.func.vmap, q[None])):
        with pytest.raises(GSAError, match="gated_slot_attention_step: inplace=True has no derivative"):
            transform(lambda q: f(q, inplace=True).sum())(x)


@pytest.mark.parametrize("engine", QUICK)
def test_vmap_over_nothing_is_refused(engine: str) -> None:
    function, x, operation = _operations(engine)["slots by q"]
    with pytest.raises(GSAError, match=f"{operation}: vmap needs at least one sample, got a dimension of size 0"):
        torch.func.vmap(function)(torch.stack((x,))[:0])
