"""The gate to memory: tensors that were freed get an error, from every engine, where torch would crash."""

from collections.abc import Callable

import pytest
import torch

from gsa.errors import GSAError
from gsa.ops import (
    SlotState,
    gated_linear_attention,
    gated_slot_attention,
    gated_slot_attention_step,
    use_backend,
)
from gsa.ops.linear import PackedWeight, matvec, pack
from gsa.ops.native import arguments
from tests.ops.cases import Case, slot_inputs
from tests.ops.strange import LACKING, MISSING, WHOLE, gone


@pytest.mark.parametrize("engine", ["native", "chunk"])
@pytest.mark.parametrize("kind", LACKING)
def test_what_is_freed_before_backward(kind: str, engine: str) -> None:
    """Of the inputs that were saved, or of the gradient that comes in."""
    x = slot_inputs(Case(), torch.float32)
    for name in "qkvg":
        inputs = {n: t.clone().requires_grad_() for n, t in x.items()}
        o, _ = gated_slot_attention(*(inputs[n] for n in "qkvg"), backend=engine)
        inputs[name].untyped_storage().resize_(8)
        with pytest.raises(GSAError, match=f"gated_slot_attention: {name} .*{MISSING}"):
            o.backward(torch.ones_like(o))
    inputs = {n: t.clone().requires_grad_() for n, t in x.items()}
    o, _ = gated_slot_attention(*(inputs[n] for n in "qkvg"), backend=engine)
    with pytest.raises(GSAError, match=f"gated_slot_attention: .*{MISSING}"):
        o.backward(LACKING[kind](torch.ones_like(o)))


@pytest.mark.parametrize("engine", ["native", "chunk"])
@pytest.mark.parametrize("kind", WHOLE)
def test_any_gradient_comes_in(kind: str, engine: str) -> None:
    x = {name: t.requires_grad_() for name, t in slot_inputs(Case()).items()}
    o, _ = gated_slot_attention(*(x[n] for n in "qkvg"), backend=engine)
    strange = WHOLE[kind](torch.randn(o.shape, dtype=o.dtype))
    found = torch.autograd.grad(o, [x[n] for n in "qkvg"], strange, retain_graph=True)
    plain = torch.autograd.grad(o, [x[n] for n in "qkvg"], strange.clone(memory_format=torch.contiguous_format))
    for a, b in zip(found, plain, strict=True):
        assert torch.equal(a, b)


def test_a_step_in_place_shares_no_memory() -> None:
    """Neither engine would compute the same."""
    B, H, K, V, M = 2, 2, 4, 4, 4
    state = SlotState(torch.zeros(B, H, K, M), torch.zeros(B, H, M, V))
    q, k, v, g = torch.randn(B, H, K), torch.randn(B, H, K), torch.randn(B, H, V), -torch.rand(B, H, M)
    for engine in ("native", "chunk"):
        with use_backend(engine):
            with pytest.raises(GSAError, match=r"k and state\.k share memory, so state\.k cannot be written to"):
                gated_slot_attention_step(q, state.k[..., 0], v, g, state=state, inplace=True)
            with pytest.raises(GSAError, match=r"q and state\.v share memory, so state\.v cannot be written to"):
                gated_slot_attention_step(state.v[:, :, 1], k, v, g, state=state, inplace=True)
            interleaved = torch.zeros(B, H, K * M + 5).as_strided((B, H, K, M), (H * (K * M + 5), K * M + 5, 1, 2))
            with pytest.raises(GSAError, match=r"state\.k is a view that cannot be written to"):
                gated_slot_attention_step(q, k, v, g, state=SlotState(interleaved, state.v), inplace=True)


def test_a_state_may_be_two_parts_of_one_tensor() -> None:
    """Whose numbers lie between each other's, and never at the same place."""
    B, H, K, M = 2, 2, 4, 4
    q, k, v, g = torch.randn(B, H, K), torch.randn(B, H, K), torch.randn(B, H, K), -torch.rand(B, H, M)
    fresh = SlotState(torch.zeros(B, H, K, M), torch.zeros(B, H, M, K))
    expected, _ = gated_slot_attention_step(q, k, v, g, state=fresh)
    both, wide = torch.zeros(B, 2, H, K, M), torch.zeros(B, H, K, 2 * M)
    for state in (SlotState(both[:, 0], both[:, 1]), SlotState(wide[..., :M], wide[..., M:])):
        o, _ = gated_slot_attention_step(q, k, v, g, state=state, inplace=True)
        torch.testing.assert_close(o, expected)
    overlapping = SlotState(wide[..., :M], wide[..., 2 : M + 2])
    with pytest.raises(GSAError, match="share memory"):
        gated_slot_attention_step(q, k, v, g, state=overlapping, inplace=True)


def test_what_stands_for_other_tensors_is_told() -> None:
    weight = pack(torch.randn(8, 64), "fp32")
    with pytest.raises(GSAError, match=r"x is a Tensor that stands for other tensors, and has no memory"):
        torch.vmap(lambda x: matvec(weight, x, backend="native"))(torch.randn(2, 64))


def test_packed_sequences_without_memory() -> None:
    q = torch.randn(1, 5, 1, 4)
    for engine in ("native", "chunk", "reference"):
        with pytest.raises(GSAError, match=f"gated_slot_attention: cu_seqlens .*{MISSING}"):
            gated_slot_attention(q, q, q, -q.abs(), cu_seqlens=gone(torch.tensor([0, 5])), backend=engine)
        nothing = torch._efficientzerotensor((2,), dtype=torch.int64)
        with pytest.raises(GSAError, match="cu_seqlens must run from 0 to T = 5, but runs from 0 to 0"):
            gated_slot_attention(q, q, q, -q.abs(), cu_seqlens=nothing, backend=engine)
    with pytest.raises(GSAError, match=r"cu_seqlens must be an int32 or int64 tensor"):
        gated_slot_attention(q, q, q, -q.abs(), cu_seqlens=torch.tensor([0, 5]).to_sparse())


