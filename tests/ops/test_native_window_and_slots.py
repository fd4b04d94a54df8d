"""window_attention and joined_slots in C++: sizes of several chunks, instruction sets, threads, 16 bits, strides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.ops import JoinedSlotState, joined_slots, window_attention
from gsa.ops.native import library
from tests.ops.cases import GATES, Tensors, assert_close, in_double, relative_error, with_gradients
from tests.ops.isas import ISAS, needs_native, used

pytestmark = needs_native
STATE = ("k", "v", "mass")
TIMES = ("q", "k", "v", "g", "s", "near", "near_lse")


@dataclass(frozen=True)
class Window:
    """One call. `lengths` packs sequences of these lengths into a batch of one."""

    B: int = 1
    T: int = 150
    H: int = 2
    R: int = 1
    K: int = 12
    V: int = 9
    window: int = 20
    sinks: int = 3
    past: int = 0
    """Keys before the first query, P."""
    position: tuple[int, ...] | None = None
    """Tokens of each sequence before the call."""
    lengths: tuple[int, ...] | None = None

    def inputs(self, dtype: torch.dtype = torch.float64) -> Tensors:
        random = torch.Generator().manual_seed(0)
        B, T, N = sizes(self)
        keys = T + self.past * (1 if self.lengths is None else N)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random).to(dtype)

        H, K, V, S = self.H, self.K, self.V, self.sinks
        x = {"q": normal(B, T, H * self.R, K), "k": normal(B, keys, H, K), "v": normal(B, keys, H, V)}
        return x | {"sink_q": normal(B, T, H * self.R, K), "sink_k": normal(N, S, H, K), "sink_v": normal(N, S, H, V)}

    def results(self, inputs: Tensors, engine: str = "native") -> Tensors:
        x = {name: t.detach().requires_grad_() for name, t in inputs.items()}  # where and as they lie
        o, lse = window_attention(
            x["q"],
            x["k"],
            x["v"],
            window=self.window,
            sinks=(x["sink_q"], x["sink_k"], x["sink_v"]),
            position=None if self.position is None else torch.tensor(self.position),
            cu_seqlens=borders(self),
            backend=engine,
        )
        return with_gradients({"o": o, "lse": lse}, x, True)


@dataclass(frozen=True)
class Slots:
    """The same of joined_slots."""

    B: int = 1
    T: int = 150
    H: int = 2
    R: int = 1
    K: int = 12
    V: int = 9
    M: int = 7
    gate: str = "paper"
    initial: bool = True
    unwritten: int = 0
    """Tokens at the beginning that write nothing."""
    recompute: bool = True
    lengths: tuple[int, ...] | None = None

    def inputs(self, dtype: torch.dtype = torch.float64) -> Tensors:
        random = torch.Generator().manual_seed(0)
        (B, T, N), H, HQ, K, V, M = sizes(self), self.H, self.H * self.R, self.K, self.V, self.M

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random)

        x = {"q": normal(B, T, HQ, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V)}
        x["g"] = GATES[self.gate](normal(B, T, H, M))
        x["s"] = normal(B, T, H, M).softmax(-1)
        x["s"][:, : self.unwritten] = 0
        x |= {"near": normal(B, T, HQ, V), "near_lse": 2 * normal(B, T, HQ)}
        x |= {"slot_scale": 0.3 * normal(HQ), "slot_mass": 1 + 0.3 * normal(HQ), "slot_bias": normal(HQ)}
        if self.initial:
            mass = 5 * torch.rand(N, H, M, generator=random)
            mass[..., : M // 3] = 0  # slots that are empty
            x |= {"state_k": normal(N, H, K, M) * mass[:, :, None], "state_v": normal(N, H, M, V) * mass[..., None]}
            x |= {"state_mass": mass}
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        return {name: t.to(dtype if name in ("q", "k", "v", "near") else sums) for name, t in x.items()}

    def call(self, x: Tensors, engine: str = "native") -> tuple[Tensor, JoinedSlotState]:
        o, state = joined_slots(
            *(x[name] for name in TIMES),
            slot_scale=x["slot_scale"],
            slot_mass=x["slot_mass"],
            slot_bias=x["slot_bias"],
            scale=1.0,
            initial_state=JoinedSlotState(*(x[f"state_{part}"] for part in STATE)) if "state_k" in x else None,
            output_final_state=True,
            cu_seqlens=borders(self),
            backend=engine,
            recompute=self.recompute,
        )
        assert state is not None
        return o, state

    def results(self, inputs: Tensors, engine: str = "native") -> Tensors:
        x = {name: t.detach().requires_grad_() for name, t in inputs.items()}
        o, state = self.call(x, engine)
        outputs = {"o": o, "final_k": state.k, "final_v": state.v, "final_mass": state.mass}
        return with_gradients(outputs, x, True)


Case = Window | Slots


def sizes(case: Case) -> tuple[int, int, int]:
    """Rows, their length, and sequences."""
    return (case.B, case.T, case.B) if case.lengths is None else (1, sum(case.lengths), len(case.lengths))


def borders(case: Case) -> Tensor | None:
    return None if case.lengths is None else torch.tensor((0, *case.lengths)).cumsum(0)


@lru_cache(None)
def exact(case: Case) -> Tensors:
    """Of inputs that fp32 holds exactly, too."""
    return case.results(case.inputs(), "reference")


CASES: dict[str, Case] = {
    "window of a chunk": Window(T=200, K=64, V=64, window=64, sinks=4, R=2),
    "window of more than a chunk": Window(T=260, window=100, R=3, H=1),
    "window that is shorter than its past": Window(B=2, past=70, window=10, position=(400, 5)),
    "window with more sinks than tokens": Window(B=2, T=70, window=5, sinks=20),
    "window of width one": Window(B=2, T=70, K=1, V=1),
    "windows, packed": Window(lengths=(70, 1, 0, 130), past=12, position=(0, 5, 12, 300), R=2),
    "slots of whole vectors": Slots(H=1, R=2, K=64, V=64, M=64, initial=False, unwritten=5),
    "slots and strong gates": Slots(R=3, gate="strong"),
    "slots that nothing is written to for a chunk": Slots(B=2, initial=False, unwritten=70),
    "slots, more than features": Slots(K=5, V=3, M=40),
    "slots of width one": Slots(B=2, T=70, K=1, V=1, M=1),
    "slots, nothing recomputed": Slots(T=200, gate="fast", recompute=False),
    "slots in many chunks": Slots(H=1, T=330, gate="some reset"),
    "slots, packed": Slots(lengths=(70, 1, 0, 130), gate="some reset"),
}


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads, however little there is to do."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    library.use_every_thread(True)
    try:
        yield
    finally:
        library.use_every_thread(False)
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
def test_against_the_token_loop(name: str) -> None:
    for dtype in (torch.float64, torch.float32):
        assert_close(CASES[name].results(CASES[name].inputs(dtype)), exact(CASES[name]), dtype)


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_on_one_thread_and_on_several(isa: str) -> None:
    with used(isa):
        for name in ("window of more than a chunk", "windows, packed", "slots and strong gates", "slots, packed"):
            for dtype in (torch.float64, torch.float32):
                for count in (1, 3):
                    with threads(count):
                        assert_close(CASES[name].results(CASES[name].inputs(dtype)), exact(CASES[name]), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Sums are carried in fp32: what is off is the rounding of results."""
    for case in (Window(T=100, past=30, position=(30,)), Slots(T=100)):
        inputs = case.inputs(dtype)
        rounded = case.results(in_double(inputs), "reference")
        for name, value in case.results(inputs).items():
            assert relative_error(value, rounded[name]) < 2 * torch.finfo(dtype).eps, name


