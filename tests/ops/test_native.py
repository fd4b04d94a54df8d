"""What the native engine promises beyond the matrix of engines: instruction sets, threads, forks, strides, memory."""

import ctypes.util
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gsa.errors import GSAError
from gsa.ops import SlotState, backends, gated_slot_attention, gated_slot_attention_step, use_backend
from gsa.ops.native import library, results
from tests.examples import examples
from tests.ops.cases import (
    GATES,
    Case,
    assert_close,
    in_double,
    linear_inputs,
    linear_results,
    relative_error,
    slot_inputs,
    slot_results,
)

CASES = {
    "plain": Case(),
    "strong": Case(gate="strong", R=2),
    "resets, packed": Case(gate="some reset", lengths=(70, 0, 3, 64), write=True, readout="swish"),
    "whole vectors": Case(K=32, V=64, M=16, T=130),
}


@pytest.fixture(params=["avx512", "avx2", "baseline"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    best = library.isa()
    try:
        library.use_isa(request.param)
    except GSAError as error:
        pytest.skip(str(error))
    yield request.param
    library.use_isa(best)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_instruction_set(isa: str, name: str, dtype: torch.dtype) -> None:
    assert library.isa() == isa
    inputs = slot_inputs(CASES[name], dtype)
    exact = slot_results(CASES[name], in_double(inputs), "reference")
    assert_close(slot_results(CASES[name], inputs, "native"), exact, dtype)
    inputs = linear_inputs(CASES[name], "key", "value", dtype)
    exact = linear_results(CASES[name], in_double(inputs), "reference")
    assert_close(linear_results(CASES[name], inputs, "native"), exact, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_instruction_set_converts(isa: str, dtype: torch.dtype) -> None:
    """Every number of 16 bits is read as what it is, and written back rounded as torch rounds."""
    words = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    v = words[words.isfinite()].view(1, 1, 1, -1)
    one = torch.ones(1, 1, 1, 1, dtype=dtype)
    g = torch.full((1, 1, 1, 1), -torch.inf)
    # One slot, reset and fully written: the output is v, and the gradient of v is that of the output.
    o, state = gated_slot_attention(one, one, v, g, scale=1.0, output_final_state=True, backend="native")
    assert state is not None
    assert torch.equal(o, v)
    assert torch.equal(state.v.flatten(), v.float().flatten())
    exact = torch.randn(1, 1, 1, 5000, generator=torch.Generator().manual_seed(0)).mul(1e-3).exp2() * 1.5
    initial = SlotState(torch.ones(1, 1, 1, 1), exact.view(1, 1, 1, -1))
    keep = torch.zeros(1, 1, 1, 1)
    nothing = torch.zeros(1, 1, 1, 5000, dtype=dtype)
    o, _ = gated_slot_attention(one, one, nothing, keep, scale=1.0, initial_state=initial, backend="native")
    assert torch.equal(o.flatten(), exact.to(dtype).flatten())


def test_numbers_at_the_ends_of_half_precision(isa: str) -> None:
    """Rounding to fp16 at its limits: subnormal numbers, ties, what becomes infinite."""
    values = [0.0, -0.0, 6e-8, 2.98e-8, 2.9802322387695312e-08, 3e-8, 6.1e-5, 65504.0, 65519.9, 65520.0, 1e6, 1e-20]
    values += [2049.0, 2051.0, 2053.0, 1 + 2**-11, 1 + 3 * 2**-11]
    exact = torch.tensor(values + [-x for x in values])
    one = torch.ones(1, 1, 1, 1, dtype=torch.float16)
    initial = SlotState(torch.ones(1, 1, 1, 1), exact.view(1, 1, 1, -1))
    for dtype in (torch.float16, torch.bfloat16):
        o, _ = gated_slot_attention(
            one.to(dtype),
            one.to(dtype),
            torch.zeros(1, 1, 1, len(exact), dtype=dtype),
            torch.zeros(1, 1, 1, 1),
            scale=1.0,
            initial_state=initial,
            backend="native",
        )
        assert torch.equal(o.flatten(), exact.to(dtype))


@pytest.mark.parametrize(
    "case",
    [
        Case(B=1, H=1, T=400, K=72, V=64, M=40),
        Case(B=1, H=3, T=400, K=72, V=64, M=40),
        Case(B=1, H=1, T=400, K=72, V=64, M=40, gate="strong", R=2),
        Case(lengths=(600, 5, 0, 1, 64), H=2, K=72, V=64, M=40, gate="some reset"),
    ],
    ids=str,
)
def test_any_number_of_threads_gives_the_same_bits(case: Case) -> None:
    """One head for many threads, more units than threads, and uneven ones."""
    inputs = slot_inputs(case, torch.float32)
    linear = linear_inputs(case, "key", "value", torch.float32)

    def everything() -> list[torch.Tensor]:
        both = slot_results(case, inputs, "native"), linear_results(case, linear, "native")
        return [x for found in both for x in found.values()]

    alone = everything()
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for a, b in zip(alone, everything(), strict=True)), threads


def test_python_threads_and_torch_threads_at_once() -> None:
    case = Case(B=2, T=300, H=2, K=64, V=64, M=32)
    inputs = slot_inputs(case, torch.float32)
    exact = slot_results(case, inputs, "native")
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                found = slot_results(case, inputs, "native")
                assert all(torch.equal(found[name], exact[name]) for name in exact)
        except BaseException as error:
            failures.append(error)

    torch.set_num_threads(2)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_after_a_fork() -> None:
    """The engine's threads are gone in a child, which must not wait for them. In a process of its own, to be safe."""
    # Small enough for torch's own operations to stay on one thread: they do wait for them.
    code = """
import os, torch
from gsa.ops import gated_slot_attention
from gsa.ops.native import library
library.use_every_thread(True)
torch.set_num_threads(2)
q, k, v = torch.randn(3, 2, 200, 2, 32)
g = -torch.rand(2, 200, 2, 32)
q.requires_grad_()
def run():
    o, _ = gated_slot_attention(q, k, v, g, backend="native")
    return o.detach(), torch.autograd.grad(o.sum(), q)[0]
before = run()
child = os.fork()
if child == 0:
    same = all(torch.equal(a, b) for a, b in zip(run(), before))
    os._exit(0 if same else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert all(torch.equal(a, b) for a, b in zip(run(), before))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_a_child_may_be_the_first_to_call() -> None:
    """torch's threads are gone in it all the same, although the engine has not used them yet."""
    code = """
import os, signal, torch
from gsa.ops import gated_slot_attention
from gsa.ops.native import library
library.use_every_thread(True)
torch.set_num_threads(2)
q, k, v = torch.randn(3, 2, 200, 2, 32)
g = -torch.rand(2, 200, 2, 32)
(torch.randn(2_000_000) * 2).sum()  # starts torch's threads
child = os.fork()
if child == 0:
    signal.alarm(60)
    gated_slot_attention(q, k, v, g, backend="native")
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def _report(environment: dict[str, str]) -> str:
    code = (
        "import torch; from gsa.ops import backends, gated_slot_attention\n"
        "q = torch.randn(1, 5, 1, 4); gated_slot_attention(q, q, q, -q.abs())\n"
        "try: gated_slot_attention(q, q, q, -q.abs(), backend='native')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "print(backends()['native'])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return run.stdout


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything else works, and the reason is given."""
    said = _report({"GSA_NATIVE_LIBRARY": str(tmp_path / "none.so")})
    assert said.startswith(
        "BackendUnavailable gated_slot_attention: 'native' cannot run here: its library does not load"
    )
    (tmp_path / "text.so").write_text("not a library")
    for other in (str(tmp_path / "text.so"), ctypes.util.find_library("m")):
        assert other is not None
        monkeypatch.setenv("GSA_NATIVE_LIBRARY", other)
        assert "its library does not load" in str(library._load())


def test_an_unknown_instruction_set_in_the_environment() -> None:
    assert "GSA_NATIVE_ISA asks for 'mmx'" in _report({"GSA_NATIVE_ISA": "mmx"})


def test_a_library_that_was_never_built_or_is_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GSA_NATIVE_LIBRARY", raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(library, "ABI", library.ABI + 1)
        assert "another version" in str(library._load()) or "not built" in str(library._load())
    monkeypatch.setattr(library, "_find", lambda: None)
    assert "its library is not built" in str(library._load())


def test_unknown_instruction_sets_are_refused() -> None:
    with pytest.raises(GSAError, match="unknown instruction set 'mmx'; expected one of"):
        library.use_isa("mmx")


def test_it_runs_on_the_cpu_only() -> None:
    x = torch.empty(1, 5, 1, 4, device="meta")
    with pytest.raises(GSAError, match="'native' cannot run here: it runs on the CPU, not on meta"):
        gated_slot_attention(x, x, x, x, backend="native")
    assert backends()["native"] is None


lengths = st.lists(st.integers(0, 150), min_size=0, max_size=4)


@examples(50)
@given(data=st.data())
def test_fuzz(data: st.DataObject) -> None:
    _fuzz(data)


@pytest.mark.slow
@examples(500)
@given(data=st.data())
def test_fuzz_at_length(data: st.DataObject) -> None:
    _fuzz(data)


def _fuzz(data: st.DataObject) -> None:
    """Shapes, strides, gates, dtypes, packing and threads at random, against the recurrence in fp64."""
    packed = data.draw(st.booleans(), "packed")
    draw = lambda name, low, high: data.draw(st.integers(low, high), name)  # noqa: E731
    case = Case(
        B=draw("B", 0, 3),
        T=draw("T", 0, 150),
        H=draw("H", 1, 3),
        R=draw("R", 1, 3),
        K=draw("K", 1, 40),
        V=draw("V", 1, 40),
        M=draw("M", 1, 40),
        gate=data.draw(st.sampled_from(sorted(set(GATES) - {"all reset"})), "gate"),
        write=True,
        initial=data.draw(st.booleans(), "initial"),
        readout=data.draw(st.sampled_from(["softmax", "identity", "swish", "relu", "relu2"]), "readout"),
        scale=0.3,
        lengths=tuple(data.draw(lengths, "lengths")) if packed else None,
        recompute=data.draw(st.booleans(), "recompute"),
    )
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]), "dtype")
    torch.set_num_threads(draw("threads", 1, 3))
    inputs = slot_inputs(case, dtype)
    exact = slot_results(case, in_double(inputs), "reference")
    strided = {name: _restride(x, draw(f"layout of {name}", 0, 3)) for name, x in inputs.items()}
    assert_close(slot_results(case, strided, "native"), exact, dtype)
    sides = data.draw(st.sampled_from([("key", None), (None, "value"), ("head", "value"), (None, None)]), "sides")
    linear = linear_inputs(case, *sides, dtype)
    exact = linear_results(case, in_double(linear), "reference")
    strided = {name: _restride(x, draw(f"layout of {name}", 0, 3)) for name, x in linear.items()}
    assert_close(linear_results(case, strided, "native"), exact, dtype)


