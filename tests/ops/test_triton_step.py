"""One token by the GPU engine's kernel, which runs in Triton's interpreter where there is no GPU."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gsa.errors import GSAError
from gsa.ops import SlotState, gated_slot_attention_step, use_backend
from gsa.ops.calls import StepCall
from tests.device import DEVICE
from tests.ops.cases import GATES, Case, in_double, relative_error, slot_inputs, slot_results

pytestmark = pytest.mark.any_device
TINY = Case(T=1, K=8, V=8, M=8)


@pytest.fixture(autouse=True)
def _triton() -> Iterator[None]:
    with use_backend("triton"):
        yield


def _token(case: Case, dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], SlotState]:
    x = slot_inputs(case, dtype)
    return [x[n][:, 0] for n in ("qkvgs" if case.write else "qkvg")], SlotState(x["state_k"], x["state_v"])


LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6}


def _check(case: Case, dtype: torch.dtype) -> None:
    """Output and state as the fp64 token loop has them, rounded; in place the same bits; else the state untouched."""
    inputs = slot_inputs(case, dtype)
    exact = slot_results(case, in_double(inputs), "reference", gradients=False)
    token, state = _token(case, dtype)
    untouched = SlotState(*(x.clone() for x in state))
    options = {"scale": case.scale, "readout": case.readout}
    o, after = gated_slot_attention_step(*token, state=state, **options)
    assert o.dtype == dtype
    rounding = relative_error(exact["o"].to(dtype), exact["o"])
    assert relative_error(o[:, None], exact["o"]) <= LIMITS.get(dtype, 1.1 * rounding)
    for name, memory in after._asdict().items():
        assert memory.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert relative_error(memory, exact[f"final_{name}"]) <= LIMITS.get(dtype, 1e-6)
    assert all(torch.equal(x, y) for x, y in zip(state, untouched, strict=True))
    o2, same = gated_slot_attention_step(*token, state=state, **options, inplace=True)
    assert same.k is state.k
    assert same.v is state.v
    assert torch.equal(o2, o)
    assert all(torch.equal(x, y) for x, y in zip(state, after, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "case",
    [
        Case(T=1),
        Case(B=1, T=1, K=60, V=60, M=20, R=3, scale=0.3),
        Case(B=1, T=1, H=1, K=200, V=129, M=128, write=True, scale=None),
        Case(T=1, K=1, V=1, M=1),
        Case(B=0, T=1),
    ],
    ids=str,
)
def test_against_the_token_loop(case: Case, dtype: torch.dtype) -> None:
    _check(case, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("readout", ["identity", "swish", "relu", "relu2"])
def test_readouts(readout: str, dtype: torch.dtype) -> None:
    _check(Case(B=3, T=1, R=2, readout=readout, scale=3.0), dtype)


@pytest.mark.parametrize("gate", GATES)
def test_gates(gate: str) -> None:
    _check(Case(T=1, gate=gate), torch.float64)


@pytest.mark.parametrize("nats", [1e-30, 1e-7, 0.4999, 0.5001, 88.0, 1e30])
def test_a_slow_gate_still_writes_and_a_fast_one_still_keeps(nats: float) -> None:
    (q, k, v, g), state = _token(replace(TINY, initial=True))
    g = torch.full_like(g, -nats)
    empty = SlotState(*(torch.zeros_like(x) for x in state))
    written = gated_slot_attention_step(q, k, v, g, state=empty)[1].k
    torch.testing.assert_close(written, k[..., None] * -torch.expm1(g)[:, :, None, :], rtol=1e-6, atol=0)
    kept = gated_slot_attention_step(q, 0 * k, v, g, state=state)[1].k
    torch.testing.assert_close(kept, state.k * g.exp()[:, :, None, :], rtol=1e-5, atol=0)


def test_scores_that_would_overflow_the_exponential() -> None:
    _check(Case(T=1, scale=300.0), torch.float32)
    _check(Case(T=1, scale=300.0, readout="swish"), torch.float32)


@pytest.mark.parametrize("gate", [torch.bfloat16, torch.float64])
def test_gates_in_another_dtype_than_the_rest(gate: torch.dtype) -> None:
    (q, k, v, g), state = _token(TINY)
    o, after = gated_slot_attention_step(q, k, v, g.to(gate), state=state)
    expected, wanted = gated_slot_attention_step(q, k, v, g.to(gate).float(), state=state)
    assert torch.equal(o, expected)
    assert torch.equal(after.v, wanted.v)


def test_a_state_in_another_dtype() -> None:
    token, state = _token(TINY)
    half = SlotState(*(x.half() for x in state))
    o, after = gated_slot_attention_step(*token, state=half)
    expected, wanted = gated_slot_attention_step(*token, state=SlotState(*(x.float() for x in half)))
    assert torch.equal(o, expected)
    assert torch.equal(after.k, wanted.k)


def _strided(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0]


def test_strides_and_gaps() -> None:
    token, state = _token(Case(T=3, R=2, write=True))
    expected, _ = gated_slot_attention_step(*token, state=state)
    spread, before = [_strided(x) for x in token], SlotState(*map(_strided, state))
    assert torch.equal(gated_slot_attention_step(*spread, state=before)[0], expected)
    o, after = gated_slot_attention_step(*spread, state=before, inplace=True)  # by torch: the tensors are not dense
    assert after.k is before.k
    torch.testing.assert_close(o, expected)


def test_negated_views() -> None:
    """Tensors whose sign torch only remembers."""
    (q, k, v, g), state = _token(TINY)
    lazy = torch._neg_view(k)
    expected = gated_slot_attention_step(q, -k, v, g, state=state)[0]
    assert torch.equal(gated_slot_attention_step(q, lazy, v, g, state=state)[0], expected)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("write", [False, True])
def test_the_operators_pass_the_checks_of_torch(write: bool, inplace: bool) -> None:
    token, state = _token(Case(T=1, R=2, write=write))
    arguments = (*token, *([] if write else [None]), *state, 0.5, "softmax", True)
    gated_slot_attention_step(*token, state=state)  # which registers them
    operator = torch.ops.gsa.triton_step_ if inplace else torch.ops.gsa.triton_step
    torch.library.opcheck(operator.default, arguments)


@pytest.mark.parametrize("inplace", [False, True])
def test_compiles_whole(inplace: bool) -> None:
    torch._dynamo.reset()
    token, state = _token(TINY)

    def f(state_k: torch.Tensor, state_v: torch.Tensor) -> tuple[torch.Tensor, SlotState]:
        return gated_slot_attention_step(*token, state=SlotState(state_k, state_v), inplace=inplace)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    expected, after = f(*(x.clone() for x in state))
    own = [x.clone() for x in state]
    o, found = compiled(*own)
    assert torch.equal(o, expected)
    assert torch.equal(found.k, after.k)
    assert torch.equal(own[0], after.k if inplace else state.k)
    torch._dynamo.reset()


@pytest.mark.parametrize("inplace", [False, True])
def test_tensors_that_are_not_there(inplace: bool) -> None:
    """Fake tensors have shapes and no memory."""
    token, state = _token(TINY)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (*token, *state)]
        o, after = gated_slot_attention_step(*fake[:4], state=SlotState(*fake[4:]), inplace=inplace)
        assert o.shape == token[2].shape
        assert after.k.shape == state.k.shape


def test_a_step_that_is_traced() -> None:
    token, state = _token(TINY)

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return gated_slot_attention_step(q, k, v, g, state=state)[0]

    graph = make_fx(f)(*token)
    assert torch.ops.gsa.triton_step.default in {node.target for node in graph.graph.nodes}
    other = [x.flip(0) for x in token]
    assert torch.equal(graph(*other), f(*other))


def test_with_gradients_it_is_torch_that_steps() -> None:
    x = {n: t.requires_grad_() for n, t in slot_inputs(TINY).items()}
    state = SlotState(x["state_k"], x["state_v"])
    gradients = []
    for engine in ("triton", "chunk"):
        with use_backend(engine):
            o, _ = gated_slot_attention_step(*(x[n][:, 0] for n in "qkvg"), state=state)
        gradients.append(torch.autograd.grad(o.sum(), list(x.values())))
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_in_place_is_noticed_by_autograd() -> None:
    token, state = _token(TINY)
    loss = (state.k * torch.zeros_like(state.k, requires_grad=True)).sum()
    gated_slot_attention_step(*token, state=state, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_place_wants_two_memories() -> None:
    token, state = _token(TINY)
    with pytest.raises(GSAError, match=r"state\.k and state\.v share memory"):
        gated_slot_attention_step(*token, state=SlotState(state.k, state.k), inplace=True)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="there are no sparse files on a GPU")
def test_offsets_beyond_32_bits(tmp_path: Path) -> None:
    """Rows so far apart that 32 bits do not count to the third, in a file that is nearly all hole."""
    (q, k, v, g), state = _token(replace(TINY, B=3), torch.float16)
    apart = (1 << 30) + 64
    sparse = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2 * apart + q[0].numel(), dtype=q.dtype)
    far = sparse.as_strided(q.shape, (apart, *q.stride()[1:])).copy_(q)
    expected, _ = gated_slot_attention_step(q, k, v, g, state=state)
    assert torch.equal(gated_slot_attention_step(far, k, v, g, state=state)[0], expected)


def test_double_precision_does_not_pass_through_single() -> None:
    """Numbers reach a compiled kernel in single precision, and so a scale must not."""
    from gsa.ops.triton.launch import TARGETS, recording
    from gsa.ops.triton.step import step

    token, state = _token(TINY, torch.float64)
    absent = [x.to("meta") for x in (*token, *state)]
    with recording(TARGETS["sm_90"]) as launches:
        step(StepCall(*absent[:4], None, *absent[4:], 0.3, "softmax", False), inplace=True)
    assert [launch.arguments["scale"] for launch in launches] == [1.0]
