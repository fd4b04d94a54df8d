"""Mamba's selective scan: every engine against the token loop in fp64, and everything torch puts around it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import softplus

from gsa.errors import BackendUnavailable, GSAError
from gsa.ops import backends, registry, selective_scan
from gsa.ops.chunk import selective_scan as chunk_form
from gsa.ops.native import library
from tests.examples import examples
from tests.ops.cases import Tensors, assert_close, in_double, relative_error, with_gradients

# The engine for GPUs has no such operation.
ENGINES = [name for name, reason in backends().items() if name not in ("reference", "triton") and reason is None]
every_engine = pytest.mark.parametrize("engine", ENGINES)
NAMES = ("u", "dt", "A", "B", "C")


@dataclass(frozen=True)
class Case:
    """One call. `lengths` packs sequences of these lengths into a batch of one."""

    B: int = 2
    T: int = 150
    E: int = 20
    S: int = 6
    rate: float = 1.0
    """About the decay of a token."""
    still: float = 0.0
    """Share of the channels' tokens with dt = 0."""
    initial: bool = True
    lengths: tuple[int, ...] | None = None

    def packed(self) -> "Case":
        return self if self.lengths is None else replace(self, B=1, T=sum(self.lengths))

    @property
    def cu_seqlens(self) -> Tensor | None:
        return None if self.lengths is None else torch.tensor((0, *self.lengths)).cumsum(0)


def inputs_of(case: Case, dtype: torch.dtype = torch.float64) -> Tensors:
    N, case = case.B if case.lengths is None else len(case.lengths), case.packed()
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    B, T, E, S = case.B, case.T, case.E, case.S
    x = {"u": normal(B, T, E), "dt": softplus(normal(B, T, E)) * case.rate, "A": -normal(E, S).exp()}
    x["dt"] = x["dt"].masked_fill(torch.rand(B, T, E, generator=random) < case.still, 0.0)
    x |= {"B": normal(B, T, S), "C": normal(B, T, S)}
    x = {name: t.to(dtype) for name, t in x.items()}
    if case.initial:
        x["state"] = normal(N, E, S).to(torch.float64 if dtype == torch.float64 else torch.float32)
    return x


def results_of(case: Case, inputs: Tensors, engine: str, gradients: bool = True) -> Tensors:
    """Outputs, final states and all gradients."""
    x = {name: t.detach().clone().requires_grad_(gradients) for name, t in inputs.items()}
    y, state = selective_scan(
        *(x[n] for n in NAMES),
        initial_state=x.get("state"),
        output_final_state=True,
        cu_seqlens=case.cu_seqlens,
        backend=engine,
    )
    assert state is not None
    return with_gradients({"y": y, "final": state}, x, gradients)


def exact_results(case: Case, inputs: Tensors, dtype: torch.dtype) -> Tensors:
    """The token loop's in fp64, with nothing where `dtype` has no such small numbers."""
    exact = results_of(case, in_double(inputs), "reference")
    smallest = 1e3 * torch.finfo(dtype).tiny
    return {name: value.masked_fill(value.abs() < smallest, 0.0) for name, value in exact.items()}


CASES = {
    "plain": Case(),
    "no state": Case(initial=False),
    "one token": Case(T=1),
    "nothing": Case(T=0),
    "no rows": Case(B=0),
    "a chunk": Case(T=64),
    "more than a chunk": Case(T=65),
    "long": Case(B=1, T=700, E=3, S=2),
    "slow": Case(rate=1e-3),
    "strong": Case(rate=100.0),
    "everything decays": Case(rate=1e4),
    "some stand still": Case(still=0.3),
    "all stand still": Case(still=1.0),
    "packed": Case(lengths=(70, 0, 3, 64, 1, 0)),
    "packed, no state": Case(lengths=(0, 65, 130), initial=False),
    "packed, nothing": Case(lengths=(0, 0)),
    "many short": Case(lengths=tuple(range(12)) * 3),
    "one channel": Case(E=1, S=1),
    "narrow": Case(E=5, S=3),
    "odd": Case(E=33, S=16),
    "two blocks": Case(E=70, S=9, T=70),
    "whole blocks": Case(E=128, S=8, T=66),
    "many states": Case(E=4, S=37, T=40),
}


