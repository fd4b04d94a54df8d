"""Products over many tokens: every format against fp64, the same bits with and without units, and what is refused."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from gsa.errors import GSAError
from gsa.ops.linear import PackedWeight, matvec, pack, quantise_activations
from gsa.ops.matmul import UNITS, matmul, missing_unit
from gsa.ops.native import library
from tests.examples import examples
from tests.ops.isas import ISAS, needs_native, used

pytestmark = needs_native

WAYS = [("fp32", "bf16"), ("bf16", "bf16"), ("int8", "bf16"), ("int4", "bf16"), ("int8", "int8"), ("int4", "int8")]
EXACT = 2e-6  # relative error of sums in fp32
SIZES = [(5, 7, 17), (33, 100, 100), (70, 129, 25)]
WIDE_SIZES = [(192, 576, 512), (576, 1536, 100), (1, 1, 17), (16, 32, 512), (50, 31, 1000)]


def rounded(weight: PackedWeight, x: Tensor, compute: str) -> tuple[Tensor, Tensor]:
    """Weights and activations as they are multiplied, in fp64."""
    if compute == "bf16":
        return weight.unpack().bfloat16().double(), x.bfloat16().double()
    q, scale = quantise_activations(x, weight.shared)
    return weight.unpack().double(), (q.double() * scale.double()).flatten(-2)[..., : weight.K]


def unit(compute: str) -> str:
    """The unit for such products, or what stands in for it where there is none."""
    return compute if missing_unit(compute) is None else f"{compute}-portable"


def check(format: str, compute: str, N: int, K: int, T: int, way: str) -> None:
    weight, x = pack(torch.randn(N, K), format), torch.randn(T, K)
    y = matmul(weight, x, compute=way)
    assert y.shape == (T, N)
    w, a = rounded(weight, x, compute)
    size = a.norm(dim=1, keepdim=True) * w.norm(dim=1)
    exact = (y - a @ w.T).abs() <= EXACT * size + 1e-30
    if compute == "int8":
        # An activation halfway between two steps may be rounded to either: one in thousands, and its row is off by it.
        assert int((~exact).any(1).sum()) <= 2 + T // 100
    else:
        assert exact.all()
    # What the rounding of both factors may do to a sum: half a step of bf16, or of an integer of 7 bits beside the
    # largest of the activations that share a scale, for each.
    true, bound = x.double() @ weight.unpack().double().T, 2**-8 if compute == "bf16" else 2**-5
    assert ((y - true).abs() <= bound * (x.double().abs() @ weight.unpack().double().abs().T) + 0.02 * size).all()


@pytest.mark.parametrize("size", SIZES + [pytest.param(size, marks=pytest.mark.slow) for size in WIDE_SIZES])
@pytest.mark.parametrize(("format", "compute"), WAYS)
def test_against_fp64(format: str, compute: str, size: tuple[int, int, int]) -> None:
    check(format, compute, *size, unit(compute))


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("format", "compute"), WAYS)
@examples(10)
@given(N=st.integers(1, 70), K=st.integers(1, 200), T=st.integers(1, 60), threads=st.integers(1, 3))
@example(N=32, K=32, T=12, threads=1)
@example(N=33, K=33, T=13, threads=2)
def test_any_size(isa: str, format: str, compute: str, N: int, K: int, T: int, threads: int) -> None:
    torch.set_num_threads(threads)
    with used(isa):
        check(format, compute, N, K, T, f"{compute}-portable")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("format", "compute"), [("fp32", "bf16"), ("int4", "bf16"), ("int8", "int8")])
def test_without_a_unit(isa: str, format: str, compute: str) -> None:
    """One size of the above in each instruction set."""
    with used(isa):
        check(format, compute, 35, 70, 18, f"{compute}-portable")


@pytest.mark.parametrize(("format", "compute"), WAYS)
def test_the_unit_and_plain_code_give_the_same_bits(format: str, compute: str) -> None:
    """Also for numbers too small to be normal, which the unit takes for zero, and for those that are not finite."""
    if missing_unit(compute) is not None:
        pytest.skip(str(missing_unit(compute)))
    torch.manual_seed(1)
    wild = torch.exp2(torch.randint(-130, 60, (40, 96)).float()) * torch.randn(40, 96)
    x = torch.exp2(torch.randint(-130, 60, (30, 96)).float()) * torch.randn(30, 96)
    x[3, 4], x[5, 6], x[7, 8] = torch.inf, torch.nan, -0.0
    for weight, columns in ((pack(wild, format), x), (pack(torch.randn(40, 96), format), torch.randn(30, 96))):
        one, other = (matmul(weight, columns, compute=way) for way in (compute, f"{compute}-portable"))
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(0.0).view(torch.int32), other.nan_to_num(0.0).view(torch.int32))
        assert one[5].isnan().all() or columns is not x


@pytest.mark.parametrize(("format", "compute"), WAYS)
def test_bits_do_not_depend_on_company_or_threads(format: str, compute: str) -> None:
    weight, x, way = pack(torch.randn(70, 100), format), torch.randn(61, 100), unit(compute)
    torch.set_num_threads(2)
    together = matmul(weight, x, compute=way)
    alone = torch.cat([matmul(weight, x[t : t + 1], compute=way) for t in range(61)])
    some = torch.cat([matmul(weight, x[:29], compute=way), matmul(weight, x[29:], compute=way)])
    torch.set_num_threads(1)
    library.use_every_thread(True)
    try:
        torch.set_num_threads(3)
        threads = matmul(weight, x, compute=way)
    finally:
        library.use_every_thread(False)
    for other in (alone, some, threads):
        assert torch.equal(together, other)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_integers_are_exact(format: str) -> None:
    """Weights and activations that are integers with a scale of 1 give the integer result, and matvec's bits."""
    low, high = (-128, 127) if format == "int8" else (-8, 7)
    values = torch.randint(low, high + 1, (50, 4, 32)).float()
    values[:, :, 0], values[:, :, 1] = low, high
    x = torch.randint(-127, 128, (37, 4, 32)).float()
    x[:, :, 7] = 127
    weight = pack(values.flatten(1), format)
    y = matmul(weight, x.flatten(1), compute=unit("int8"))
    assert torch.equal(y, x.flatten(1) @ values.flatten(1).T)
    some = torch.randn(16, 128)
    assert torch.equal(
        matmul(weight, some, compute=unit("int8")), matvec(weight, some, activations="int8", backend="native")
    )