def test_converted_tensors_without_memory() -> None:
    """torch reads them before an engine does: states of another dtype, and what autocast makes equal."""
    x = slot_inputs(Case(B=1), torch.float32)
    state = SlotState(gone(x["state_k"].half()), x["state_v"].half())
    with pytest.raises(GSAError, match=rf"gated_slot_attention: initial_state\.k .*{MISSING}"):
        gated_slot_attention(*(x[n] for n in "qkvg"), initial_state=state)
    with pytest.raises(GSAError, match=rf"gated_slot_attention_step: state\.k .*{MISSING}"):
        gated_slot_attention_step(*(x[n][:, 0] for n in "qkvg"), state=state)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(GSAError, match=f"gated_linear_attention: k .*{MISSING}"),
    ):
        gated_linear_attention(x["q"], gone(x["k"].bfloat16()), x["v"])


@pytest.mark.parametrize("engine", ["native", "chunk"])
def test_results_of_matvec_go_to_plain_memory(engine: str) -> None:
    weight, x = pack(torch.randn(10, 8), "fp32"), torch.randn(8)
    for out in (torch._neg_view(torch.empty(10)), torch._efficientzerotensor((10,)), gone(torch.empty(10))):
        with pytest.raises(GSAError, match=r"^matvec: out "):
            matvec(weight, x, out=out, backend=engine)
    room = torch.zeros(28)
    with pytest.raises(GSAError, match=r"^matvec: x and out share memory, so out cannot be written to"):
        matvec(weight, room[:8], out=room[7:17], backend=engine)
    with pytest.raises(GSAError, match=r"^matvec: residual and out share memory"):
        matvec(weight, x, residual=room[:10], out=room[9:19], backend=engine)
    total = torch.randn(10)
    before = total.clone()
    torch.testing.assert_close(matvec(weight, x, residual=total, out=total, backend=engine), before + weight.weight @ x)


def test_weights_that_are_freed_later() -> None:
    for format in ("bf16", "int8"):
        for name in ("weight", "scale", "zero") if format == "int8" else ("weight",):
            packed = pack(torch.randn(40, 64), format)
            matvec(packed, torch.randn(64))
            storage = getattr(packed, name).untyped_storage()
            for size in (storage.nbytes() - 2, 1, 0):  # memory that is allocated again may lie where it lay
                storage.resize_(size)
                uses: list[Callable[[], object]] = [
                    lambda packed=packed: matvec(packed, torch.randn(64)),
                    lambda packed=packed: matvec(packed, torch.randn(64), backend="chunk"),
                    lambda packed=packed: packed.unpack(),
                    lambda packed=packed: packed.rows(torch.tensor([1])),
                    lambda packed=packed: PackedWeight.from_tensors(packed.tensors()),
                ]
                for use in uses:
                    with pytest.raises(GSAError, match=rf": {name} .*{MISSING}"):
                        use()


def test_weights_that_are_not_there() -> None:
    weight = torch.randn(32, 32)
    for format in ("fp32", "bf16", "int8", "int4"):
        with pytest.raises(GSAError, match=f"pack: weight .*{MISSING}"):
            pack(gone(weight), format)
        with pytest.raises(GSAError, match="pack: expected a dense weight with its numbers in memory, got meta"):
            pack(weight.to("meta"), format)
        assert torch.equal(pack(torch._neg_view(weight), format).unpack(), pack(-weight, format).unpack())
        assert not pack(torch._efficientzerotensor(weight.shape), format).unpack().any()
    with pytest.raises(GSAError, match="PackedWeight: the numbers of weight must be in memory as they are"):
        PackedWeight("fp32", 32, 32, None, torch._neg_view(weight))
    packed = pack(weight, "bf16")
    with pytest.raises(GSAError, match=f"unpack: out .*{MISSING}"):
        packed.unpack(out=gone(torch.empty(32 * 32)))
    room = torch.zeros(32 * 32)
    half = PackedWeight("bf16", 32, 32, None, room[-512:].view(torch.bfloat16).view(32, 32))
    with pytest.raises(GSAError, match="unpack: weight and out share memory"):
        half.unpack(out=room)


def test_counts_of_32_bits() -> None:
    """What is more would be cut off on the way to C++. Tensors without rows take no memory, however many heads."""
    H, R = 1 << 32, arguments.MAX_QUERIES
    x = torch.empty(0, 3, H, 2)
    with pytest.raises(GSAError, match=f"gated_slot_attention: .*heads in 32 bits, and {H} is too many"):
        gated_slot_attention(x, x, x, x, backend="native")
    state = SlotState(torch.empty(0, H, 2, 2), torch.empty(0, H, 2, 2))
    with use_backend("native"), pytest.raises(GSAError, match=r"gated_slot_attention_step: .*heads in 32 bits"):
        gated_slot_attention_step(*[x[:, 0]] * 4, state=state)
    slots = 1 << 15
    q, g = torch.zeros(1, 1, 1).expand(1, R, 1), torch.zeros(1, 1, slots)
    state = SlotState(torch.zeros(1, 1, 1, slots), torch.zeros(1, 1, slots, 1))
    with use_backend("native"), pytest.raises(GSAError, match=f"q has {R} heads per head of k, too many"):
        gated_slot_attention_step(q, q[:, :1], q[:, :1], g, state=state)
