"""One matrix: every engine, every case, against the fp64 token loop: outputs, final states and all gradients."""

from dataclasses import replace

import pytest
import torch

from gsa.ops import SlotState, gated_slot_attention
from tests.ops.cases import (
    ENGINES,
    GATES,
    INTERPRETED,
    Case,
    assert_close,
    in_double,
    light,
    linear_inputs,
    linear_results,
    relative_error,
    slot_inputs,
    slot_results,
    tiny,
)

pytestmark = pytest.mark.any_device
quick_if_interpreted = pytest.mark.quick_if_interpreted

CASES = {
    # With nothing but resets all slots are alike, and the gradient of q is rounding; so slots are written differently.
    **{f"gate: {gate}": Case(gate=gate, write=gate == "all reset") for gate in GATES},
    **{f"gate and write: {gate}": Case(gate=gate, write=True, R=2) for gate in ("paper", "strong", "some reset")},
    **{f"readout: {f}": Case(readout=f, gate="fast") for f in ("identity", "swish", "relu", "relu2")},
    **{f"T = {T}": Case(T=T) for T in (0, 1, 2, 63, 64, 65, 129)},
    "no initial state": Case(initial=False),
    "empty batch": Case(B=0),
    "one row": Case(B=1, H=1),
    "grouped queries": Case(R=3),
    "grouped queries, strong": Case(R=3, gate="strong"),
    "default scale": Case(scale=None),
    "width one": Case(K=1, V=1, M=1),
    "powers of two": Case(K=16, V=32, M=8),
    "more slots than features": Case(K=5, V=3, M=40),
    "nothing recomputed": Case(recompute=False, gate="fast", R=2),
    "packed": Case(lengths=(70, 1, 0, 64, 15, 0)),
    "packed, resets": Case(lengths=(3, 100, 64), gate="some reset", R=2),
    "packed, many short": Case(lengths=(1, 2, 3, 4, 5, 1, 0, 1, 7), gate="fast"),
    "packed, nothing recomputed": Case(lengths=(70, 80), recompute=False),
    "packed, no sequence": Case(lengths=(), T=0),
}


# Each way that a kernel can be compiled, once: written strengths, readouts, grouped queries, states, packing, edges.
VARIANTS = (
    "gate: some reset",
    "gate and write: strong",
    "readout: identity",
    "readout: swish",
    "readout: relu",
    "readout: relu2",
    "T = 0",
    "T = 1",
    "no initial state",
    "empty batch",
    "nothing recomputed",
    "packed",
    "packed, nothing recomputed",
    "packed, no sequence",
)


def test_the_quick_variants_are_cases() -> None:
    """A misspelt one would be left out in silence."""
    assert set(VARIANTS) <= set(CASES)


@quick_if_interpreted(name=VARIANTS, dtype=[torch.float64])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_slot_attention(engine: str, name: str, dtype: torch.dtype) -> None:
    case = light(CASES[name], engine)
    inputs = slot_inputs(case, dtype)
    exact = slot_results(case, in_double(inputs), "reference")
    assert_close(slot_results(case, inputs, engine), exact, dtype)