def test_tensors_with_gaps() -> None:
    """Heads before time, gaps between features: as they lie."""
    for case in (Window(T=70), Slots(T=70)):
        plain = case.inputs()
        strange = {
            name: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x for name, x in plain.items()
        }
        strange["k"] = torch.stack([plain["k"], plain["k"]], -1)[..., 0]
        assert_close(case.results(strange), case.results(plain, "reference"), torch.float64)


def test_an_expanded_gradient() -> None:
    case = Window(T=70)
    q, k, v = (case.inputs()[name].requires_grad_() for name in "qkv")
    found = [
        torch.autograd.grad(window_attention(q, k, v, window=5, backend=name)[0].sum(), (q, k, v))
        for name in ("native", "reference")
    ]
    for mine, reference in zip(*found, strict=True):
        assert relative_error(mine, reference) < 1e-9


def test_any_split_of_slots_is_the_whole() -> None:
    case = Slots(B=2, gate="some reset")
    inputs = case.inputs()
    whole, last = case.call(inputs)
    for cut in (1, 64, 100):
        state, pieces = None, []
        for part in (slice(0, cut), slice(cut, case.T)):
            x = {name: t[:, part] if name in TIMES else t for name, t in inputs.items()}
            if state is not None:
                x |= {f"state_{name}": t for name, t in zip(STATE, state, strict=True)}
            o, state = case.call(x)
            pieces.append(o)
        assert state is not None
        assert relative_error(torch.cat(pieces, 1), whole) < 1e-12, cut
        for part_name, mine, theirs in zip(STATE, state, last, strict=True):
            torch.testing.assert_close(mine, theirs, msg=part_name)


def test_bad_gates_are_refused() -> None:
    case = Slots(T=10)
    inputs = case.inputs()
    inputs["g"][0, 3] = 0.5
    with pytest.raises(GSAError, match="joined_slots: g must be log gates, at most 0"):
        case.call(inputs)


def test_torch_knows_the_operators() -> None:
    window = Window(T=20, past=30, position=(30,))
    fields = (*window.inputs().values(), torch.tensor(window.position), None, window.window, 0.25, "marks", True)
    torch.library.opcheck(torch.ops.gsa.native_window.default, fields)
    x = replace(Slots(), T=70, R=2).inputs()
    torch.library.opcheck(torch.ops.gsa.native_joined_slots.default, (*x.values(), None, 1.0, "marks", True))