def _restride(x: torch.Tensor, layout: int) -> torch.Tensor:
    """The same numbers, elsewhere: dense, heads first, part of something wider, or with gaps between numbers."""
    if layout == 1:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == 2:
        return torch.cat((x, torch.full_like(x[..., :1], torch.nan)), -1)[..., :-1]
    if layout == 3:
        return torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0]
    return x


@pytest.mark.parametrize("readout", ["softmax", "identity", "swish", "relu", "relu2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_step_is_the_recurrence(readout: str, dtype: torch.dtype, threads: int) -> None:
    """A stream of single tokens ends where the whole sequence does, in place and not."""
    torch.set_num_threads(threads)
    case = Case(B=3, T=5, H=2, R=2, K=19, V=35, M=18, gate="some reset", readout=readout)
    x = slot_inputs(case, dtype)
    exact = slot_results(case, in_double(x), "reference", gradients=False)
    state = SlotState(x["state_k"], x["state_v"])
    running = SlotState(*(t.clone() for t in state))
    for t in range(case.T):
        token = [x[n][:, t] for n in "qkvg"]
        with torch.no_grad():
            o, state = gated_slot_attention_step(*token, state=state, scale=1.0, readout=readout)
            o2, same = gated_slot_attention_step(*token, state=running, scale=1.0, readout=readout, inplace=True)
        assert same.k is running.k
        assert torch.equal(o, o2)
        limit = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 1e-2)
        assert relative_error(o, exact["o"][:, t]) < limit
    assert torch.equal(state.k, running.k)
    assert torch.equal(state.v, running.v)
    assert relative_error(state.v, exact["final_v"]) < 1e-5


def test_a_step_with_strides_and_gaps() -> None:
    x = slot_inputs(Case(B=2, T=3, R=2, write=True), torch.float32)
    state = SlotState(x["state_k"], x["state_v"])
    outputs = []
    for layout in range(4):
        token = [_restride(x[n], layout)[:, 1] for n in "qkvgs"]
        before = SlotState(*(_restride(t.clone(), layout) for t in state))
        outputs.append(gated_slot_attention_step(*token, state=before)[0])
        # In place it must be the very tensors that change, dense or not.
        o, after = gated_slot_attention_step(*token, state=before, inplace=True)
        assert after.k is before.k
        torch.testing.assert_close(o, outputs[0])
    for other in outputs[1:]:
        assert torch.equal(other, outputs[0])


@pytest.mark.parametrize("inplace", [False, True])
def test_a_step_compiles(inplace: bool) -> None:
    torch._dynamo.reset()
    x = slot_inputs(Case(T=2), torch.float32)
    token = [x[n][:, 0] for n in "qkvg"]

    def f(state_k: torch.Tensor, state_v: torch.Tensor) -> tuple[torch.Tensor, SlotState]:
        return gated_slot_attention_step(*token, state=SlotState(state_k, state_v), inplace=inplace)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    expected, after = f(x["state_k"].clone(), x["state_v"].clone())
    own = x["state_k"].clone(), x["state_v"].clone()
    o, state = compiled(*own)
    assert torch.equal(o, expected)
    assert torch.equal(state.k, after.k)
    assert torch.equal(own[0], after.k if inplace else x["state_k"])
    torch._dynamo.reset()


def test_a_step_with_gradients_is_that_of_torch() -> None:
    x = {n: t.requires_grad_() for n, t in slot_inputs(Case(T=1)).items()}
    token = [x[n][:, 0] for n in "qkvg"]
    state = SlotState(x["state_k"], x["state_v"])
    gradients = []
    for engine in ("native", "chunk"):
        with use_backend(engine):
            o, _ = gated_slot_attention_step(*token, state=state)
        gradients.append(torch.autograd.grad(o.sum(), list(x.values())))
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def _token(**case: int) -> tuple[list[torch.Tensor], SlotState]:
    x = slot_inputs(Case(T=1, K=8, V=8, M=8, **case), torch.float32)
    return [x[n][:, 0] for n in "qkvg"], SlotState(x["state_k"], x["state_v"])


@pytest.mark.parametrize("inplace", [False, True])
def test_a_step_with_tensors_that_are_not_there(inplace: bool) -> None:
    """Fake tensors have shapes and no memory."""
    token, state = _token()
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (*token, *state)]
        o, after = gated_slot_attention_step(*fake[:4], state=SlotState(*fake[4:]), inplace=inplace)
        assert o.shape == token[2].shape
        assert after.k.shape == state.k.shape


