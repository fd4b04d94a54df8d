"""Gates above 0 and NaN are refused by every engine, in one sentence, unless the caller says not to look."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.ops import (
    SlotState,
    attention_with_bounded_memory,
    gated_linear_attention,
    gated_slot_attention,
    gated_slot_attention_step,
    selective_scan,
    use_backend,
)
from tests.device import DEVICE
from tests.ops.cases import ENGINES

pytestmark = pytest.mark.any_device
EVERY = pytest.mark.parametrize("engine", ["reference", *ENGINES])
B, T, H, K, M = 2, 5, 2, 4, 3
LOG = "must be log gates, at most 0 (-inf is a full reset), but"


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cpu").to(DEVICE)


def gates(*shape: int) -> Tensor:
    """With a full reset, and one that keeps all."""
    g = -drawn(*shape).abs()
    g[0, 0, 0, 0], g[-1, -1, -1, -1] = -torch.inf, 0.0
    return g


def wrong(g: Tensor, value: float, place: int = -1) -> Tensor:
    """The same gates with one that is bad."""
    g = g.clone()
    g.view(-1)[place] = value
    return g


def slots(g: Tensor, **options: Any) -> Tensor:
    return gated_slot_attention(drawn(B, T, H, K), drawn(B, T, H, K), drawn(B, T, H, K), g, check=True, **options)[0]


def linear(**options: Any) -> Tensor:
    return gated_linear_attention(*(drawn(B, T, H, K) for _ in range(3)), check=True, **options)[0]


def refused(operation: str, sentence: str) -> Any:
    return pytest.raises(GSAError, match=f"^{operation}: {re.escape(sentence)}")


@EVERY
def test_good_gates_pass(engine: str) -> None:
    assert slots(gates(B, T, H, M), backend=engine).isfinite().all()
    assert linear(gk=gates(B, T, H, 1), gv=gates(B, T, H, K), backend=engine).isfinite().all()


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_gate_above_0_or_nan_is_refused(engine: str, dtype: torch.dtype) -> None:
    good = gates(B, T, H, M).to(dtype)
    for place in (0, good.numel() // 2 + 1, -1):
        with refused("gated_slot_attention", f"g {LOG} the largest is 0.5"):
            slots(wrong(good, 0.5, place), backend=engine)
        with refused("gated_slot_attention", f"g {LOG} 1 of {good.numel()} are NaN"):
            slots(wrong(good, torch.nan, place), backend=engine)
    with refused("gated_slot_attention", f"g {LOG} the largest is inf"):
        slots(wrong(good, torch.inf), backend=engine)


@EVERY
def test_either_gate_of_linear_attention_is_refused(engine: str) -> None:
    whole, by_head, by_value = gates(B, T, H, K), gates(B, T, H, 1), gates(B, T, H, K)
    with refused("gated_linear_attention", f"gk {LOG} the largest is 0.25"):
        linear(gk=wrong(whole, 0.25), gv=by_value, backend=engine)
    with refused("gated_linear_attention", f"gk {LOG} the largest is 0.25"):
        linear(gk=wrong(by_head, 0.25), backend=engine)
    with refused("gated_linear_attention", f"gv {LOG} 1 of {B * T * H * K} are NaN"):
        linear(gk=whole, gv=wrong(by_value, torch.nan), backend=engine)


@EVERY
def test_probabilities_are_recognised(engine: str) -> None:
    with refused("gated_slot_attention", f"g {LOG} the largest is 1; if they are probabilities, pass g.log()"):
        slots(gates(B, T, H, M).exp(), backend=engine)


@EVERY
def test_with_a_graph_and_packed(engine: str) -> None:
    """Where torch's operator is called, and states are kept; in a sequence that is not the first."""
    x = [drawn(1, T, H, K).requires_grad_() for _ in range(3)]
    g, bounds = gates(1, T, H, M), torch.tensor([0, 2, 2, T], device=DEVICE)
    gated_slot_attention(*x, g, cu_seqlens=bounds, backend=engine, check=True)[0].sum().backward()
    assert x[0].grad is not None
    with refused("gated_slot_attention", f"g {LOG} the largest is 2"):
        gated_slot_attention(*x, wrong(g, 2.0), cu_seqlens=bounds, backend=engine, check=True)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the native engine runs on CPUs")
class Named(torch.Tensor):
    """A subclass that has the numbers of a tensor."""


@EVERY
def test_subclasses_of_tensors_are_looked_at(engine: str) -> None:
    """Where they were not, a refused step gave memory that nobody had written."""
    q = drawn(1, 3, 1, K)
    g = torch.ones(1, 3, 1, K, device=DEVICE).as_subclass(Named)
    with refused("gated_slot_attention", f"g {LOG} the largest is 1"):
        gated_slot_attention(q, q, q, g, backend=engine, check=True)
    x = q[:, 0]
    with use_backend(engine), refused("gated_slot_attention_step", f"g {LOG} the largest is 1"):
        state = SlotState.zeros(batch=1, heads=1, slots=K, key_width=K, value_width=K, device=DEVICE)
        gated_slot_attention_step(x, x, x, g[:, 0], state=state, check=True)


