"""The operators inside everything torch puts around them."""

import shutil
import threading
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from gsa.ops import (
    SlotState,
    gated_linear_attention,
    gated_slot_attention,
    gated_slot_attention_step,
    use_backend,
)
from tests.device import DEVICE
from tests.ops.cases import (
    ENGINES,
    INTERPRETED,
    Case,
    assert_close,
    relative_error,
    slot_inputs,
    slot_results,
    tiny,
    with_gradients,
)

pytestmark = [pytest.mark.any_device, pytest.mark.parametrize("engine", ENGINES)]
CASE = Case(T=100, R=2, gate="some reset", write=True)


@pytest.mark.quick_if_interpreted(engine=[])
def test_non_contiguous_inputs(engine: str) -> None:
    case = replace(tiny(CASE, engine), B=2)
    x = slot_inputs(case)
    strided = {
        name: t.repeat_interleave(2, -1)[..., ::2].transpose(0, 1).contiguous().transpose(0, 1) for name, t in x.items()
    }
    assert not strided["q"].is_contiguous()
    assert_close(slot_results(case, strided, engine), slot_results(case, x, engine), torch.float64)
    one = slot_inputs(tiny(Case(B=1, initial=False), engine))
    expanded = {name: t.expand(3, *t.shape[1:]) for name, t in one.items()}
    whole = gated_slot_attention(*(expanded[n] for n in "qkvg"), backend=engine)[0]
    single = gated_slot_attention(*(one[n] for n in "qkvg"), backend=engine)[0]
    torch.testing.assert_close(whole, single.expand_as(whole))


def test_inputs_are_never_modified(engine: str) -> None:
    case = tiny(CASE, engine)
    x = {name: t.requires_grad_() for name, t in slot_inputs(case).items()}
    before = {name: t.detach().clone() for name, t in x.items()}
    o, state = gated_slot_attention(
        *(x[n] for n in "qkvgs"),
        initial_state=SlotState(x["state_k"], x["state_v"]),
        output_final_state=True,
        backend=engine,
    )
    assert state is not None
    do = torch.randn_like(o)
    kept = do.clone()
    torch.autograd.backward([o, state.k], [do, torch.ones_like(state.k)])
    assert torch.equal(do, kept)
    for name, t in x.items():
        assert torch.equal(t, before[name]), name


def test_used_twice_in_one_graph(engine: str) -> None:
    x = slot_inputs(tiny(Case(K=6, V=6, T=80), engine))
    results = []
    for backend in (engine, "reference"):
        q, k, v, g = (x[n].clone().requires_grad_() for n in "qkvg")
        first = gated_slot_attention(q, k, v, g, backend=backend)[0]
        second = gated_slot_attention(first, k, first, g, backend=backend)[0]
        grads = torch.autograd.grad((first + second).square().sum(), (q, k, v, g))
        results.append({"o": second.detach(), **{f"d{n}": d for n, d in zip("qkvg", grads, strict=True)}})
    assert_close(*results, torch.float64)


def test_backward_twice_through_a_kept_graph(engine: str) -> None:
    case = tiny(CASE, engine)
    x = {name: t.requires_grad_() for name, t in slot_inputs(case).items()}
    loss = gated_slot_attention(*(x[n] for n in "qkvgs"), backend=engine)[0].square().sum()
    first = torch.autograd.grad(loss, x["q"], retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, x["q"])[0])


def test_same_call_same_bits(engine: str) -> None:
    case = tiny(CASE, engine)
    x = slot_inputs(case, torch.float32)
    a, b = slot_results(case, x, engine), slot_results(case, x, engine)
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_only_some_inputs_want_gradients(engine: str) -> None:
    case = tiny(CASE, engine)
    x = slot_inputs(case)
    full = slot_results(case, x, engine)
    for wanted in ("g", "state_v"):
        y = {name: t.clone().requires_grad_(name == wanted) for name, t in x.items()}
        o, state = gated_slot_attention(
            *(y[n] for n in "qkvgs"),
            scale=case.scale,
            initial_state=SlotState(y["state_k"], y["state_v"]),
            output_final_state=True,
            backend=engine,
        )
        assert state is not None
        outputs = {"o": o, "final_k": state.k, "final_v": state.v}
        alone = with_gradients(outputs, {wanted: y[wanted]}, True)
        torch.testing.assert_close(alone[f"d{wanted}"], full[f"d{wanted}"])