@pytest.mark.parametrize("group", [64, None])
def test_groups_of_any_size(group: int | None) -> None:
    weight, x = pack(torch.randn(40, 150), "int8", group), torch.randn(20, 150)
    for compute in UNITS:
        w, a = rounded(weight, x, compute)
        assert torch.allclose(matmul(weight, x, compute=unit(compute)).double(), a @ w.T, atol=1e-4)


@pytest.mark.parametrize("compute", UNITS)
def test_norm_swiglu_residual_and_several_weights(compute: str) -> None:
    way, T, K = unit(compute), 25, 70
    weights = [pack(torch.randn(N, K), "int8") for N in (33, 5, 64)]
    x, norm, residual = torch.randn(T, 2 * K), torch.rand(K), torch.randn(T, 102)
    joined = torch.cat([matmul(weight, x[:, :K], compute=way) for weight in weights], 1)
    assert torch.equal(matmul(weights, x[:, :K], compute=way), joined)
    assert torch.equal(matmul(weights, x[:, :K], compute=way, residual=residual), joined + residual)
    place = residual.clone()
    assert matmul(weights, x[:, :K], compute=way, residual=place, out=place) is place
    assert torch.equal(place, joined + residual)
    normed = matmul(weights, F.rms_norm(x[:, :K], (K,), norm, 1e-5), compute=way)
    assert torch.allclose(matmul(weights, x[:, :K], compute=way, norm=(norm, 1e-5)), normed, atol=0.3, rtol=0.02)
    gated = matmul(weights[0], F.silu(x[:, :K]) * x[:, K:], compute=way)
    assert torch.allclose(matmul(weights[0], x, compute=way, swiglu=True), gated, atol=0.3, rtol=0.02)
    assert matmul(weights[0], torch.randn(2, 9, K), compute=way).shape == (2, 9, 33)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, way = pack(torch.randn(10, 40), "bf16"), torch.randn(20, 40), "bf16-portable"

    def refused(words: str, *weights: object, **options: object) -> None:
        with pytest.raises(GSAError, match=words):
            matmul(weights[0] if len(weights) == 1 else weights, **({"x": x, "compute": way} | options))

    refused(r"matmul: unknown compute 'fp8'; expected one of 'bf16', 'int8'", weight, compute="fp8")
    refused("products in int8 need weights in int8 or int4, got bf16", weight, compute="int8-portable")
    refused("at least one weight", x=x)
    refused("weight must come from pack, got Tensor", x)
    refused("weights must come from pack, got Tensor", weight, x)
    refused("the same K, got 40 and 30", weight, pack(torch.randn(5, 30), "bf16"))
    refused("no columns", weight, x=x[:0])
    refused(r"expected \[..., 40\]", weight, x=x[:, :30])
    refused("x is torch.float64", weight, x=x.double())
    refused("requires a gradient", weight, x=x.clone().requires_grad_())
    refused("residual is", weight, residual=x)
    refused("out must be contiguous", weight, out=torch.empty(10, 20).T)
    refused("x and out share memory", pack(torch.randn(40, 40), "bf16"), out=x)
    groups = [pack(torch.randn(5, 64), "int8", group) for group in (32, 64)]
    refused("groups of one size", *groups, x=torch.randn(20, 64), compute="int8-portable")
    monkeypatch.setattr("gsa.ops.native.matmul.has_unit", lambda compute: False)
    for compute, name in UNITS.items():
        refused(rf"matmul: products in {compute}: .* has no {name}", pack(torch.randn(9, 40), "int8"), compute=compute)


def test_a_lower_instruction_set_has_no_units() -> None:
    with used("baseline"):
        for compute, name in UNITS.items():
            assert missing_unit(compute) == (
                f"the instruction set in use, baseline, has no {name}" if len(ISAS) > 1 else f"this CPU has no {name}"
            )