def test_every_thread_looks() -> None:
    """Of several chunks and heads, shared by threads, one bad gate is enough."""
    torch.set_num_threads(2)
    q, g = torch.randn(1, 300, 4, 64), -torch.rand(1, 300, 4, 64)
    for place in (0, 40 * 256 + 3, 150 * 256 + 200, -1):
        with refused("gated_slot_attention", f"g {LOG} the largest is 0.125"):
            gated_slot_attention(q, q, q, wrong(g, 0.125, place), backend="native")


@EVERY
def test_a_step_refuses_before_it_changes_a_state(engine: str) -> None:
    state = SlotState(drawn(B, H, K, M), drawn(B, H, M, K))
    before = [x.clone() for x in state]
    q, k, v, g = drawn(B, H, K), drawn(B, H, K), drawn(B, H, K), -drawn(B, H, M).abs()
    for inplace in (False, True):
        with use_backend(engine), refused("gated_slot_attention_step", f"g {LOG} the largest is 0.5"):
            gated_slot_attention_step(q, k, v, wrong(g, 0.5), state=state, inplace=inplace, check=True)
    assert all(torch.equal(x, y) for x, y in zip(state, before, strict=True))
    with use_backend(engine):
        o, _ = gated_slot_attention_step(q, k, v, wrong(g, 0.5), state=state, inplace=True, check=False)
    assert o.isfinite().all()
    assert not torch.equal(state.k, before[0])


@EVERY
def test_logits_of_bounded_memory(engine: str) -> None:
    q, w = drawn(B, T, H, K), drawn(B, T, H, M)
    w[0, 1, 0, 0], operation = -torch.inf, "attention_with_bounded_memory"
    run = lambda w: attention_with_bounded_memory(q, q, q, w, backend=engine, check=True)[0]  # noqa: E731
    assert run(w).isfinite().all()
    with refused(operation, f"w must be write logits, below inf (-inf is nothing written), but 1 of {w.numel()} are"):
        run(wrong(w, torch.nan))
    with refused(operation, "w must be write logits, below inf (-inf is nothing written), but the largest is inf"):
        run(wrong(w, torch.inf))


@pytest.mark.parametrize("engine", ["reference", *(e for e in ENGINES if e != "triton")])
def test_rates_and_lengths_of_the_selective_scan(engine: str) -> None:
    E, S = 70, 3  # more channels than a block of the native engine has
    u, dt, A, C = drawn(B, T, E), drawn(B, T, E).abs(), -drawn(E, S).abs(), drawn(B, T, S)
    A[0, 0], dt[0, 0, 0] = 0.0, 0.0
    run = lambda dt, A: selective_scan(u, dt, A, C, C, backend=engine, check=True)[0]  # noqa: E731
    assert run(dt, A).isfinite().all()
    for place in (1, -1):
        with refused("selective_scan", "dt must be lengths of time, at least 0, but the smallest is -0.5"):
            run(wrong(dt, -0.5, place), A)
        with refused("selective_scan", f"dt must be lengths of time, at least 0, but 1 of {dt.numel()} are NaN"):
            run(wrong(dt, torch.nan, place), A)
        with refused("selective_scan", "A must be decay rates, at most 0, but the largest is 0.25"):
            run(dt, wrong(A, 0.25, place))
        with refused("selective_scan", f"A must be decay rates, at most 0, but 1 of {A.numel()} are NaN"):
            run(dt, wrong(A, torch.nan, place))
    assert selective_scan(u, dt, wrong(A, 0.25), C, C, backend=engine, check=False)[0].isfinite().all()


@EVERY
def test_a_caller_may_insist(engine: str) -> None:
    """With check=False any gate is computed with, and has a gradient: backward never looks."""
    g = wrong(gates(B, T, H, M), 0.5).requires_grad_()
    q = drawn(B, T, H, K)
    o, _ = gated_slot_attention(q, q, q, g, backend=engine, check=False)
    o.sum().backward()
    assert g.grad is not None
    assert g.grad.isfinite().all()


def test_on_a_cpu_it_is_the_default() -> None:
    q, g = drawn(B, T, H, K), torch.ones(B, T, H, M, device=DEVICE)
    if DEVICE.type == "cpu":
        with refused("gated_slot_attention", f"g {LOG} the largest is 1"):
            gated_slot_attention(q, q, q, g)
    else:  # Python would wait for the device
        gated_slot_attention(q, q, q, g)
    with refused("gated_slot_attention", "check must be True, False or None, got 1"):
        gated_slot_attention(q, q, q, g, check=1)


@pytest.mark.parametrize("engine", [e for e in ENGINES if e != "triton"])
def test_compiled_code_looks_too(engine: str) -> None:
    """The engines look inside their operators; the reference, which compilers take apart, does not."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda g: slots(g, backend=engine), backend="eager", fullgraph=True)
    g = gates(B, T, H, M)
    compiled(g)
    with refused("gated_slot_attention", f"g {LOG} the largest is 0.5"):
        compiled(wrong(g, 0.5))
    torch._dynamo.reset()
