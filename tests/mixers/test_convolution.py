"""Short convolutions: the native form against the torch form in fp64, over packings, states and splits."""

import pytest
import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.mixers.activations import ACTIVATIONS
from gsa.mixers.convolution import ShortConvolution, convolved
from gsa.mixers.sequences import Sequences
from gsa.ops.native import rows

CPU = torch.device("cpu")
# Rows, their length, and borders where they are packed: shorter than the taps, empty, longer than a run of tokens.
PLACES = [(2, 11, None), (1, 2, None), (1, 300, [0, 3, 3, 150, 151, 300]), (1, 5, [0, 0, 5]), (2, 130, None)]


def sequences(rows: int, length: int, borders: list[int] | None) -> Sequences:
    return Sequences(rows, length, CPU, None if borders is None else torch.tensor(borders))


def with_gradients(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    total = sum((out.double() * torch.randn(out.shape, dtype=torch.float64)).sum() for out in outputs)
    return [*outputs, *torch.autograd.grad(total, inputs)]


@pytest.mark.parametrize("size", [2, 4, 9])
@pytest.mark.parametrize("activation", ["none", "swish", "relu"])
def test_values_states_and_gradients(size: int, activation: str) -> None:
    for channels, dtype, tolerance in (
        (1, torch.float64, 1e-12),
        (20, torch.float64, 1e-12),
        (300, torch.float32, 2e-4),
    ):
        conv = ShortConvolution(channels, size, bias=True, activation=activation).to(dtype)
        for place in PLACES:
            where = sequences(*place)
            wide = torch.randn(place[0], place[1], 2 * channels, dtype=dtype)
            x, state = wide[..., :channels].requires_grad_(), torch.randn(where.count, size - 1, channels, dtype=dtype)
            inputs = [x, state.requires_grad_(), *conv.parameters()]
            y, left = conv(x, state, where)
            found = with_gradients([y, left], inputs)
            exact = [part.detach().double().requires_grad_() for part in inputs]
            y = ACTIVATIONS[activation](convolved(exact[0], exact[2], exact[3], exact[1], where))
            joined = torch.cat([exact[1][0], exact[0][0]]) if place[2] is None else None
            wanted = with_gradients([y, conv._left(exact[0], exact[1], where)], exact)
            if joined is not None:
                assert torch.equal(left[0].double(), joined[-(size - 1) :])
            for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
                error = float((a.detach().double() - b.detach()).abs().max())
                assert error < tolerance, f"{channels} channels, {place}: result {i} is off by {error}"


def test_any_split_gives_the_same() -> None:
    conv, x = ShortConvolution(20, 4, bias=False, activation="swish"), torch.randn(1, 150, 20)
    whole, last = conv(x, None, sequences(1, 150, None))
    for cut in (1, 2, 70, 149):
        first, state = conv(x[:, :cut], None, sequences(1, cut, None))
        rest, left = conv(x[:, cut:], state, sequences(1, 150 - cut, None))
        torch.testing.assert_close(torch.cat([first, rest], 1), whole, rtol=0, atol=1e-6)
        assert torch.equal(left, last)


def test_bits_do_not_depend_on_threads() -> None:
    conv, x = ShortConvolution(300, 4, bias=True, activation="swish"), torch.randn(1, 500, 300, requires_grad=True)
    where = sequences(1, 500, [0, 130, 500])

    def results() -> list[Tensor]:
        return with_gradients([conv(x, None, where, False)[0]], [x, *conv.parameters()])

    alone = results()
    torch.set_num_threads(2)
    for a, b in zip(alone, results(), strict=True):
        assert torch.equal(a, b)


def test_second_derivatives_and_transforms() -> None:
    conv = ShortConvolution(3, 3, bias=True, activation="swish").double()
    x = torch.randn(1, 6, 3, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return conv(x, None, sequences(1, 6, None), False)[0]

    assert torch.autograd.gradcheck(run, x)
    assert torch.autograd.gradgradcheck(run, x)
    by_func = torch.func.grad(lambda x: run(x).square().sum())(x)
    torch.testing.assert_close(by_func, torch.autograd.grad(run(x).square().sum(), x)[0])
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), run(x))


def test_without_the_native_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    conv, x = ShortConvolution(20, 4, bias=True, activation="swish"), torch.randn(1, 9, 20)
    for where in (sequences(1, 9, None), sequences(1, 9, [0, 2, 9])):
        found = conv(x, None, where)
        with monkeypatch.context() as patch:
            patch.setattr(rows, "usable", lambda *tensors: False)
            for a, b in zip(found, conv(x, None, where), strict=True):
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("length", [0, 9])
def test_narrow_inputs_whether_or_not_a_second_derivative_is_wanted(length: int) -> None:
    conv, where = ShortConvolution(8, 4, bias=True, activation="swish"), sequences(1, length, None)
    x = torch.randn(1, length, 8).bfloat16().requires_grad_()
    inputs = [x, *conv.parameters()]
    once, again = (
        torch.autograd.grad(conv(x, None, where)[0].float().sum(), inputs, create_graph=more) for more in (False, True)
    )
    for a, b in zip(once, again, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=3e-2, atol=3e-2)


def test_shapes_that_do_not_fit() -> None:
    conv, x = ShortConvolution(8, 4, bias=True, activation="none"), torch.randn(2, 5, 8)
    with pytest.raises(GSAError, match=r"convolution: past has the shape \[1, 3, 8\], expected \[2, 3, 8\]"):
        conv(x, torch.zeros(1, 3, 8), sequences(2, 5, None))