@pytest.mark.quick_if_interpreted(wanted=["final_v"])
@pytest.mark.parametrize("wanted", ["o", "final_k", "final_v"])
def test_a_loss_on_some_outputs_only(engine: str, wanted: str) -> None:
    """Outputs that nothing depends on have no gradient at all, which counts as zero."""
    case = tiny(CASE, engine)
    results = []
    for backend in (engine, "reference"):
        x = {name: t.requires_grad_() for name, t in slot_inputs(case).items()}
        o, state = gated_slot_attention(
            *(x[n] for n in "qkvgs"),
            initial_state=SlotState(x["state_k"], x["state_v"]),
            output_final_state=True,
            backend=backend,
        )
        assert state is not None
        outputs = {"o": o, "final_k": state.k, "final_v": state.v}
        results.append(with_gradients({wanted: outputs[wanted]}, x, True))
    assert_close(*results, torch.float64)


def test_autocast_changes_nothing_inside(engine: str) -> None:
    case = tiny(CASE, engine)
    x = slot_inputs(case, torch.float32)
    plain = slot_results(case, x, engine)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        cast = slot_results(case, x, engine)
    for name in plain:
        assert torch.equal(plain[name], cast[name]), name
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):  # a linear layer leaves bf16, a rotation fp32
        o, _ = gated_slot_attention(x["q"], x["k"].bfloat16(), x["v"].bfloat16(), x["g"], backend=engine)
        assert o.dtype == torch.float32


def test_inference_mode_and_back(engine: str) -> None:
    case = tiny(CASE, engine)
    x = slot_inputs(case, torch.float32)
    with torch.inference_mode():
        inside = slot_results(case, x, engine, gradients=False)
    outside = slot_results(case, x, engine)
    assert_close({"o": inside["o"]}, {"o": outside["o"]}, torch.float32)
    with torch.inference_mode():
        slot_results(case, x, engine, gradients=False)


@pytest.mark.quick_if_interpreted(dynamic=[])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(engine: str, dynamic: bool) -> None:
    def f(x: dict, cu_seqlens: torch.Tensor | None = None) -> tuple[torch.Tensor, SlotState | None]:
        y, _ = gated_linear_attention(x["q"], x["k"], x["v"], gk=x["g"][..., :1], cu_seqlens=cu_seqlens, backend=engine)
        return gated_slot_attention(
            y, x["k"], x["v"], x["g"], output_final_state=True, cu_seqlens=cu_seqlens, backend=engine
        )

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for case in (Case(K=8, V=8, T=70), Case(K=8, V=8, T=90), Case(K=8, V=8, lengths=(30, 0, 50))):
        case = tiny(case, engine)
        inputs = slot_inputs(case)
        names = [n for n in inputs if not n.startswith("state")]
        results = []
        for function in (compiled, f):
            x = {n: inputs[n].clone().requires_grad_() for n in names}
            o, state = function(x, case.packed().cu_seqlens)
            assert state is not None
            grads = torch.autograd.grad(o.square().sum() + state.k.sum(), list(x.values()))
            results.append({"o": o.detach(), **{f"d{n}": d for n, d in zip(names, grads, strict=True)}})
        assert_close(*results, torch.float64)
    torch._dynamo.reset()


@pytest.mark.slow  # its code is compiled for a minute; test_native.py has a quick case
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiles_with_inductor(engine: str) -> None:
    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return gated_slot_attention(q * 2, k, v, torch.nn.functional.logsigmoid(g) / 8, backend=engine)[0].sin()

    torch._dynamo.reset()
    x = slot_inputs(tiny(Case(T=70), engine), torch.float32)
    args = [x[n].requires_grad_() for n in "qkvg"]
    compiled = torch.compile(f, fullgraph=True)
    expected = torch.autograd.grad(f(*args).sum(), args)
    for a, b in zip(torch.autograd.grad(compiled(*args).sum(), args), expected, strict=True):
        assert relative_error(a, b) < 1e-4
    torch._dynamo.reset()


@pytest.mark.quick_if_interpreted(engine=[])  # test_triton.py checks them with fewer calls
def test_operators_pass_the_checks_of_torch(engine: str) -> None:
    x = slot_inputs(tiny(Case(T=70), engine), torch.float32)
    q, k, v, g = (x[n].requires_grad_() for n in "qkvg")
    for keep in ("marks", "states"):
        torch.library.opcheck(
            getattr(torch.ops.gsa, f"{engine}_gsa").default,
            (q, k, v, g, None, None, None, None, 1.0, "softmax", keep, True),
        )
        torch.library.opcheck(
            getattr(torch.ops.gsa, f"{engine}_gla").default, (q, k, v, None, None, None, None, 1.0, keep, True)
        )


