"""The counter finds the bytes and flops that can be told by hand."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from gsa.bench.gpu import counting as module
from gsa.bench.gpu.counting import Work, counting, saved_for_backward, slot_inputs


@triton.jit
def copy(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def spread(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    first = tl.load(x)
    rows = tl.load(x + at[:, None] * 0 + at[None, :])
    tl.store(y + at[:, None] * BLOCK + at[None, :], rows + first)


@triton.jit
def multiply(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, P: tl.constexpr):
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + i[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * N + j[None, :])
    tl.store(c + i[:, None] * N + j[None, :], tl.dot(left, right, input_precision=P))


@triton.jit
def softmax(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    weights = tl.exp(tl.load(x + at))
    tl.store(y + at, weights / tl.sum(weights, 0))


@triton.jit
def add_atomically(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.atomic_add(y + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def fail(x, N: tl.constexpr):
    tl.store(x, tl.load(x))
    tl.static_assert(N > 0, "never")


@triton.jit
def touch(x, y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at) + tl.load(x + tl.arange(0, BLOCK)))


ROW = torch.ones(4)


def bytes_of(work: Work) -> tuple[int, int, int, int]:
    return work.read, work.written, work.read_once, work.written_once


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.int64, 8)])
def test_a_copy_moves_what_its_mask_lets_through(dtype: torch.dtype, size: int) -> None:
    x, y = torch.ones(100).to(dtype), torch.zeros(100, dtype=dtype)
    with counting() as works:
        copy[(2,)](x, y, 100, BLOCK=64)
    assert torch.equal(x, y)
    (work,) = works
    assert (work.name, work.programs) == ("copy", 2)
    assert bytes_of(work) == (100 * size,) * 4
    assert not work.products
    assert (work.flops, work.exponentials) == (0, 0)


def test_lanes_that_share_an_address_read_it_once_and_programs_each_for_themselves() -> None:
    x, y = torch.ones(32), torch.empty(32, 32)
    with counting() as works:
        spread[(1,)](x, y, BLOCK=32)
    (work,) = works
    assert work.read == 4 + 32 * 4
    assert work.read_once == 32 * 4
    assert work.written == work.written_once == 32 * 32 * 4
    assert work.flops == 32 * 32
    x, y = torch.ones(64), torch.empty(64)
    with counting() as works:
        touch[(4,)](x, y, BLOCK=16)
    (work,) = works
    assert bytes_of(work) == (4 * 2 * 16 * 4, 64 * 4, 64 * 4, 64 * 4)


def test_addresses_stay_few_while_they_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ADDRESSES", 20)
    x, y = torch.ones(128), torch.empty(128)
    with counting() as works:
        touch[(8,)](x, y, BLOCK=16)
    assert bytes_of(works[0]) == (8 * 2 * 16 * 4, 128 * 4, 128 * 4, 128 * 4)


@pytest.mark.parametrize(
    ("dtype", "precision", "kind"),
    [
        (torch.bfloat16, None, "bf16"),
        (torch.float16, None, "fp16"),
        (torch.float32, None, "tf32"),
        (torch.float32, "tf32x3", "tf32x3"),
        (torch.float32, "ieee", "ieee"),
    ],
)
def test_a_product_has_its_flops_by_its_operands(dtype: torch.dtype, precision: str | None, kind: str) -> None:
    a, b, c = torch.ones(32, 16, dtype=dtype), torch.ones(16, 64, dtype=dtype), torch.empty(32, 64)
    with counting() as works:
        multiply[(1,)](a, b, c, M=32, N=64, K=16, P=precision)
    (work,) = works
    assert work.products == {kind: 2 * 32 * 16 * 64}
    assert bytes_of(work) == (a.nbytes + b.nbytes, c.nbytes, a.nbytes + b.nbytes, c.nbytes)


def test_exponentials_and_sums() -> None:
    x, y = torch.zeros(64), torch.empty(64)
    with counting() as works:
        softmax[(1,)](x, y, BLOCK=64)
    assert works[0].exponentials == 64
    assert works[0].flops == 64 + 64  # the sum and the quotients


def test_atomics_read_and_write() -> None:
    x, y = torch.ones(64), torch.zeros(64)
    with counting() as works:
        add_atomically[(1,)](x, y, 50, BLOCK=64)
    assert bytes_of(works[0]) == (2 * 50 * 4, 50 * 4, 2 * 50 * 4, 50 * 4)


def test_a_kernel_that_fails_counts_for_nothing_and_nothing_stays_behind() -> None:
    before = dict(vars(interpreter.interpreter_builder)), interpreter.GridExecutor.__call__
    with counting() as works:
        with pytest.raises(Exception, match="never"):
            fail[(1,)](torch.zeros(1), N=0)
        copy[(1,)](torch.ones(16), torch.zeros(16), 16, BLOCK=16)
    assert [work.name for work in works if not work.name.startswith("torch")] == ["copy"]
    after = dict(vars(interpreter.interpreter_builder)), interpreter.GridExecutor.__call__
    assert set(before[0]) == set(after[0])
    assert before[1] is after[1]
    copy[(1,)](torch.ones(16), torch.zeros(16), 16, BLOCK=16)
    assert len([work for work in works if work.name == "copy"]) == 1


@pytest.mark.parametrize(
    ("operation", "name", "read", "written"),
    [
        (lambda x: x.sum(0), "sum", 64, 16),
        (lambda x: x + x, "add", 128, 64),
        (lambda x: x.mul_(2), "mul_", 64, 64),
        (lambda x: x.bfloat16(), "_to_copy", 64, 32),
        (lambda x: torch.zeros_like(x), "zeros_like", 0, 64),
        (lambda x: x.zero_(), "zero_", 0, 64),
        (lambda x: x.copy_(ROW), "copy_", 16, 64),
        (lambda x: x[:1].expand(4, 4) + 1, "add", 16, 64),
    ],
)
def test_operations_of_torch(operation: object, name: str, read: int, written: int) -> None:
    x = torch.ones(4, 4)
    with counting() as works:
        operation(x)  # type: ignore[operator]
    (work,) = works
    assert (work.name, work.programs) == (f"torch.{name}", 0)
    assert bytes_of(work) == (read, written, read, written)


def test_views_and_fresh_memory_move_nothing() -> None:
    torch.use_deterministic_algorithms(False)  # which would write NaN into fresh memory
    x = torch.ones(4, 6)
    with counting() as works:
        x.view(24).view(6, 4).t()[1:].unsqueeze(0).expand(3, 3, 6).detach()
        torch.empty_like(x), x.new_empty(3), torch.empty(2)
        x.contiguous()
    assert works == []


def test_what_autograd_saves() -> None:
    x, y = (torch.rand(8).requires_grad_() for _ in range(2))
    with saved_for_backward((x, y)) as saved:
        (x * y).exp().mul(x).sum()
    assert saved.inputs == 2 * 32  # x once, although two operations save it
    assert saved.extra == 32  # exp's output, which two operations save as well


def test_inputs_are_those_of_the_paper() -> None:
    q, k, v, g = slot_inputs(5, 8, 3, gate_dtype=torch.float32)
    shapes: list[Tensor] = [q, k, v]
    assert all(x.shape == (1, 5, 1, 8) and x.dtype == torch.bfloat16 for x in shapes)
    assert g.shape == (1, 5, 1, 3)
    assert (g <= 0).all()
