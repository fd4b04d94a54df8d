"""Operators compute what the numbers of their tensors say, however those lie in memory, or raise a GSAError."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gsa.errors import GSAError
from gsa.ops import (
    BoundedMemoryState,
    SlotState,
    attention_with_bounded_memory,
    gated_slot_attention_step,
    selective_scan,
    use_backend,
)
from gsa.ops.linear import matvec, pack
from tests.examples import examples
from tests.ops.cases import (
    Case,
    Tensors,
    assert_close,
    in_double,
    linear_results,
    relative_error,
    slot_inputs,
    slot_results,
    with_gradients,
)
from tests.ops.strange import MISSING, disguised

EXTREME = (-torch.inf, -1e30, -700.0, -88.0, -1e-3, -1e-40, -0.0, 0.0)
"""Log gates: full resets, what underflows in fp64 and in fp32, denormal numbers, and no decay at all."""

TINY = torch.finfo(torch.float32).tiny * 2**30
"""Sums below this may have lost digits in fp32: decays such as exp(-88) are denormal numbers there, or 0."""

Results = Callable[[Case, Tensors, str], Tensors]


def _gates(case: Case, width: int, random: torch.Generator) -> torch.Tensor:
    chosen = torch.randint(len(EXTREME), (case.B, case.T, case.H, width), generator=random)
    return torch.tensor(EXTREME, dtype=torch.float64)[chosen]


def _slot(case: Case) -> tuple[Tensors, Results]:
    return slot_inputs(case, seed=case.T), slot_results


def _linear(case: Case) -> tuple[Tensors, Results]:
    x, random = slot_inputs(case, seed=case.T), torch.Generator().manual_seed(case.T)
    inputs = {name: x[name] for name in "qkv"}
    if case.write:
        inputs["gk"] = _gates(case, case.K if case.R == 1 else 1, random)
    if case.initial:
        inputs["gv"] = _gates(case, case.V, random)
        inputs["state"] = torch.randn(case.B, case.H, case.K, case.V, generator=random, dtype=torch.float64)
    return inputs, linear_results


def _bounded(case: Case) -> tuple[Tensors, Results]:
    x = slot_inputs(case, seed=case.T)
    inputs = {name: x[name] for name in "qkv"} | {"w": 3 * torch.randn(x["g"].shape, dtype=torch.float64)}
    if case.initial:
        inputs |= {
            "state_k": x["state_k"],
            "state_v": x["state_v"],
            "log_z": torch.randn(case.B, case.H, case.M).double(),
        }
    return inputs, _bounded_results


def _bounded_results(case: Case, inputs: Tensors, backend: str) -> Tensors:
    x = {name: t.detach().requires_grad_() for name, t in inputs.items()}
    begin = BoundedMemoryState(x["state_k"], x["state_v"], x["log_z"]) if case.initial else None
    o, state = attention_with_bounded_memory(
        *(x[name] for name in "qkvw"),
        normalise=case.write,
        initial_state=begin,
        output_final_state=True,
        backend=backend,
    )
    assert state is not None
    # What has never been written to has a normaliser of -inf, which is no number to compare.
    outputs = {"o": o, "k": state.k, "v": state.v, "log_z": state.log_z}
    return with_gradients({n: y for n, y in outputs.items() if n != "log_z" or case.initial or case.T}, x, True)


def _scan(case: Case) -> tuple[Tensors, Results]:
    random, (B, T, E, S) = torch.Generator().manual_seed(case.T), (case.B, case.T, case.K, case.M)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    rates = torch.tensor([-1e30, -700.0, -1.0, -1e-40, 0.0], dtype=torch.float64)
    inputs = {"u": normal(B, T, E), "dt": normal(B, T, E).abs(), "B": normal(B, T, S), "C": normal(B, T, S)}
    inputs["A"] = rates[torch.randint(5, (E, S), generator=random)] if case.write else -normal(E, S).abs()
    return inputs | ({"state": normal(B, E, S)} if case.initial else {}), _scan_results


def _scan_results(case: Case, inputs: Tensors, backend: str) -> Tensors:
    x = {name: t.detach().requires_grad_() for name, t in inputs.items()}
    y, state = selective_scan(
        *(x[name] for name in ("u", "dt", "A", "B", "C")),
        initial_state=x.get("state"),
        output_final_state=True,
        backend=backend,
    )
    assert state is not None
    return with_gradients({"y": y, "final": state}, x, True)


def _sizes(exact: Tensors) -> Tensors:
    """As if every number were as large as the largest: what should cancel may leave a rest of such numbers."""
    largest = max([1.0, *(float(y[y.isfinite()].abs().amax()) for y in exact.values() if y.isfinite().any())])
    return {name: torch.full_like(y, largest) for name, y in exact.items()}


OPERATORS = {"slot": _slot, "linear": _linear, "bounded": _bounded, "scan": _scan}


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    sizes = {name: draw(st.integers(1, 3)) for name in "HR"} | {name: draw(st.integers(1, 9)) for name in "KVM"}
    return Case(
        B=draw(st.integers(0, 2)),
        T=draw(st.sampled_from([0, 1, 2, 7, 70])),
        write=draw(st.booleans()),
        initial=draw(st.booleans()),
        readout=draw(st.sampled_from(["softmax", "identity", "swish", "relu", "relu2"])),
        **sizes,
    )


@pytest.mark.parametrize("engine", ["native", "chunk", "reference"])
@pytest.mark.parametrize("operator", OPERATORS)
@examples(80)
@given(case=_cases(), data=st.data())
def test_operators_take_any_tensor(operator: str, engine: str, case: Case, data: st.DataObject) -> None:
    """Outputs, states and gradients, in fp64, whose tolerance is far above what is lost to cancellation."""
    inputs, results = OPERATORS[operator](case)
    if "g" in inputs and data.draw(st.booleans(), "extreme gates"):
        inputs["g"] = _gates(case, case.M, torch.Generator().manual_seed(case.T))
    strange, numbers, lacking = disguised(data, inputs)
    if lacking:
        with pytest.raises(GSAError, match=MISSING):
            results(case, strange, engine)
    else:
        exact = results(case, numbers, "reference")
        assert_close(results(case, strange, engine), exact, torch.float64, _sizes(exact))


@pytest.mark.parametrize("engine", ["native", "chunk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@examples(40)
@given(case=_cases(), data=st.data())
def test_narrow_tensors(dtype: torch.dtype, engine: str, case: Case, data: st.DataObject) -> None:
    """Outputs and states, which are sums of products: their errors are relative to the sums of absolute values, unless
    those are too small for the dtype.

    Gates and write strengths have a dtype of their own. Few tokens and a small scale keep outputs within fp16.
    """
    case = replace(case, readout="identity", write=True, T=min(case.T, 7), scale=0.1)
    wide = _inputs_of(case, data)
    inputs = {name: x.to(torch.float32 if name.startswith("state") else dtype) for name, x in wide.items()}
    for name in ("g", "s"):
        inputs[name] = inputs[name].to(
            data.draw(st.sampled_from([torch.float64, torch.float32, dtype]), f"dtype of {name}")
        )
    strange, numbers, lacking = disguised(data, inputs)
    if lacking:
        with pytest.raises(GSAError, match=MISSING):
            slot_results(case, strange, engine, gradients=False)
        return
    exact = slot_results(case, in_double(numbers), "reference", gradients=False)
    absolute = {name: x if name == "g" else x.double().abs() for name, x in in_double(numbers).items()}
    sums = slot_results(case, absolute, "reference", gradients=False)
    smallest = {"o": max(torch.finfo(dtype).tiny, TINY), "final_k": TINY, "final_v": TINY}
    sizes = {name: y.clamp(min=smallest[name]) for name, y in sums.items()}
    actual = slot_results(case, strange, engine, gradients=False)
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    assert relative_error(actual["o"], exact["o"], sizes["o"]) <= rounding
    del actual["o"], exact["o"], sizes["o"]
    assert_close(actual, exact, torch.float32, sizes)


def _inputs_of(case: Case, data: st.DataObject) -> Tensors:
    inputs = slot_inputs(case, seed=case.T)
    if data.draw(st.booleans(), "extreme gates"):
        inputs["g"] = _gates(case, case.M, torch.Generator().manual_seed(case.T))
    return inputs


@pytest.mark.parametrize("engine", ["native", "chunk"])
@pytest.mark.parametrize("inplace", [False, True])
@examples(80)
@given(case=_cases(), data=st.data())
def test_a_step_takes_any_tensor(inplace: bool, engine: str, case: Case, data: st.DataObject) -> None:
    case = replace(case, T=1, initial=True)
    inputs = {name: x if name.startswith("state") else x[:, 0] for name, x in _inputs_of(case, data).items()}
    strange, numbers, lacking = disguised(data, inputs)
    state = SlotState(strange["state_k"], strange["state_v"])
    unwritable = inplace and any(
        x.is_neg() or x._is_zerotensor() or (0 in x.stride() and x.shape[0] > 1) for x in state if x.numel()
    )

    def step(x: Tensors, state: SlotState) -> Tensors:
        o, after = gated_slot_attention_step(
            *(x[name] for name in "qkvg"), x.get("s"), state=state, scale=1.0, readout=case.readout, inplace=inplace
        )
        if inplace:
            assert after.k is state.k
        return {"o": o, "final_k": after.k, "final_v": after.v}

    with use_backend(engine):
        if lacking or unwritable:
            with pytest.raises(GSAError, match=f"{MISSING}|whose numbers are not in memory|cannot be written to"):
                step(strange, state)
            return
        actual = step(strange, state)
    token = {name: x if name.startswith("state") else x[:, None] for name, x in numbers.items()}
    exact = slot_results(case, token, "reference", gradients=False)
    exact["o"] = exact["o"][:, 0]
    assert_close(actual, exact, torch.float64, _sizes(exact))


@pytest.mark.parametrize("engine", ["native", "chunk"])
@examples(80)
@given(data=st.data())
def test_matvec_takes_any_tensor(engine: str, data: st.DataObject) -> None:
    N, K, count = (data.draw(st.integers(1, most), name) for name, most in (("N", 40), ("K", 70), ("count", 16)))
    random = torch.Generator().manual_seed(N * K)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    strange, numbers, lacking = disguised(
        data, {"weight": normal(N, K), "x": normal(count, K), "residual": normal(count, N), "norm": normal(K)}
    )
    format = data.draw(st.sampled_from(["fp32", "bf16", "int8", "int4"]), "format")

    def product() -> torch.Tensor:
        norm = strange["norm"]
        if not norm.is_contiguous():
            norm = norm.clone() if not lacking else norm
        return matvec(
            pack(strange["weight"], format),
            strange["x"],
            norm=(norm, 1e-5),
            residual=strange["residual"],
            backend=engine,
        )

    if lacking:
        with pytest.raises(GSAError, match=f"{MISSING}|must be contiguous"):
            product()
        return
    weight, x = pack(numbers["weight"], format).unpack().double(), numbers["x"].double()
    normed = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * numbers["norm"].double()
    exact = normed @ weight.T + numbers["residual"]
    size = normed.abs() @ weight.T.abs() + numbers["residual"].abs()
    assert relative_error(product(), exact, size) <= 1e-5
