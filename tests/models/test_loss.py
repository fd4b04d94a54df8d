"""The loss in pieces is the plain loss, and holds little memory."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from gsa.bench.memory import measurable, measured_alone
from gsa.errors import GSAError
from gsa.mixers.sequences import padding_of
from gsa.models import loss as loss_module
from gsa.models.loss import linear_cross_entropy, next_token_labels


@pytest.fixture(params=[1, 7, 10_000], ids=["row by row", "few rows", "at once"])
def _pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "LOGITS_AT_ONCE", request.param * 13)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, weight = torch.randn(20, 8, dtype=dtype, requires_grad=True), torch.randn(13, 8, dtype=dtype, requires_grad=True)
    labels = torch.randint(13, (20,))
    labels[[0, 5, 19]] = -100
    return x, weight, labels


@pytest.mark.usefixtures("_pieces")
def test_value_and_gradients() -> None:
    x, weight, labels = inputs()
    for scale in (1.0, 1e3):  # large logits overflow an exponential that is not anchored
        expected = cross_entropy(scale * x @ weight.T, labels)
        found = linear_cross_entropy(scale * x, weight, labels)
        torch.testing.assert_close(found, expected)
        for a, b in zip(
            torch.autograd.grad(3 * found, (x, weight)), torch.autograd.grad(3 * expected, (x, weight)), strict=True
        ):
            torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("_pieces")
def test_only_what_needs_a_gradient_gets_one() -> None:
    x, weight, labels = inputs()
    (grad,) = torch.autograd.grad(linear_cross_entropy(x.detach(), weight, labels), [weight])
    (expected,) = torch.autograd.grad(cross_entropy(x.detach() @ weight.T, labels), [weight])
    torch.testing.assert_close(grad, expected)
    (grad,) = torch.autograd.grad(linear_cross_entropy(x, weight.detach(), labels), [x])
    (expected,) = torch.autograd.grad(cross_entropy(x @ weight.detach().T, labels), [x])
    torch.testing.assert_close(grad, expected)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(x, weight, labels), cross_entropy(x @ weight.T, labels))


def test_count_divides_the_sum() -> None:
    x, weight, labels = inputs()
    expected = cross_entropy(x @ weight.T, labels, reduction="sum") / 5
    torch.testing.assert_close(linear_cross_entropy(x, weight, labels, count=5), expected)
    torch.testing.assert_close(linear_cross_entropy(x, weight, labels, count=torch.tensor(5)), expected)


def test_no_label_counts() -> None:
    x, weight, labels = inputs()
    assert linear_cross_entropy(x, weight, torch.full_like(labels, -100)).isnan()
    assert linear_cross_entropy(x, weight, torch.full_like(labels, -100), count=1) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision(dtype: torch.dtype) -> None:
    x, weight, labels = inputs(torch.float32)
    found = linear_cross_entropy(x.to(dtype), weight.to(dtype), labels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, cross_entropy(x @ weight.T, labels), rtol=2e-2, atol=1e-2)
    found.backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_autocast() -> None:
    x, weight, labels = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_cross_entropy(x, weight, labels)
    torch.testing.assert_close(found, cross_entropy(x @ weight.T, labels), rtol=2e-2, atol=1e-2)
    found.backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


def test_compiles_without_breaks() -> None:
    x, weight, labels = inputs(torch.float32)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(x, weight, labels), (x, weight))
    for a, b in zip(found, torch.autograd.grad(linear_cross_entropy(x, weight, labels), (x, weight)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("x", "weight", "labels", "message"),
    [
        ((4, 8), (13, 9), (4,), r"do not fit: \[4, 8\], \[13, 9\]"),
        ((4, 8), (13, 8), (5,), r"labels must be int64 \[T\] = \[4\], got torch.int64 \[5\]"),
    ],
)
def test_wrong_shapes(x: tuple, weight: tuple, labels: tuple, message: str) -> None:
    with pytest.raises(GSAError, match=message):
        linear_cross_entropy(torch.zeros(x), torch.zeros(weight), torch.zeros(labels, dtype=torch.int64))


def test_wrong_dtypes() -> None:
    x, weight, labels = inputs()
    with pytest.raises(GSAError, match="labels must be int64"):
        linear_cross_entropy(x, weight, labels.int())
    with pytest.raises(GSAError, match=r"x is torch.float64, weight is torch.float32"):
        linear_cross_entropy(x, weight.float(), labels)


def test_no_second_derivative() -> None:
    x, weight, labels = inputs()
    (grad,) = torch.autograd.grad(linear_cross_entropy(x, weight, labels), [x], create_graph=False)
    assert not grad.requires_grad
    with pytest.raises(GSAError, match="it has no second derivative"):
        torch.autograd.grad(linear_cross_entropy(x, weight, labels), [x], create_graph=True)


def test_one_device() -> None:
    x, weight, labels = inputs()
    with pytest.raises(GSAError, match="x is on cpu, weight on meta, labels on cpu"):
        linear_cross_entropy(x, weight.to("meta"), labels)


def test_the_gradient_is_scaled_in_full_precision() -> None:
    """Dividing by a count that half precision cannot hold."""
    x, weight, labels = inputs(torch.float32)
    half = x.detach().to(torch.float16).requires_grad_()
    (linear_cross_entropy(half, weight.detach().half(), labels, count=1.0) * 2.0**17 / 3e5).backward()
    (expected,) = torch.autograd.grad(cross_entropy(x @ weight.T, labels, reduction="sum") * 2.0**17 / 3e5, [x])
    torch.testing.assert_close(half.grad.float(), expected, rtol=2e-2, atol=1e-3)


def test_liger_gets_what_it_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with liger-kernel, its function is called in the order of its arguments."""
    x, weight, labels = inputs()

    def sum_of(
        _input: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: None,
        ce_weight: None,
        ignore_index: int,
        lse_square_scale: float,
        label_smoothing: float,
        reduction: str,
        softcap: None,
        return_z_loss: bool,
        accum_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, None]:
        assert (lse_square_scale, label_smoothing, return_z_loss, accum_dtype) == (0.0, 0.0, False, torch.float32)
        return cross_entropy(_input @ weight.T, target, ignore_index=ignore_index, reduction=reduction), None

    monkeypatch.setattr(loss_module, "liger_for", lambda x: {"linear_cross_entropy": sum_of})
    torch.testing.assert_close(linear_cross_entropy(x, weight, labels), cross_entropy(x @ weight.T, labels))


