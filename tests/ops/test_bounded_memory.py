"""ABC in both forms: against the token loop, in pieces, packed, and with logits that write nothing."""

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from gsa.ops import BoundedMemoryState, attention_with_bounded_memory, bounded_memory
from tests.device import DEVICE
from tests.ops.cases import (
    ENGINES,
    INTERPRETED,
    Case,
    Tensors,
    assert_close,
    engines,
    for_every_engine,
    in_double,
    light,
    relative_error,
    slot_inputs,
    tiny,
    with_gradients,
)

pytestmark = pytest.mark.any_device
both_forms = pytest.mark.parametrize("normalise", [False, True])


def inputs_for(case: Case, dtype: torch.dtype = torch.float64, masked: int = 0) -> Tensors:
    x = slot_inputs(case, dtype)
    x["w"] = torch.randn_like(x.pop("g"))
    if masked:
        x["w"][:, :masked] = -torch.inf
    if case.initial:
        x["state_z"] = torch.randn_like(x["state_k"][:, :, 0])
    return x


def call(x: Tensors, **options: Any) -> tuple[torch.Tensor, BoundedMemoryState]:
    state = BoundedMemoryState(x["state_k"], x["state_v"], x["state_z"]) if "state_k" in x else None
    o, state = attention_with_bounded_memory(
        x["q"], x["k"], x["v"], x["w"], initial_state=state, output_final_state=True, **options
    )
    assert state is not None
    return o, state


def results(x: Tensors, case: Case, **options: Any) -> Tensors:
    y = {name: t.detach().clone().requires_grad_() for name, t in x.items()}
    o, state = call(y, cu_seqlens=case.packed().cu_seqlens, **options)
    return with_gradients({"o": o, "final_k": state.k, "final_v": state.v, "final_z": state.log_z}, y, True)


PACKED = Case(lengths=(70, 0, 1, 30))


@pytest.mark.quick_if_interpreted(case=[PACKED, Case(T=0), Case(T=0, initial=False)])
@pytest.mark.parametrize("engine", ENGINES)
@both_forms
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(initial=False, R=3),
        Case(T=0),
        Case(T=0, initial=False),
        PACKED,
        Case(lengths=(5, 0, 90), initial=False),
    ],
    ids=str,
)
def test_against_the_token_loop(engine: str, normalise: bool, case: Case) -> None:
    case = light(case, engine)
    x = inputs_for(case)
    exact = results(x, case, normalise=normalise, backend="reference")
    actual = results(x, case, normalise=normalise, backend=engine)
    # a sequence that has written nothing ends with log z = -inf
    infinite = exact["final_z"].isinf()
    assert torch.equal(infinite, actual["final_z"].isinf())
    for found in (exact, actual):
        found["final_z"] = found["final_z"].masked_fill(infinite, 0.0)
    assert_close(actual, exact, torch.float64)


@pytest.mark.parametrize("engine", ENGINES)
@both_forms
def test_logits_of_minus_infinity_write_nothing(engine: str, normalise: bool) -> None:
    """Padding in front, as -inf logits, leaves the rest as it is, and gets no gradient."""
    case, pad = light(Case(initial=False, T=100), engine), 37
    x = inputs_for(case, masked=pad)
    actual = results(x, case, normalise=normalise, backend=engine)
    assert_close(actual, results(x, case, normalise=normalise, backend="reference"), torch.float64)
    rest = {name: t[:, pad:] for name, t in x.items()}
    o, state = call(rest, normalise=normalise, backend=engine)
    assert_close({"o": actual["o"][:, pad:], "k": actual["final_k"]}, {"o": o, "k": state.k}, torch.float64)
    assert not actual["dw"][:, :pad].any()


@for_every_engine(normalise=st.booleans(), cut=st.integers(0, 90), seed=st.integers(0, 9))
def test_any_split_gives_the_same_answer(engine: str, normalise: bool, cut: int, seed: int) -> None:
    x = slot_inputs(light(Case(T=90, initial=False), engine), seed=seed)
    x["w"] = 3 * torch.randn_like(x.pop("g"))
    whole, final = call(x, normalise=normalise, backend=engine)
    first, state = call({n: t[:, :cut] for n, t in x.items()}, normalise=normalise, backend=engine)
    rest = {n: t[:, cut:] for n, t in x.items()} | dict(zip(("state_k", "state_v", "state_z"), state, strict=True))
    second, state = call(rest, normalise=normalise, backend=engine)
    actual = {"o": torch.cat((first, second), 1), **state._asdict()}
    assert_close(actual, {"o": whole, **final._asdict()}, torch.float64)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_two_forms_differ_as_named(engine: str) -> None:
    """The paper's memory is a sum of phi k, the normalised one the average of k weighted by exp(w)."""
    x = inputs_for(Case(initial=False, T=20))
    alpha = x["w"].exp()
    phi = alpha / alpha.cumsum(1)
    total = torch.einsum("bthk,bthm->bhkm", x["k"], phi)
    average = torch.einsum("bthk,bthm->bhkm", x["k"], alpha) / alpha.sum(1)[:, :, None]
    torch.testing.assert_close(call(x, normalise=False, backend=engine)[1].k, total)
    torch.testing.assert_close(call(x, normalise=True, backend=engine)[1].k, average)


