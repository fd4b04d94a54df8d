"""Functions of rows by the native engine, against formulas in fp64: values, every gradient, any dtype and layout."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gsa.errors import GSAError
from gsa.mixers.fused import PLAIN, gradients
from gsa.ops.native import rows
from gsa.ops.state import compute_dtype

from .isas import ISAS, needs_native, used

pytestmark = needs_native

# name -> the function, and which of y, z and weight it takes
FUNCTIONS = {
    "rms_norm": ("rms_norm", "w"),
    "swiglu": ("swiglu", "y"),
    "skip_gate": ("skip_gate", "yzw"),
    "softplus": ("softplus", ""),
}
TOLERANCE = {torch.float64: 1e-11, torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def inputs_of(takes: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """x, y, z and weight; x is a part of wider rows, as the halves of a projection are."""
    x = (3 * torch.randn(*shape[:-1], 2 * shape[-1], dtype=torch.float64)).to(dtype)[..., shape[-1] :]
    y, z = (torch.randn(shape, dtype=torch.float64).to(dtype) if name in takes else None for name in "yz")
    weight = torch.randn(shape[-1], dtype=compute_dtype(dtype)) if "w" in takes else None
    return x, y, z, weight


def results(name: str, inputs: tuple[Tensor | None, ...], grad: Tensor) -> list[Tensor]:
    """The value and all gradients."""
    function = FUNCTIONS[name][0]
    x, y, z, weight = inputs
    assert x is not None
    out = rows.forward(function, x, y, z, weight=weight, epsilon=1e-3)
    found = rows.backward(function, grad, x, y, z, weight=weight, epsilon=1e-3)
    return [out, *(part for part in found if part is not None)]


@torch.no_grad()
def exact(name: str, inputs: tuple[Tensor | None, ...], grad: Tensor) -> list[Tensor]:
    wide = tuple(None if part is None else part.double() for part in inputs)

    def formula(*given: Tensor | None) -> Tensor:
        return PLAIN[FUNCTIONS[name][0]](*given, 1e-3)

    return [formula(*wide), *(part for part in gradients(formula, wide, grad.double()) if part is not None)]


@pytest.mark.parametrize("isa", ISAS)
def test_values_and_gradients(isa: str) -> None:
    with used(isa):
        for name, (_, takes) in FUNCTIONS.items():
            for dtype, tolerance in TOLERANCE.items():
                for shape in ((3, 1), (2, 5, 7), (40, 64), (3, 1, 33)):
                    inputs, grad = inputs_of(takes, shape, dtype), torch.randn(shape).to(dtype)
                    found, wanted = results(name, inputs, grad), exact(name, inputs, grad)
                    assert len(found) == len(wanted)
                    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
                        error = float((a.double() - b).abs().max() / b.abs().max().clamp(min=1))
                        assert error < tolerance, f"{name} {dtype} {shape}: result {i} is off by {error}"


def test_extreme_numbers_stay_what_they_are() -> None:
    x = torch.tensor([[-torch.inf, -200.0, -80.0, -1e-30, 0.0, 1e-30, 80.0, 200.0, torch.nan]])
    found = rows.forward("softplus", x)
    torch.testing.assert_close(found, torch.logaddexp(x, torch.zeros(())), equal_nan=True, rtol=2e-6, atol=0.0)
    found = rows.forward("swiglu", x[:, 1:], torch.ones(1, 8))
    torch.testing.assert_close(found, F.silu(x[:, 1:]), equal_nan=True, rtol=2e-6, atol=1e-35)


def test_bits_do_not_depend_on_threads_or_on_other_rows() -> None:
    inputs, grad = inputs_of("w", (300, 48), torch.float32), torch.randn(300, 48)
    alone = results("rms_norm", inputs, grad)
    torch.set_num_threads(2)
    for a, b in zip(alone, results("rms_norm", inputs, grad), strict=True):
        assert torch.equal(a, b)
    x, _, _, weight = inputs
    assert x is not None
    assert torch.equal(rows.forward("rms_norm", x[17:18], weight=weight, epsilon=1e-3), alone[0][17:18])


def test_no_rows_have_no_gradient() -> None:
    found = rows.backward("rms_norm", torch.randn(0, 4), torch.randn(0, 4), weight=torch.ones(4), epsilon=1e-3)
    assert found[0] is not None
    assert found[0].shape == (0, 4)
    assert torch.equal(found[3], torch.zeros(4))


@pytest.mark.parametrize("isa", ISAS)
def test_cross_entropy(isa: str) -> None:
    with used(isa):
        for dtype, tolerance in TOLERANCE.items():
            for count, V in ((1, 1), (5, 10), (33, 100)):
                logits = (4 * torch.randn(count, V, dtype=torch.float64)).to(dtype)
                labels = torch.randint(V, (count,))
                labels[count // 2 :: 7] = -100
                wide = logits.double().requires_grad_()
                wanted = F.cross_entropy(wide, labels, reduction="none")
                wanted.sum().backward()
                kept = logits.clone()
                losses = rows.cross_entropy(logits, labels, gradient=False)
                assert torch.equal(logits, kept)  # only a gradient is written there
                torch.testing.assert_close(losses.double(), wanted, rtol=0, atol=max(tolerance, 3e-6) / 10 + 3e-6)
                assert torch.equal(rows.cross_entropy(logits, labels, gradient=True), losses)
                torch.testing.assert_close(logits.double(), wide.grad, rtol=0, atol=tolerance)


def test_what_does_not_fit_is_refused() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(GSAError, match=r"swiglu: shapes do not fit: .*'y': \[3, 5\]"):
        rows.forward("swiglu", x, torch.randn(3, 5))
    with pytest.raises(GSAError, match=r"rms_norm: shapes do not fit: .*'weight': \[5\]"):
        rows.forward("rms_norm", x, weight=torch.randn(5))
    for labels in (torch.tensor([0, 1, 4]), torch.tensor([0, 1]), torch.zeros(3, dtype=torch.int32)):
        with pytest.raises(GSAError, match=r"expected 3 labels in int64 below 4"):
            rows.cross_entropy(x, labels, gradient=True)
    x.untyped_storage().resize_(0)
    with pytest.raises(GSAError, match="freed or made smaller"):
        rows.forward("softplus", x)