@quick_if_interpreted(name=["packed", "nothing recomputed"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["gate: paper", "gate: some reset", "packed", "grouped queries", "nothing recomputed"])
@pytest.mark.usefixtures("small_segments")
def test_slot_attention_in_many_segments(engine: str, name: str) -> None:
    case = replace(CASES[name], B=3, T=330)
    if engine == INTERPRETED:
        case = replace(case, B=1, H=1, T=150)
    inputs = slot_inputs(case)
    assert_close(slot_results(case, inputs, engine), slot_results(case, inputs, "reference"), torch.float64)


@quick_if_interpreted(recompute=[True])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.usefixtures("small_segments")
def test_a_batch_in_groups_of_rows(engine: str, recompute: bool) -> None:
    """Five short rows, of which some are worked on together."""
    case = Case(B=5, T=40, H=1, K=16, V=16, recompute=recompute)
    inputs = slot_inputs(case)
    assert_close(slot_results(case, inputs, engine), slot_results(case, inputs, "reference"), torch.float64)


SIDES = {
    "key": ("key", None),
    "value": (None, "value"),
    "both": ("key", "value"),
    "head": ("head", None),
    "head and value": ("head", "value"),
    "neither": (None, None),
}


RESETS = Case(gate="some reset", R=2)
PACKED = Case(lengths=(70, 0, 30, 1), gate="fast", scale=None)
KEPT = Case(gate="fast", recompute=False)


@quick_if_interpreted(sides=SIDES, case=[RESETS, Case(T=0)], dtype=[torch.float64])
@quick_if_interpreted(sides=["both"], case=[PACKED, KEPT], dtype=[torch.float64])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize(
    "case",
    [
        Case(R=2),
        Case(gate="strong"),
        RESETS,
        Case(gate="thousand nats", initial=False),
        PACKED,
        KEPT,
        Case(T=0),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_linear_attention(engine: str, sides: str, case: Case, dtype: torch.dtype) -> None:
    case = light(case, engine)
    inputs = linear_inputs(case, *SIDES[sides], dtype)
    exact = linear_results(case, in_double(inputs), "reference")
    assert_close(linear_results(case, inputs, engine), exact, dtype)


@quick_if_interpreted(tau=[0.1, 8.0])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tau", [0.1, 0.2, 0.5, 1.0, 4.0, 8.0, 16.0])
def test_single_precision_at_real_sizes(engine: str, tau: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32: outputs to 1e-5 and gradients to 1e-4, whatever the damping."""
    monkeypatch.setitem(GATES, "damped", lambda noise: torch.nn.functional.logsigmoid(noise) / tau)
    case = light(Case(B=1, T=400, H=2, K=64, V=64, M=32, gate="damped", scale=0.2), engine)
    inputs = slot_inputs(case, torch.float32)
    exact = slot_results(case, in_double(inputs), "reference")
    assert_close(slot_results(case, inputs, engine), exact, torch.float32)


@quick_if_interpreted(T=[2, 68], dtype=[torch.float32])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("T", "nats"), [(1, 30.0), (2, 39.0), (4, 19.0), (20, 20.0), (68, 19.0), (64, 0.99)])
def test_gradients_of_gates_that_are_all_strong(engine: str, dtype: torch.dtype, T: int, nats: float) -> None:
    """The gradient of a gate is e^-nats times what goes past it, and must not drown in it, however short the chunk."""
    case = Case(B=1, T=T, H=1 if engine == INTERPRETED else 2, K=5, V=4, M=3, write=True, initial=False)
    inputs = slot_inputs(case, dtype)
    inputs["g"] = torch.full_like(inputs["g"], -nats)
    exact = slot_results(case, in_double(inputs), "reference")
    assert_close(slot_results(case, inputs, engine), exact, dtype)
    case = replace(case, lengths=(T, 1, T))
    inputs = linear_inputs(case, "head", "value", dtype)
    inputs |= {name: torch.full_like(inputs[name], -nats) for name in ("gk", "gv")}
    exact = linear_results(case, in_double(inputs), "reference")
    assert_close(linear_results(case, inputs, engine), exact, dtype)


@quick_if_interpreted(nats=[2.3])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("nats", [0.99, 1.2, 2.3, 5.0])
def test_large_values_under_strong_gates(engine: str, nats: float) -> None:
    """Weights that are split into large and small factors must not overflow where the answer is finite."""
    case = Case(B=1, T=128, H=1, K=64, V=8, gate="fast", initial=False, scale=1.0)
    inputs = linear_inputs(case, None, "value", torch.float32)
    inputs["gv"] = torch.full_like(inputs["gv"], -nats)
    inputs |= {name: 1e4 * inputs[name] for name in ("q", "k", "v")}
    exact = linear_results(case, in_double(inputs), "reference")
    assert_close(linear_results(case, inputs, engine), exact, torch.float32)


@quick_if_interpreted(gate=["some reset"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("gate", ["all reset", "some reset"])
def test_a_full_reset_has_no_gradient(engine: str, gate: str) -> None:
    """exp(-inf) = 0 passes nothing on: the gradient there is exactly zero, not rounding."""
    case = light(Case(gate=gate, write=True), engine)
    inputs = slot_inputs(case, torch.float32)
    dg = slot_results(case, inputs, engine)["dg"]
    assert not dg[inputs["g"].isneginf()].any()


@quick_if_interpreted(gate=["some reset"])
@pytest.mark.parametrize("engine", ["reference", *ENGINES])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", ["slow", "fast", "strong", "some reset"])
def test_half_precision_is_as_good_as_rounding_the_exact_answer(engine: str, dtype: torch.dtype, gate: str) -> None:
    case = light(Case(gate=gate, R=2, scale=0.3), engine)
    inputs = slot_inputs(case, dtype)
    exact = slot_results(case, in_double(inputs), "reference")
    for name, actual in slot_results(case, inputs, engine).items():
        rounded = relative_error(exact[name].to(actual.dtype), exact[name])
        limit = max(2 * rounded, 1e-5)  # states are fp32, and their rounding is not the issue
        assert relative_error(actual, exact[name]) <= limit, name


@pytest.mark.parametrize("engine", ENGINES)
def test_gates_in_another_dtype_than_the_rest(engine: str) -> None:
    """bf16 gates beside fp32 keys, and fp32 gates beside bf16 keys: each is taken at its own precision."""
    case = tiny(Case(gate="slow"), engine)
    for g_dtype, dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        inputs = slot_inputs(case, dtype)
        inputs["g"] = slot_inputs(case)["g"].to(g_dtype)
        exact = slot_results(case, in_double(inputs), "reference", gradients=False)["o"]
        actual = slot_results(case, inputs, engine)
        assert actual["dg"].dtype == g_dtype
        limit = 1e-5 if dtype == torch.float32 else 2 * relative_error(exact.to(dtype), exact)
        assert relative_error(actual["o"], exact) <= limit


@pytest.mark.parametrize("engine", ENGINES)
def test_a_slow_gate_in_bf16_still_writes(engine: str) -> None:
    """1 - exp(g) is zero in bf16 for g = -1e-3; the write strength must not be."""
    case = Case(initial=False)
    inputs = slot_inputs(case, torch.bfloat16)
    inputs["g"] = torch.full_like(inputs["g"], -1e-3)
    exact = slot_results(case, in_double(inputs), "reference", gradients=False)
    actual = slot_results(case, inputs, engine, gradients=False)
    assert actual["final_k"].abs().max() > 0
    assert relative_error(actual["final_k"], exact["final_k"]) < 1e-5


SMALL = Case(B=1, T=5, H=1, R=2, K=3, V=2, M=3, write=True, gate="fast")


@quick_if_interpreted(case=[])
@pytest.mark.parametrize("engine", ["reference", *ENGINES])
@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        Case(H=1, K=2, V=3, M=2, lengths=(3, 0, 4), gate="strong"),
        Case(B=1, T=70, H=1, K=2, V=1, M=2, gate="fast", readout="swish"),
    ],
    ids=str,
)
def test_gradcheck(engine: str, case: Case) -> None:
    """Numerical gradients along random directions: two calls for each, not two for each entry of each input."""
    case = case.packed()
    inputs = slot_inputs(case)
    names = list(inputs)

    def f(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = dict(zip(names, tensors, strict=True))
        o, state = gated_slot_attention(
            *(x[n] for n in "qkvg"),
            x.get("s"),
            readout=case.readout,
            initial_state=SlotState(x["state_k"], x["state_v"]),
            output_final_state=True,
            cu_seqlens=case.cu_seqlens,
            backend=engine,
        )
        assert state is not None
        return o, state.k, state.v

    assert torch.autograd.gradcheck(f, [t.requires_grad_() for t in inputs.values()], fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("gate", ["paper", "strong", "some reset"])
def test_the_sizes_of_the_paper(engine: str, gate: str) -> None:
    """4 heads of 512 with 64 slots over 2048 tokens forward, and narrower heads also backward, in many segments.

    Interpreted, one head over 256 tokens: its kernels know of one head at a time, and more tokens are more of the same.
    """
    wide = Case(B=1, T=2048, H=4, K=512, V=512, M=64, gate=gate, scale=0.05)
    deep = Case(B=2, T=1024, H=2, K=128, V=128, M=64, gate=gate, scale=0.1)
    if engine == INTERPRETED:
        wide, deep = (replace(case, B=1, T=256, H=1) for case in (wide, deep))
    inputs = slot_inputs(wide, torch.float32)
    exact = slot_results(wide, in_double(inputs), "reference", gradients=False)
    assert_close(slot_results(wide, inputs, engine, gradients=False), exact, torch.float32)
    inputs = slot_inputs(deep, torch.float32)
    exact = slot_results(deep, in_double(inputs), "reference")
    assert_close(slot_results(deep, inputs, engine), exact, torch.float32)
