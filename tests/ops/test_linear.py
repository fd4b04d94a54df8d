"""Matrix-vector products: every format and instruction set against fp64, the promised errors, and what is refused."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from gsa.errors import BackendUnavailable, GSAError
from gsa.ops import use_backend
from gsa.ops.calls import MatvecCall
from gsa.ops.linear import PackedWeight, matvec, pack, quantise_activations
from gsa.ops.native import library
from gsa.ops.native import linear as native
from tests.examples import examples
from tests.ops.isas import ISAS, NATIVE, needs_native

BACKENDS = ["reference", pytest.param("native", marks=needs_native)]
WAYS = [("fp32", "fp32"), ("bf16", "fp32"), ("int8", "fp32"), ("int8", "int8"), ("int4", "fp32"), ("int4", "int8")]
EXACT = 2e-6  # relative error of sums in fp32


@pytest.fixture(autouse=True)
def _same_isa() -> Iterator[None]:
    before = library.isa() if NATIVE else ""
    yield
    if NATIVE:
        library.use_isa(before)


def use_isa(name: str) -> None:
    try:
        library.use_isa(name)
    except GSAError as error:
        pytest.skip(str(error))


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def expected(weight: PackedWeight, x: Tensor, activations: str) -> Tensor:
    """The product in fp64 of what is stored."""
    if activations == "int8":
        q, scale = quantise_activations(x, weight.shared)
        x = (q.double() * scale.double()).flatten(-2)[..., : weight.K]
    return x.double() @ weight.unpack().double().T


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("format", "activations"), WAYS)
@examples(15)
@given(N=st.integers(1, 70), K=st.integers(1, 200), count=st.integers(1, 16), threads=st.integers(1, 3))
@example(N=1, K=1, count=1, threads=1)
@example(N=17, K=33, count=16, threads=2)
@example(N=500, K=576, count=1, threads=2)
def test_any_size(isa: str, format: str, activations: str, N: int, K: int, count: int, threads: int) -> None:
    use_isa(isa)
    torch.set_num_threads(threads)
    weight, x = pack(torch.randn(N, K), format), torch.randn(count, K)
    y = matvec(weight, x, activations=activations, backend="native")
    assert y.shape == (count, N)
    # A sum of few terms may come out close to zero, so errors are seen beside the size of the terms.
    size = x.double().norm(dim=1, keepdim=True) * weight.unpack().double().norm(dim=1)
    error = (y - expected(weight, x, activations)).abs()
    exact = error <= EXACT * size
    if activations == "int8":
        # An activation halfway between two steps may be rounded to either: one in thousands, and its row is off by it.
        _, step = quantise_activations(x, weight.shared)
        assert int((~exact).any(1).sum()) <= 2
        exact |= error <= step.double().amax() * weight.unpack().double().abs().amax() + EXACT * size
    assert exact.all()


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_integers_are_exact_everywhere(isa: str, format: str) -> None:
    """Weights and activations that are integers with a scale of 1 give the integer result, on every machine."""
    use_isa(isa)
    low, high = (-128, 127) if format == "int8" else (-8, 7)
    values = torch.randint(low, high + 1, (50, 4, 32)).float()
    values[:, :, 0], values[:, :, 1] = low, high
    x = torch.randint(-127, 128, (5, 4, 32)).float()
    x[:, :, 7] = 127
    weight = pack(values.flatten(1), format)
    assert torch.equal(weight.unpack(), values.flatten(1))
    exact = x.flatten(1) @ values.flatten(1).T
    assert torch.equal(matvec(weight, x.flatten(1), activations="int8", backend="native"), exact)
    portable = MatvecCall(weight, x.flatten(1), 5, "int8-portable", None, False, None, None)
    assert torch.equal(native.matvec(portable), exact)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("format", "activations", "bound"),
    [
        ("bf16", "fp32", 0.003),
        ("int8", "fp32", 0.005),
        ("int8", "int8", 0.01),
        ("int4", "fp32", 0.08),
        ("int4", "int8", 0.08),
    ],
)
@pytest.mark.parametrize("K", [576, 1536])
def test_quantisation_error(K: int, format: str, activations: str, bound: float, backend: str) -> None:
    w, x = torch.randn(2048, K), torch.randn(K)
    y = matvec(pack(w, format), x, activations=activations, backend=backend)
    assert error(y, w.double() @ x.double()) <= bound


@pytest.mark.parametrize(("group", "bound"), [(32, 0.005), (64, 0.006), (256, 0.008), (None, 0.009)])
def test_int8_groups(group: int | None, bound: float) -> None:
    w = torch.randn(300, 700)
    packed = pack(w, "int8", group)
    assert packed.group == group
    assert bound / 2 < error(packed.unpack(), w) < bound
    for backend in ("reference", "auto"):
        x = torch.randn(3, 700)
        assert error(matvec(packed, x, backend=backend), x.double() @ packed.unpack().double().T) < EXACT


SHARED = [(32, 32), (64, 64), (96, 96), (128, 128), (192, 96), (256, 128), (None, 64)]


@pytest.mark.parametrize(("group", "shared"), SHARED)
def test_activations_share_scales_within_groups(group: int | None, shared: int) -> None:
    packed, x = pack(torch.randn(40, 700), "int8", group), torch.randn(5, 700) * torch.logspace(-2, 2, 700)
    assert packed.shared == shared  # 22 blocks are a row: two divide it
    size = x.double().norm(dim=1, keepdim=True) * packed.unpack().double().norm(dim=1)
    for backend in ("reference", "auto"):
        y = matvec(packed, x, activations="int8", backend=backend)
        assert ((y - expected(packed, x, "int8")).abs() <= EXACT * size).all()


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_integers_have_room(isa: str, group: int, sign: int) -> None:
    use_isa(isa)
    w = torch.full((20, 512), 255.0 * sign)
    w[:, ::32] = 0
    x = torch.full((9, 512), -127.0)
    assert torch.equal(matvec(pack(w, "int8", group), x, activations="int8", backend="native"), x @ w.T)


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8", "int4"])
def test_zeros_stay_zero(format: str) -> None:
    w = torch.randn(40, 100) + 3  # far from symmetric
    w[::3, ::5] = 0
    w[7] = 0
    w[:, 32:64] = 0
    packed = pack(w, format)
    assert torch.equal(packed.unpack() == 0, w == 0) or format == "int4"
    assert (packed.unpack()[w == 0] == 0).all()
    for activations in ("fp32",) if format in ("fp32", "bf16") else ("fp32", "int8"):
        assert matvec(packed, torch.randn(100), activations=activations)[7] == 0
        assert not matvec(packed, torch.zeros(100), activations=activations).any()


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e30, 1e38])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_extreme_weights(format: str, scale: float) -> None:
    w = torch.rand(20, 64).clamp(0.1) * scale
    found = pack(w, format).unpack()
    assert found.isfinite().all()
    if scale > 1e-38:  # below, fp32 itself has few digits
        assert error(found / scale, w / scale) < 0.1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("format", "activations"), WAYS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(format: str, activations: str, bad: float, backend: str) -> None:
    x = torch.randn(3, 70)
    x[1, 40] = bad
    y = matvec(pack(torch.randn(20, 70), format), x, activations=activations, backend=backend)
    assert not y[1].isfinite().any()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("format", "activations"), WAYS)
@pytest.mark.parametrize("K", [64, 75])
def test_norm_swiglu_and_residual(format: str, activations: str, K: int, backend: str) -> None:
    weight, x, residual = pack(torch.randn(50, K), format), torch.randn(2, 3, 2 * K), torch.randn(2, 3, 50)
    gain = torch.randn(K)

    def found(x: Tensor, **pieces: object) -> Tensor:
        return matvec(weight, x, activations=activations, backend=backend, **pieces)

    def product(x: Tensor) -> Tensor:
        return expected(weight, x, activations)

    # Activations that differ in the last digit may be rounded to another integer.
    bound = 2e-3 if activations == "int8" else EXACT
    gate, up = x.chunk(2, -1)
    assert error(found(x, swiglu=True), product(F.silu(gate) * up)) < bound
    normed = F.rms_norm(gate, (K,), gain, 1e-5)
    assert error(found(gate, norm=(gain, 1e-5)), product(normed)) < bound
    assert error(found(up, residual=residual), product(up) + residual) < bound
    large = F.rms_norm(100 * gate, (K,), gain, 1.0)
    assert error(found(100 * gate, norm=(gain, 1.0), residual=residual), product(large) + residual) < bound


@needs_native
def test_swiglu_of_large_values() -> None:
    x = torch.tensor([-200.0, -90, -20, 0, 20, 90, 200, 1e30] * 5 + [1.0] * 40)
    y = matvec(pack(torch.eye(40), "fp32"), x, swiglu=True, backend="native")
    torch.testing.assert_close(y, F.silu(x[:40]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("format", "activations"), WAYS)
def test_layouts_of_x(format: str, activations: str, backend: str) -> None:
    weight, x = pack(torch.randn(33, 48), format), torch.randn(3, 4, 48)
    options = {"activations": activations, "backend": backend}
    y = matvec(weight, x, **options)
    assert y.shape == (3, 4, 33)
    for view in (x.mT.contiguous().mT, torch.stack((x, x), -1)[..., 0], torch.cat((x, x))[:3]):
        assert torch.equal(matvec(weight, view, **options), y)
    assert torch.allclose(matvec(weight, x[1, 2], **options), y[1, 2], rtol=0, atol=1e-4)
    assert matvec(weight, x[:1, :1].expand(2, 4, 48), **options).shape == (2, 4, 33)


@pytest.mark.parametrize("backend", BACKENDS)
def test_out(backend: str) -> None:
    weight, x, residual = pack(torch.randn(33, 48), "bf16"), torch.randn(2, 48), torch.randn(2, 33)
    y = matvec(weight, x, residual=residual, backend=backend)
    out = torch.empty(2, 33)
    assert matvec(weight, x, residual=residual, out=out, backend=backend) is out
    assert torch.equal(out, y)
    matvec(weight, x, residual=residual, out=residual, backend=backend)
    assert torch.equal(residual, y)


def test_plain_weights_are_not_copied() -> None:
    for format, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        layer = torch.nn.Linear(20, 10, bias=False, dtype=dtype)
        assert pack(layer.weight, format).weight.data_ptr() == layer.weight.data_ptr()
    assert pack(torch.randn(20, 10).T, "fp32").weight.is_contiguous()


@pytest.mark.parametrize(
    ("format", "group"), [("fp32", 32), ("bf16", 32), ("int8", 32), ("int8", 64), ("int8", None), ("int4", 32)]
)
def test_saved_and_read_again(format: str, group: int | None, tmp_path: Path) -> None:
    weight, x = pack(torch.randn(37, 100), format, group), torch.randn(100)
    torch.save(weight.tensors(), tmp_path / "weight.pt")
    again = PackedWeight.from_tensors(torch.load(tmp_path / "weight.pt", weights_only=True))
    assert (again.format, again.N, again.K, again.group) == (weight.format, 37, 100, weight.group)
    assert torch.equal(matvec(again, x), matvec(weight, x))


def test_safetensors(tmp_path: Path) -> None:
    import safetensors.torch

    weights = {format: pack(torch.randn(37, 100), format) for format in ("fp32", "bf16", "int8", "int4")}
    for format, weight in weights.items():
        safetensors.torch.save_file(weight.tensors(), tmp_path / format)
        again = PackedWeight.from_tensors(safetensors.torch.load_file(tmp_path / format))
        assert torch.equal(again.unpack(), weight.unpack())


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_work_on_their_own(duplicate: object) -> None:
    weight, x = pack(torch.randn(37, 100), "int8"), torch.randn(100)
    y = matvec(weight, x)
    again = duplicate(weight)
    if duplicate is not copy.copy:
        weight.weight.zero_()
    assert torch.equal(matvec(again, x), y)


def broken(name: str, **changes: object) -> dict[str, object]:
    return {**pack(torch.randn(37, 100), name).tensors(), **changes}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight": torch.randn(3, 3)}, "expected weight, layout, scale and zero, got weight"),
        (broken("fp32", bias=torch.randn(3)), "got bias, layout, weight"),
        (broken("fp32", layout=torch.tensor([37, 100])), "layout is torch.int64 [2], expected torch.int64 [3]"),
        (
            broken("fp32", layout=torch.tensor([38, 100, 0])),
            "weight of 38 x 100 in fp32 is torch.float32 [38, 100], got",
        ),
        (broken("bf16", layout=torch.tensor([37, 100, 32])), "bf16 has no groups, got 32"),
        (broken("fp32", layout=torch.tensor([-37, -100, 0])), "expected at least 1 x 1, got -37 x -100"),
        (broken("fp32", weight=torch.randn(100, 37).T), "weight must be dense, contiguous"),
        (broken("fp32", weight=torch.randn(37, 100).double()), "no format has a weight of torch.float64"),
        (
            broken("int8", layout=torch.tensor([37, 200, 32])),
            "weight of 37 x 200 in int8 is torch.uint8 [3, 7, 8, 16, 4]",
        ),
        (broken("int8", layout=torch.tensor([37, 100, 31])), "group must be a multiple of 32"),
        (broken("int8", layout=torch.tensor([37, 100, 64])), "scale of 37 x 100 in int8 is torch.bfloat16 [3, 2, 16]"),
        (broken("int8", scale=torch.ones(3, 4, 16)), "got torch.float32 [3, 4, 16]"),
        (broken("int8", scale=torch.full((3, 4, 16), torch.nan).bfloat16()), "scale has values that are not finite"),
        (broken("int4", zero=torch.ones(3, 4, 15, dtype=torch.uint8)), "zero of 37 x 100 in int4"),
        (broken("int4", layout=torch.tensor([37, 100, 64])), "int4 has groups of 32, got 64"),
    ],
)
def test_broken_tensors_are_refused(tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(GSAError) as refused:
        PackedWeight.from_tensors(tensors)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.randn(3, 4), "int3"), "pack: unknown format 'int3'"),
        ((torch.randn(3), "fp32"), "expected a floating-point weight [N, K], got torch.float32 [3]"),
        ((torch.ones(3, 4, dtype=torch.int8), "int8"), "got torch.int8 [3, 4]"),
        ((torch.randn(0, 4), "fp32"), "got torch.float32 [0, 4]"),
        (([[1.0]], "fp32"), "got list"),
        ((torch.randn(3, 4), "int8", 33), "group must be a multiple of 32, or None for a scale per row, got 33"),
        ((torch.randn(3, 4), "int8", 0), "got 0"),
        ((torch.randn(3, 4), "int4", None), "int4 has groups of 32, got None"),
        ((torch.full((3, 4), torch.inf), "int8"), "not finite"),
    ],
)
def test_pack_refuses(arguments: tuple, message: str) -> None:
    with pytest.raises(GSAError) as refused:
        pack(*arguments)
    assert message in str(refused.value)


def _shared() -> dict[str, Tensor]:
    memory = torch.zeros(20)
    return {"x": memory[:8], "out": memory[4:14]}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.randn(10, 8)}, "weight must come from pack, got Tensor"),
        ({"x": [1.0] * 8}, "x must be a dense tensor, got list"),
        ({"x": torch.randn(8).to_sparse()}, "x must be a dense tensor, got torch.sparse_coo"),
        ({"x": torch.randn(8).double()}, "x is torch.float64, expected torch.float32"),
        ({"x": torch.randn(2, 9)}, "x has the shape [2, 9], expected [..., 8]"),
        ({"x": torch.tensor(1.0)}, "x has the shape [], expected [..., 8]"),
        ({"x": torch.randn(17, 8)}, "x has 17 columns, expected 1 to 16"),
        ({"x": torch.randn(0, 8)}, "x has 0 columns, expected 1 to 16"),
        ({"x": torch.randn(8, device="meta")}, "x is on meta, the weight is on cpu"),
        ({"x": torch.randn(8, requires_grad=True)}, "x requires a gradient, and there is none"),
        ({"swiglu": True}, "x has the shape [8], expected [..., 16]"),
        ({"activations": "int4"}, "unknown activations 'int4'; expected 'fp32' or 'int8'"),
        (
            {"weight": pack(torch.randn(10, 8), "bf16"), "activations": "int8"},
            "need a weight in int8 or int4, got bf16",
        ),
        ({"norm": torch.ones(8)}, "norm must be a tuple of a weight and an epsilon"),
        ({"norm": (torch.ones(8), -1.0)}, "norm must be a tuple of a weight and an epsilon"),
        ({"norm": (torch.ones(9), 1e-5)}, "the weight of norm is torch.float32 [9] on cpu, expected torch.float32 [8]"),
        ({"norm": (torch.ones(16)[::2], 1e-5)}, "the weight of norm must be contiguous"),
        ({"norm": (torch.ones(8), 1e-5), "swiglu": True, "x": torch.randn(16)}, "norm and swiglu cannot both"),
        ({"residual": torch.randn(8)}, "residual is torch.float32 [8] on cpu, expected torch.float32 [10] on cpu"),
        ({"residual": 1.0}, "residual must be a dense tensor"),
        ({"out": torch.empty(1, 10)}, "out is torch.float32 [1, 10]"),
        ({"out": torch.empty(10).bfloat16()}, "out is torch.bfloat16 [10]"),
        ({"out": torch.empty(20)[::2]}, "out must be contiguous"),
        (_shared(), "x and out share memory, so out cannot be written to"),
        ({"backend": "abacus"}, "unknown engine 'abacus'"),
    ],
)
def test_matvec_refuses(changes: dict, message: str, backend: str) -> None:
    arguments = {"weight": pack(torch.randn(10, 8), "int8"), "x": torch.randn(8), "backend": backend, **changes}
    with pytest.raises(GSAError) as refused:
        matvec(**arguments)
    assert str(refused.value).startswith("matvec: ")
    assert message in str(refused.value)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = pack(torch.randn(10, 8), "int4"), torch.randn(8)
    monkeypatch.setattr(library, "unavailable", lambda device: "it is not built")
    assert torch.equal(matvec(weight, x), matvec(weight, x, backend="reference"))
    with pytest.raises(BackendUnavailable, match="matvec: 'native' cannot run here: it is not built"):
        matvec(weight, x, backend="native")


def test_use_backend_holds() -> None:
    weight, x = pack(torch.randn(10, 8), "fp32"), torch.randn(8)
    with use_backend("triton"), pytest.raises(BackendUnavailable, match="matvec: the engine 'triton' has no such"):
        matvec(weight, x)
    with use_backend("chunk"):
        assert torch.equal(matvec(weight, x), matvec(weight, x, backend="reference"))


@needs_native
def test_several_threads_at_once() -> None:
    torch.set_num_threads(2)
    weights = [pack(torch.randn(200, K), format) for K in (64, 100, 576) for format in ("bf16", "int8", "int4")]
    xs = [torch.randn(4, weight.K) for weight in weights]
    alone = [matvec(weight, x) for weight, x in zip(weights, xs, strict=True)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(matvec, weights * 20, xs * 20))
    assert all(torch.equal(a, b) for a, b in zip(together, alone * 20, strict=True))


@needs_native
def test_after_a_fork() -> None:
    code = """
