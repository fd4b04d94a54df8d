"""Norm and SwiGLU: the formulas, their derivatives, and what they keep."""

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import silu

from gsa.mixers import mixer
from gsa.mixers.fused import rms_norm, skip_gate, softplus, swiglu


def plain_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight


CASES: dict[str, tuple[Callable, Callable, tuple[tuple[int, ...], ...]]] = {
    "norm": (lambda x, w: rms_norm(x, w, 1e-3), plain_norm, ((2, 5, 3, 8), (8,))),
    "swiglu": (swiglu, lambda gate, up: silu(gate) * up, ((2, 5, 8), (2, 5, 8))),
    "skip and gate": (skip_gate, lambda x, u, z, w: (x + w * u) * silu(z), (*[(2, 5, 8)] * 3, (8,))),
    "softplus": (softplus, torch.nn.functional.softplus, ((2, 5, 8),)),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_derivatives(case: str) -> None:
    function, formula, shapes = CASES[case]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    torch.testing.assert_close(function(*inputs), formula(*inputs))
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("case", CASES)
def test_compiled_and_mapped(case: str) -> None:
    function, formula, shapes = CASES[case]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), formula(*inputs))
    places = tuple(range(len(inputs)))
    gradients = torch.func.grad(lambda *tensors: function(*tensors).square().sum(), places)(*inputs)
    expected = torch.autograd.grad(formula(*inputs).square().sum(), inputs)
    for found, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32])
def test_norm_of_half_precision_is_computed_in_full(weight: torch.dtype) -> None:
    x, scale = torch.randn(4, 512).bfloat16(), torch.randn(512, dtype=weight)
    found = rms_norm(x, scale, 1e-3)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, plain_norm(x.float(), scale.float()).bfloat16())


def test_norm_of_zeros_and_of_large_numbers() -> None:
    weight = torch.ones(8)
    assert torch.equal(rms_norm(torch.zeros(2, 8), weight, 1e-6), torch.zeros(2, 8))
    assert torch.isfinite(rms_norm(torch.full((2, 8), 1e4, dtype=torch.float16), weight.half(), 1e-6)).all()


def test_norm_of_zeros_with_a_tiny_epsilon_has_a_gradient() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    rms_norm(x, torch.ones(8), 1e-26).sum().backward()
    assert torch.isfinite(x.grad).all()


def test_liger_gets_what_it_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with liger-kernel, its functions are called in the order of their arguments."""

    def norm(
        X: torch.Tensor, W: torch.Tensor, eps: float, offset: float, casting_mode: str, in_place: bool
    ) -> torch.Tensor:
        assert (eps, offset, casting_mode, in_place) == (1e-3, 0.0, "gemma", False)
        return plain_norm(X, W)

    def silu_mul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return silu(a) * b

    monkeypatch.setattr("gsa.mixers.fused.liger_for", lambda x: {"rms_norm": norm, "swiglu": silu_mul})
    for function, formula, shapes in CASES.values():
        inputs = [torch.randn(shape) for shape in shapes]
        torch.testing.assert_close(function(*inputs), formula(*inputs))


@pytest.mark.parametrize("case", CASES)
def test_only_the_inputs_are_kept(case: str) -> None:
    function, _, shapes = CASES[case]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()), lambda x: x):
        function(*inputs)
    assert set(kept) <= {x.data_ptr() for x in inputs}


def test_inputs_that_depend_on_each_other() -> None:
    """The first derivative is the same whether or not a second one is wanted."""
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 8), (8,)))
    uses = {
        "one input twice": lambda: swiglu(x, x),
        "one made of another": lambda: skip_gate(x.sin(), x, x.exp(), weight),
    }
    for name, use in uses.items():
        once, again = (torch.autograd.grad(use().sum(), x, create_graph=more)[0] for more in (False, True))
        torch.testing.assert_close(again, once, msg=name)


def test_a_layer_of_mamba_whether_or_not_a_second_derivative_is_wanted() -> None:
    layer = mixer("mamba", hidden_size=16).double()
    x = torch.randn(1, 9, 16, dtype=torch.float64, requires_grad=True)
    once, again = (torch.autograd.grad(layer(x)[0].sum(), x, create_graph=more)[0] for more in (False, True))
    torch.testing.assert_close(again, once)


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        assert rms_norm(torch.empty(3, 8), torch.empty(8), 1e-6).shape == (3, 8)