def test_compiled_code_follows_use_backend(engine: str) -> None:
    """The engine is part of what was compiled: another one compiles again, and coming back does not."""
    torch._dynamo.reset()
    x = slot_inputs(tiny(Case(T=20, initial=False), engine), torch.float32)
    args = [x[n] for n in "qkvg"]
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda *a: gated_slot_attention(*a)[0], backend=graphs, fullgraph=True)
    with use_backend(engine):
        first = compiled(*args)
    with use_backend("reference"):
        assert torch.equal(compiled(*args), gated_slot_attention(*args)[0])
    with use_backend(engine):
        assert torch.equal(compiled(*args), first)
    assert graphs.frame_count == 2
    torch._dynamo.reset()


def test_several_python_threads(engine: str) -> None:
    if engine == INTERPRETED:
        pytest.skip("Triton's interpreter is not made for threads")
    cases = [Case(T=90 + 20 * i, gate=gate) for i, gate in enumerate(("paper", "strong", "some reset"))]
    expected = [slot_results(c, slot_inputs(c), engine) for c in cases]
    failures = []

    def work(case: Case, exact: dict) -> None:
        try:
            for _ in range(3):
                assert_close(slot_results(case, slot_inputs(case), engine), exact, torch.float64)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(cases, expected, strict=True)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


@pytest.mark.quick_if_interpreted(engine=[])  # which has none
def test_obeys_the_number_of_threads(engine: str) -> None:
    """The result does not depend on torch's threads, and the number set is still set afterwards."""
    case = tiny(CASE, engine)
    x = slot_inputs(case)
    one = slot_results(case, x, engine)
    torch.set_num_threads(2)
    assert_close(slot_results(case, x, engine), one, torch.float64)
    assert torch.get_num_threads() == 2


def test_nothing_is_kept_without_a_graph(engine: str) -> None:
    case = tiny(CASE, engine)
    x = slot_inputs(case, torch.float32)
    args = ([x[n] for n in "qkvgs"], [None, None, None, 1.0, "softmax"])
    operator = getattr(torch.ops.gsa, f"{engine}_gsa")
    assert all(t.numel() == 0 for t in operator(*args[0], *args[1], "nothing", True)[3:])
    assert operator(*args[0], *args[1], "marks", True)[3].numel() > 0
    assert all(t.numel() > 0 for t in operator(*args[0], *args[1], "states", True)[3:])


def test_recomputing_saves_less(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsa.ops.chunk.grid.SEGMENT_ELEMENTS", 1 << 14)
    x = {n: t.requires_grad_() for n, t in slot_inputs(tiny(Case(T=1024), engine), torch.float32).items()}

    def saved(recompute: bool) -> int:
        sizes = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.__setitem__(t.data_ptr(), t.numel()), lambda t: t
        ):
            gated_slot_attention(*(x[n] for n in "qkvg"), backend=engine, recompute=recompute)
        return sum(sizes.values())

    assert saved(recompute=True) < saved(recompute=False)


def test_a_step_under_autocast(engine: str) -> None:
    """As exact as without, and mixed dtypes are taken as the whole operator takes them."""
    x = slot_inputs(CASE, torch.float32)
    args = [x[n][:, 0] for n in "qkvgs"]
    state = SlotState(x["state_k"], x["state_v"])
    o, after = gated_slot_attention_step(*args, state=state)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        o2, after2 = gated_slot_attention_step(*args, state=state)
        mixed, _ = gated_slot_attention_step(args[0], args[1].bfloat16(), args[2].bfloat16(), *args[3:], state=state)
    assert torch.equal(o, o2)
    assert torch.equal(after.k, after2.k)
    assert mixed.dtype == torch.float32


def test_a_step_in_place_has_no_graph(engine: str) -> None:
    x = slot_inputs(CASE, torch.float32)
    args = [x[n][:, 0].requires_grad_() for n in "qkvgs"]
    o, state = gated_slot_attention_step(*args, state=SlotState(x["state_k"], x["state_v"]), inplace=True)
    assert not o.requires_grad
    assert not state.k.requires_grad
    o, state = gated_slot_attention_step(*args, state=state)
    assert o.requires_grad
    assert state.k.requires_grad


def test_a_step_keeps_the_state_passed_in(engine: str) -> None:
    x = slot_inputs(CASE)
    state = SlotState(x["state_k"], x["state_v"])
    before = SlotState(*(t.clone() for t in state))
    args = [x[n][:, 0] for n in "qkvgs"]
    o, after = gated_slot_attention_step(*args, state=state)
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))
    o2, same = gated_slot_attention_step(*args, state=state, inplace=True)
    assert same.k is state.k
    assert same.v is state.v
    torch.testing.assert_close(o, o2)
    torch.testing.assert_close(after.k, same.k)