@pytest.mark.parametrize("engine", engines(slow=INTERPRETED))
@both_forms
def test_single_precision_over_a_long_stream(engine: str, normalise: bool) -> None:
    """The normaliser is a sum over the whole past; late gates are tiny differences of it and must survive fp32."""
    case = Case(B=1, T=3000, H=1, K=4, V=4, M=4, initial=False)
    x = inputs_for(case, torch.float32)
    o, _ = call(x, normalise=normalise, backend=engine)
    exact, _ = call(in_double(x), normalise=normalise, backend=engine)
    assert relative_error(o, exact) < 1e-5


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_steep_logits_do_not_wipe_the_memory(engine: str, dtype: torch.dtype) -> None:
    """phi rounds to 1 long before 1 - phi is 0; what stays must still be there if it was large."""
    w = torch.tensor([0.0, 18.0, 36.0], dtype=dtype, device=DEVICE)[None, :, None, None]
    v = torch.tensor([1e8, 0.0, 0.0], dtype=dtype, device=DEVICE)[None, :, None, None]
    q = torch.zeros_like(v)
    options = {"normalise": True, "output_final_state": True}
    exact, _ = attention_with_bounded_memory(
        q.double(), q.double(), v.double(), w.double(), **options, backend="reference"
    )
    o, _ = attention_with_bounded_memory(q, q, v, w, **options, backend=engine)
    torch.testing.assert_close(o.double(), exact, rtol=1e-9 if dtype == torch.float64 else 1e-5, atol=0)


@pytest.mark.parametrize("engine", ["reference", *ENGINES])
@pytest.mark.parametrize(("q_dtype", "w_dtype"), [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_states_follow_the_dtype_of_q(engine: str, q_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    x = inputs_for(Case(initial=False, T=20), q_dtype)
    x["w"] = x["w"].to(w_dtype)
    assert {t.dtype for t in call(x, backend=engine)[1]} == {q_dtype}


@pytest.mark.parametrize("engine", ENGINES)
def test_recomputing_saves_less(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsa.ops.chunk.grid.SEGMENT_ELEMENTS", 1 << 14)
    x = {n: t.requires_grad_() for n, t in inputs_for(tiny(Case(T=1024, initial=False), engine), torch.float32).items()}

    def saved(recompute: bool) -> int:
        sizes: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.__setitem__(t.data_ptr(), t.numel()), lambda t: t
        ):
            call(x, backend=engine, recompute=recompute)
        return sum(sizes.values())

    assert saved(recompute=True) < saved(recompute=False)


def test_compiles_whole() -> None:
    torch._dynamo.reset()
    case = Case(lengths=(30, 50), initial=False)
    x = inputs_for(case)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    x = {n: t.requires_grad_() for n, t in x.items()}
    grads = []
    for f in (compiled, call):
        o, state = f(x, normalise=True, cu_seqlens=case.packed().cu_seqlens)
        grads.append(torch.autograd.grad(o.square().sum() + state.log_z.sum(), x["w"])[0])
    torch.testing.assert_close(*grads)
    torch._dynamo.reset()


def test_gradcheck() -> None:
    x = inputs_for(Case(H=1, K=2, V=2, M=2, lengths=(3, 0, 4)))
    names = list(x)

    def f(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        o, state = call(dict(zip(names, tensors, strict=True)), normalise=True, cu_seqlens=torch.tensor([0, 3, 3, 7]))
        return o, *state

    assert torch.autograd.gradcheck(f, [t.requires_grad_() for t in x.values()])


@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("together", [1, 2 * 20 * 2 * 8, 10**9])
def test_rows_are_the_same_one_by_one_in_groups_and_all_at_once(
    initial: bool, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = torch.randn(5, 20, 2, 8, device=DEVICE)
    log_z = torch.randn(5, 2, 8, device=DEVICE) if initial else None

    def gates(rows: slice) -> tuple[torch.Tensor, ...]:
        own, start = w[rows].clone().requires_grad_(), None
        if log_z is not None:
            start = log_z[rows].clone().requires_grad_()
        found = bounded_memory.write_gates(own, start, None, True)
        given = [x for x in (own, start) if x is not None]
        gradients = torch.autograd.grad([x.clamp(min=-5).square().sum() for x in found], given)
        return *(x.detach() for x in found), *gradients

    alone = [gates(slice(row, row + 1)) for row in range(5)]
    monkeypatch.setattr(bounded_memory, "_TOGETHER", together)
    for found, single in zip(gates(slice(0, 5)), zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(found, torch.cat(single), rtol=0, atol=0)