import os, torch
from gsa.ops.linear import matvec, pack
from gsa.ops.native import library
library.use_every_thread(True)
torch.set_num_threads(2)
weight, x = pack(torch.randn(500, 576), "int8"), torch.randn(576)
y = matvec(weight, x, backend="native")
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(matvec(weight, x, backend="native"), y) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
def test_reader_reads_everything(isa: str, threads: int) -> None:
    use_isa(isa)
    torch.set_num_threads(threads)
    tensors = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in (8, 1600, 4096, 5008)]
    words = numpy.concatenate([x.numpy().view(numpy.uint64) for x in tensors])
    assert native.Reader(tensors)() == int(numpy.bitwise_xor.reduce(words))


def test_a_weight_that_torch_moves() -> None:
    """share_memory_() puts a tensor's numbers elsewhere, and the old memory is gone."""
    weight = torch.randn(40, 64)
    packed, x = pack(weight, "fp32"), torch.randn(64)
    before = matvec(packed, x)
    weight.share_memory_()
    assert torch.equal(matvec(packed, x), before)
    weight.untyped_storage().resize_(0)
    with pytest.raises(GSAError, match=r"PackedWeight: weight \[40, 64\] needs 10240 bytes of memory, .* has 0"):
        matvec(packed, x)


def test_tensors_that_are_none() -> None:
    with pytest.raises(GSAError, match="from_tensors: weight must be a tensor, got NoneType"):
        PackedWeight.from_tensors({"weight": None, "layout": torch.zeros(3, dtype=torch.int64)})  # type: ignore[dict-item]
    with pytest.raises(GSAError, match="not finite in fp32"):
        pack(torch.full((2, 2), 1e300, dtype=torch.float64), "int8")