def test_labels_are_those_of_the_next_token_of_the_same_sequence() -> None:
    labels = torch.arange(1, 9)[None]
    assert next_token_labels(labels[:, :0], None, None).shape == (1, 0)
    assert next_token_labels(labels, None, None).tolist() == [[2, 3, 4, 5, 6, 7, 8, -100]]
    borders = torch.tensor([0, 0, 3, 3, 8])  # also empty sequences
    assert next_token_labels(labels, None, borders).tolist() == [[2, 3, -100, 5, 6, 7, 8, -100]]
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 0]])
    padding = padding_of(mask, labels, None, "labels")
    assert next_token_labels(labels, padding, None).tolist() == [[-100, -100, 4, 6, -100, 7, -100, -100]]


def memory(setting: dict) -> dict[str, int]:
    """Peak bytes of the loss and its gradients, plain or in pieces, beyond inputs. Runs in a process of its own."""
    from gsa.bench.memory import forget_peak, peak, resident

    T, D, V = setting["sizes"]
    x, weight = torch.randn(T, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    labels = torch.randint(V, (T,))
    x.grad, weight.grad = torch.ones_like(x), torch.ones_like(weight)  # as in training they exist already
    linear_cross_entropy(x[:2], weight[:2], labels[:2] % 2).backward()
    before = resident()
    forget_peak()
    if setting["plain"]:
        cross_entropy(x @ weight.T, labels).backward()
    else:
        linear_cross_entropy(x, weight, labels).backward()
    return {"peak": peak() - before}


@pytest.mark.slow
@pytest.mark.skipif(not measurable(), reason="this system does not tell a process's peak memory")
def test_memory_is_a_small_part_of_the_plain_form() -> None:
    """At T = 4096 and a vocabulary of 32000, less than 15% of what the plain form takes."""
    plain, pieces = (
        measured_alone("tests.models.test_loss:memory", {"sizes": [4096, 256, 32000], "plain": plain})["peak"]
        for plain in (True, False)
    )
    assert pieces < 0.15 * plain, f"{pieces / 2**20:.0f} MB against {plain / 2**20:.0f} MB"