@pytest.fixture(params=["large segments", "small segments"])
def segments(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the chunk engine: all in one, or every case in several, of several blocks."""
    if request.param == "small segments":
        monkeypatch.setattr(chunk_form, "SEGMENT_ELEMENTS", 4000)
        monkeypatch.setattr(chunk_form, "MIN_SEGMENT", 7)


@every_engine
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_agrees_with_the_token_loop(engine: str, name: str, dtype: torch.dtype, segments: None) -> None:
    inputs = inputs_of(CASES[name], dtype)
    assert_close(results_of(CASES[name], inputs, engine), exact_results(CASES[name], inputs, dtype), dtype)


def test_agrees_with_transformers() -> None:
    """What Hugging Face computes without CUDA, where the skip and the gate are left out."""
    from transformers.models.mamba import modeling_mamba as modeling

    x = inputs_of(Case(initial=False), torch.float32)
    u, dt, B, C = (x[n].transpose(1, 2) for n in ("u", "dt", "B", "C"))
    y, state = modeling.mamba_selective_scan(u, dt, x["A"], B, C, return_last_state=True)
    mine = results_of(Case(initial=False), x, "reference", gradients=False)
    assert_close(mine, {"y": y.transpose(1, 2), "final": state}, torch.float32)


@every_engine
def test_gradcheck(engine: str) -> None:
    case = Case(B=1, E=3, S=2, lengths=(5, 0, 2))
    x = inputs_of(case)

    def f(*tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        *five, state = tensors
        return selective_scan(
            *five, initial_state=state, output_final_state=True, cu_seqlens=case.cu_seqlens, backend=engine
        )

    assert torch.autograd.gradcheck(f, [t.requires_grad_() for t in x.values()])


@every_engine
@examples(20)
@given(cuts=st.lists(st.integers(0, 150), max_size=3))
def test_any_split_gives_the_same(engine: str, cuts: list[int]) -> None:
    case = Case(still=0.1)
    x = inputs_of(case)
    whole, final = selective_scan(
        *(x[n] for n in NAMES), initial_state=x["state"], output_final_state=True, backend=engine
    )
    state: Tensor | None = x["state"]
    parts = []
    bounds = sorted([0, *cuts, 150])
    for start, stop in pairwise(bounds):
        now = {n: x[n] if n == "A" else x[n][:, start:stop] for n in NAMES}
        y, state = selective_scan(*now.values(), initial_state=state, output_final_state=True, backend=engine)
        parts.append(y)
    assert state is not None
    assert final is not None
    assert_close({"y": torch.cat(parts, 1), "final": state}, {"y": whole, "final": final}, torch.float64)


@every_engine
@pytest.mark.parametrize("initial", [True, False])
def test_token_by_token(engine: str, initial: bool) -> None:
    case = Case(T=20, initial=initial)
    x = inputs_of(case, torch.float32)
    exact = results_of(case, in_double(x), "reference", gradients=False)
    state = x.get("state")
    ys = []
    for t in range(20):
        now = [x[n] if n == "A" else x[n][:, t : t + 1] for n in NAMES]
        y, state = selective_scan(*now, initial_state=state, output_final_state=True, backend=engine)
        ys.append(y)
    assert state is not None
    assert_close({"y": torch.cat(ys, 1), "final": state}, exact, torch.float32)


@every_engine
@examples(20)
@given(lengths=st.lists(st.integers(0, 80), min_size=1, max_size=6))
def test_packing_changes_nothing(engine: str, lengths: list[int]) -> None:
    case = Case(lengths=tuple(lengths), E=5)
    x = inputs_of(case)
    packed = results_of(case, x, engine, gradients=False)
    begin = 0
    for n, length in enumerate(lengths):
        one = {name: t if name == "A" else t[:, begin : begin + length] for name, t in x.items()}
        one["state"] = x["state"][n : n + 1]
        alone = results_of(Case(), one, engine, gradients=False)
        both = {"y": packed["y"][:, begin : begin + length], "final": packed["final"][n : n + 1]}
        assert_close(both, alone, torch.float64)
        begin += length


@every_engine
def test_a_nan_stays_in_its_sequence_and_channel(engine: str) -> None:
    case = Case(lengths=(30, 40, 50))
    x = inputs_of(case)
    x["u"][0, 50, 3] = torch.nan
    found = results_of(case, x, engine, gradients=False)
    spoilt = found["y"].isnan()
    assert spoilt[0, 50:70, 3].all()
    assert spoilt.sum() == 20
    assert found["final"].isnan().any(-1).nonzero().tolist() == [[1, 3]]


@every_engine
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs(engine: str, dtype: torch.dtype) -> None:
    """Computed in fp32: results are those of the rounded inputs, rounded once."""
    case = Case(T=200)
    x = inputs_of(case, dtype)
    found = results_of(case, x, engine)
    exact = results_of(case, in_double(x), "reference")
    assert found["final"].dtype == torch.float32
    for name, value in exact.items():
        if name not in ("final", "dstate"):
            assert found[name].dtype == dtype, name
        assert relative_error(found[name], value) < (1e-5 if name in ("final", "dstate") else 4e-3), name


@every_engine
def test_mixed_dtypes_and_autocast(engine: str) -> None:
    case = Case()
    x = inputs_of(case, torch.float32)
    x |= {n: x[n].bfloat16() for n in ("u", "B")}
    exact = results_of(case, in_double(x), "reference")
    plain = results_of(case, x, engine)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = results_of(case, x, engine)
    for name, value in plain.items():
        assert torch.equal(value, cast[name]), name
        source = x.get(name.removeprefix("d"), x["u"]).dtype if name != "final" else torch.float32
        assert value.dtype == source, name
        assert relative_error(value, exact[name]) < (1e-4 if source == torch.float32 else 4e-3), name


@every_engine
def test_non_contiguous_inputs(engine: str) -> None:
    case = Case(E=33, T=70)
    x = inputs_of(case)
    strided = {
        n: t.repeat_interleave(2, -1)[..., ::2].transpose(0, 1).contiguous().transpose(0, 1) for n, t in x.items()
    }
    assert not strided["u"].is_contiguous()
    assert_close(results_of(case, strided, engine), results_of(case, x, engine), torch.float64)
    turned = {n: t.transpose(0, 1).contiguous().transpose(0, 1) for n, t in x.items()}
    leaves = {n: t.requires_grad_() for n, t in turned.items()}
    y, _ = selective_scan(*(leaves[n] for n in NAMES), initial_state=leaves["state"], backend=engine)
    found = torch.autograd.grad(y.sum(), list(leaves.values()))  # of a gradient that is one number, expanded
    leaves = {n: t.detach().requires_grad_() for n, t in x.items()}
    y, _ = selective_scan(*(leaves[n] for n in NAMES), initial_state=leaves["state"], backend="reference")
    exact = torch.autograd.grad(y.sum(), list(leaves.values()))
    assert_close(*(dict(zip(x, grads, strict=True)) for grads in (found, exact)), torch.float64)


@every_engine
@pytest.mark.parametrize("wanted", [*NAMES, "state"])
def test_only_one_input_wants_a_gradient(engine: str, wanted: str) -> None:
    case = Case(T=70)
    x = inputs_of(case)
    full = results_of(case, x, engine)
    leaves = {n: t.clone().requires_grad_(n == wanted) for n, t in x.items()}
    y, state = selective_scan(
        *(leaves[n] for n in NAMES), initial_state=leaves["state"], output_final_state=True, backend=engine
    )
    assert state is not None
    alone = with_gradients({"y": y, "final": state}, {wanted: leaves[wanted]}, True)
    torch.testing.assert_close(alone[f"d{wanted}"], full[f"d{wanted}"])


@every_engine
@pytest.mark.parametrize("wanted", ["y", "final"])
def test_a_loss_on_some_outputs_only(engine: str, wanted: str) -> None:
    results = []
    for backend in (engine, "reference"):
        x = {n: t.requires_grad_() for n, t in inputs_of(Case(T=70)).items()}
        y, state = selective_scan(
            *(x[n] for n in NAMES), initial_state=x["state"], output_final_state=True, backend=backend
        )
        assert state is not None
        results.append(with_gradients({wanted: {"y": y, "final": state}[wanted]}, x, True))
    assert_close(*results, torch.float64)


@every_engine
def test_inputs_are_never_modified(engine: str) -> None:
    x = {n: t.requires_grad_() for n, t in inputs_of(Case(lengths=(70, 0, 3))).items()}
    before = {n: t.detach().clone() for n, t in x.items()}
    y, state = selective_scan(
        *(x[n] for n in NAMES),
        initial_state=x["state"],
        output_final_state=True,
        cu_seqlens=torch.tensor([0, 70, 70, 73]),
        backend=engine,
    )
    assert state is not None
    dy, dstate = torch.randn_like(y), torch.randn_like(state)
    kept = dy.clone(), dstate.clone()
    torch.autograd.backward([y, state], [dy, dstate])
    assert torch.equal(dy, kept[0])
    assert torch.equal(dstate, kept[1])
    assert all(torch.equal(t, before[n]) for n, t in x.items())


def test_no_state_unless_asked_for() -> None:
    x = inputs_of(Case())
    assert selective_scan(*(x[n] for n in NAMES))[1] is None


@every_engine
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(engine: str, dynamic: bool) -> None:
    def f(x: Tensors, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor | None]:
        y, state = selective_scan(
            x["u"] * 2,
            softplus(x["dt"]),
            *(x[n] for n in "ABC"),
            initial_state=x["state"],
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            backend=engine,
        )
        return y.sin(), state

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for case in (Case(T=70), Case(T=90), Case(lengths=(30, 0, 50))):
        inputs = inputs_of(case)
        inputs["u"] = inputs["u"].transpose(0, 1).contiguous().transpose(0, 1)
        results = []
        for function in (compiled, f):
            x = {n: t.clone().requires_grad_() for n, t in inputs.items()}
            y, state = function(x, case.cu_seqlens)
            assert state is not None
            results.append(with_gradients({"y": y, "final": state}, x, True))
        assert_close(*results, torch.float64)
    with torch.no_grad():  # what decoding does
        x = inputs_of(Case(T=1))
        torch.testing.assert_close(compiled(x, None), f(x, None))
    torch._dynamo.reset()


@every_engine
def test_operators_pass_the_checks_of_torch(engine: str) -> None:
    for case in (Case(T=70), Case(T=70, initial=False)):
        x = {n: t.requires_grad_() for n, t in inputs_of(case, torch.float32).items()}
        args = (*(x[n] for n in NAMES), x.get("state"), None, "marks", True)
        torch.library.opcheck(getattr(torch.ops.gsa, f"{engine}_scan").default, args)


@every_engine
def test_nothing_is_kept_without_a_graph(engine: str) -> None:
    x = inputs_of(Case(), torch.float32)
    operator = getattr(torch.ops.gsa, f"{engine}_scan")
    args = [x[n] for n in NAMES]
    assert operator(*args, None, None, "nothing", True)[2].numel() == 0
    assert operator(*args, None, None, "marks", True)[2].numel() > 0
    with torch.inference_mode():
        inside = results_of(Case(), x, engine, gradients=False)
    assert_close(inside, results_of(Case(), x, engine, gradients=False), torch.float32)


@pytest.mark.skipif("native" not in ENGINES, reason="the native engine cannot run here")
class TestNative:
    @pytest.fixture(params=["avx512", "avx2", "baseline"])
    def isa(self, request: pytest.FixtureRequest) -> Iterator[None]:
        best = library.isa()
        try:
            library.use_isa(request.param)
        except GSAError as error:
            pytest.skip(str(error))
        yield
        library.use_isa(best)

    @pytest.mark.parametrize("name", ["plain", "odd", "packed", "two blocks", "everything decays", "many states"])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_every_instruction_set(self, isa: None, name: str, dtype: torch.dtype) -> None:
        inputs = inputs_of(CASES[name], dtype)
        assert_close(results_of(CASES[name], inputs, "native"), exact_results(CASES[name], inputs, dtype), dtype)

    @pytest.mark.parametrize(
        "case",
        [
            Case(B=1, T=300, E=200, S=16),
            Case(B=5, T=100, E=64, S=16),
            Case(lengths=(200, 0, 5, 64, *range(20)), E=130, S=16),
        ],
        ids=str,
    )
    def test_any_number_of_threads_gives_the_same_bits(self, case: Case) -> None:
        inputs = inputs_of(case, torch.float32)
        alone = results_of(case, inputs, "native")
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            found = results_of(case, inputs, "native")
            assert all(torch.equal(alone[name], found[name]) for name in alone), threads

    def test_a_long_sequence_loses_no_digits(self) -> None:
        """Sums over 20,000 tokens, and states that never decay."""
        case = Case(B=1, T=20_000, E=2, S=2, rate=1e-4, initial=False)
        inputs = inputs_of(case, torch.float32)
        inputs["A"][0] = 0.0
        exact = results_of(case, in_double(inputs), "chunk")
        assert_close(results_of(case, inputs, "native"), exact, torch.float32)


def arguments() -> dict[str, Any]:
    return {**inputs_of(Case(B=2, T=5, E=4, S=3, initial=False), torch.float32), "initial_state": torch.zeros(2, 4, 3)}


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no tensor": ({"u": [1.0]}, "u must be a tensor [B, T, E], got list"),
    "dimensions": ({"dt": torch.rand(2, 5)}, "dt must have the shape [B, T, E], got [2, 5]"),
    "integers": (
        {"A": torch.ones(4, 3, dtype=torch.int64)},
        "A must be floating point (64, 32 or 16 bits), got torch.int64",
    ),
    "double": (
        {"B": torch.rand(2, 5, 3).double()},
        "B is torch.float64, u is torch.float32; fp64 is computed only if u",
    ),
    "device": ({"dt": torch.rand(2, 5, 4, device="meta")}, "dt is on meta, u is on cpu"),
    "rows": ({"C": torch.rand(3, 5, 3)}, "C has 3 rows, u has 2"),
    "time": ({"dt": torch.rand(2, 4, 4)}, "dt has 4 time steps, u has 5"),
    "channels of dt": ({"dt": torch.rand(2, 5, 3)}, "dt has 3 channels, u has 4"),
    "channels of A": ({"A": torch.zeros(5, 3)}, "A has 5 channels, u has 4"),
    "states of B": ({"B": torch.rand(2, 5, 2)}, "B has 2 states, A has 3"),
    "states of C": ({"C": torch.rand(2, 5, 4)}, "C has 4 states, A has 3"),
    "no states": (
        {"A": torch.zeros(4, 0), "B": torch.rand(2, 5, 0), "C": torch.rand(2, 5, 0), "initial_state": None},
        "A must have channels and states, got [4, 0]",
    ),
    "state": ({"initial_state": torch.zeros(2, 3, 4)}, "initial_state must have the shape [N, E, S] = [2, 4, 3], got"),
    "state's device": ({"initial_state": torch.zeros(2, 4, 3, device="meta")}, "initial_state is on meta, u is on cpu"),
    "packed rows": (
        {"cu_seqlens": torch.tensor([0, 5])},
        "cu_seqlens packs sequences into a batch of 1, but u has 2 rows",
    ),
    "no cu_seqlens": ({"cu_seqlens": [0, 5]}, "cu_seqlens must be an int32 or int64 tensor [N+1], got list"),
    "engine": ({"backend": "fast"}, "unknown engine 'fast'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused(name: str) -> None:
    change, message = MISTAKES[name]
    with pytest.raises(GSAError, match=re.escape(message)) as error:
        selective_scan(**(arguments() | change))
    assert name == "engine" or str(error.value).startswith("selective_scan: ")


@pytest.mark.parametrize("engine", ["reference", *ENGINES])
def test_wrong_bounds_are_refused(engine: str) -> None:
    x = {n: t if n == "A" else t[:1] for n, t in arguments().items() if n != "initial_state"}
    for bounds, message in (([0, 4], "cu_seqlens must run from 0 to T = 5"), ([0, 4, 3, 5], "must not decrease")):
        with pytest.raises(GSAError, match=f"selective_scan: .*{message}"):
            selective_scan(**x, cu_seqlens=torch.tensor(bounds), backend=engine)


def test_an_engine_without_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    x = [torch.ones(1, 2, 3), torch.ones(1, 2, 3), -torch.ones(3, 4), torch.ones(1, 2, 4), torch.ones(1, 2, 4)]
    with pytest.raises(BackendUnavailable, match="selective_scan: the engine 'triton' has no such operation"):
        selective_scan(*x, backend="triton")
    monkeypatch.setitem(registry.PREFERENCE, "cpu", ("triton", "chunk"))
    assert registry.engine_name("auto", torch.device("cpu")) == "triton"
    assert registry.engine_name("auto", torch.device("cpu"), "selective_scan") == "chunk"