def test_a_step_that_is_traced() -> None:
    """What traces sees an operator, not a call it cannot follow."""
    token, state = _token()

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return gated_slot_attention_step(q, k, v, g, state=state)[0]

    other = [x.flip(0) for x in token]
    assert torch.equal(make_fx(f)(*token)(*other), f(*other))


def test_a_step_in_place_is_noticed_by_autograd() -> None:
    token, state = _token()
    w = torch.zeros_like(state.k, requires_grad=True)
    loss = (state.k * w).sum()
    gated_slot_attention_step(*token, state=state, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        inside = SlotState(*(x.clone() for x in state))
        gated_slot_attention_step(*token, state=inside, inplace=True)


def test_a_step_in_place_wants_two_memories() -> None:
    token, state = _token()
    with pytest.raises(GSAError, match=r"state\.k and state\.v share memory"):
        gated_slot_attention_step(*token, state=SlotState(state.k, state.k), inplace=True)


def test_negated_views() -> None:
    """Tensors whose sign torch only remembers."""
    (q, k, v, g), state = _token()
    lazy = torch._neg_view(k)
    assert lazy.is_neg()
    assert torch.equal(
        gated_slot_attention_step(q, lazy, v, g, state=state)[0], gated_slot_attention_step(q, -k, v, g, state=state)[0]
    )


def test_another_default_device() -> None:
    (q, k, v, g), state = _token()
    expected = gated_slot_attention_step(q, k, v, g, state=state)[0]
    whole = gated_slot_attention(q[:, None], k[:, None], v[:, None], g[:, None], backend="native")[0]
    torch.set_default_device("meta")
    try:
        assert torch.equal(gated_slot_attention_step(q, k, v, g, state=state)[0], expected)
        again = gated_slot_attention(q[:, None], k[:, None], v[:, None], g[:, None], backend="native")[0]
        assert torch.equal(again, whole)
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("readout", ["softmax", "identity", "swish", "relu", "relu2"])
def test_a_nan_is_never_lost(readout: str) -> None:
    x = slot_inputs(Case(B=1, T=70, H=1), torch.float32)
    x["q"][0, 30, 0, 0] = torch.nan
    found = {
        engine: gated_slot_attention(*(x[n] for n in "qkvg"), readout=readout, backend=engine)[0].isnan()
        for engine in ("native", "reference")
    }
    assert found["reference"].any()
    assert torch.equal(found["native"], found["reference"])


def test_more_than_indices_can_hold_is_refused() -> None:
    q, k = torch.randn(1, 1, 1 << 17, 1), torch.randn(1, 1, 1, 1)
    with pytest.raises(GSAError, match="q has 131072 heads per head of k, the native engine takes at most 65536"):
        gated_slot_attention(q, k, k, -k.abs(), backend="native")


@pytest.mark.slow
def test_compiled_gradients_of_tensors_with_gaps() -> None:
    """Compiled code relies on how gradients lie in memory."""
    torch._dynamo.reset()
    x = [torch.randn(2, 40, 8, 3).transpose(-1, -2).requires_grad_() for _ in range(3)]
    x.append((-torch.rand(2, 40, 8, 3)).transpose(-1, -2).requires_grad_())

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return gated_slot_attention(q * 1.0, k * 2.0, v * 1.5, g * 1.0, backend="native")[0].square().sum()

    expected = torch.autograd.grad(f(*x), x)
    for a, b in zip(torch.autograd.grad(torch.compile(f)(*x), x), expected, strict=True):
        assert relative_error(a, b) < 1e-4
    torch._dynamo.reset()


class TestResults:
    """The memory of large results."""

    SHAPE = (3, 1 << 20)

    def test_is_used_again_when_nobody_holds_it(self) -> None:
        pool = results.Pool()
        first = pool.empty(self.SHAPE, torch.float32)
        where = first.data_ptr()
        second = pool.empty(self.SHAPE, torch.float32)
        part = first[1, 5:]  # a view holds it as well
        del first
        gc.collect()
        third = pool.empty(self.SHAPE, torch.float32)
        assert len({where, second.data_ptr(), third.data_ptr()}) == 3
        del part
        gc.collect()
        assert pool.empty(self.SHAPE, torch.float32).data_ptr() == where

    @pytest.mark.slow
    def test_what_is_idle_is_at_most_twice_what_was_in_use(self) -> None:
        pool = results.Pool()
        for size in range(3, 10):
            pool.empty((size, 1 << 20), torch.float32)
            gc.collect()
        assert sum(block.size for block in pool._idle) <= (2 + 1) * 9 * 4 << 20
        assert 9 * 4 << 20 in {block.size for block in pool._idle}
        assert 3 * 4 << 20 not in {block.size for block in pool._idle}

    def test_from_many_threads(self) -> None:
        pool, failures = results.Pool(), []
        interval = sys.getswitchinterval()

        def work() -> None:
            try:
                for n in range(40):
                    held = [pool.empty((size, 1 << 18), torch.float32) for size in range(5, 9)]
                    for x in held:
                        x[0, 0] = n
                    assert all(x[0, 0] == n for x in held)
            except BaseException as error:
                failures.append(error)

        torch.use_deterministic_algorithms(False)
        sys.setswitchinterval(1e-6)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        sys.setswitchinterval(interval)
        assert not failures

    def test_is_as_good_as_any(self) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            x = results.empty((7, 1 << 20), dtype)
            assert x.shape == (7, 1 << 20)
            assert x.dtype == dtype
            assert x.isnan().all()  # tests fill what is not initialised
            x.fill_(1)
            assert float(x.sum(dtype=torch.float64)) == 7 << 20
        assert results.empty((3,), torch.float32).numel() == 3
        assert results.empty((0, 5), torch.float32).shape == (0, 5)

    def test_gradients_lie_as_their_tensors_do(self) -> None:
        x = torch.randn(2, 5, 3, 4)
        assert results.empty_like(x.transpose(1, 2)).stride() == x.transpose(1, 2).stride()
        assert results.empty_like(x.transpose(2, 3)).stride(-1) == 1
        assert results.empty_like(x[:1].expand(2, 5, 3, 4)).is_contiguous()
