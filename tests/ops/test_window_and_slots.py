"""window_attention and joined_slots: every engine against the token loop in fp64, together one softmax."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.ops import JoinedSlotState, backends, engines, joined_slots, window_attention
from gsa.ops.chunk import window_attention as chunk_form
from tests.ops.cases import GATES, Tensors, assert_close, in_double, with_gradients

HQ, H, K, V, M, S = 4, 2, 6, 5, 7, 3


def engines_of(operation: str) -> list[str]:
    usable = [name for name, reason in backends().items() if reason is None and name != "reference"]
    return [name for name in usable if hasattr(getattr(engines, name), operation)]


@dataclass(frozen=True)
class Case:
    """One call. `lengths` packs sequences of these lengths into a batch of one; `positions` are tokens before it."""

    T: int = 25
    window: int = 5
    past: int = 0
    positions: tuple[int, ...] | None = None
    sinks: bool = True
    lengths: tuple[int, ...] | None = None
    gate: str = "paper"
    initial: bool = False

    @property
    def rows(self) -> tuple[int, int, int]:
        """Rows, their length, and sequences."""
        return (2, self.T, 2) if self.lengths is None else (1, sum(self.lengths), len(self.lengths))

    @property
    def cu_seqlens(self) -> Tensor | None:
        return None if self.lengths is None else torch.tensor((0, *self.lengths)).cumsum(0)


WINDOWS = {
    "plain": Case(),
    "no sinks": Case(sinks=False),
    "two blocks": Case(window=40, T=75, sinks=False),
    "wider than a block": Case(window=47),
    "all": Case(window=1000),
    "itself": Case(window=1),
    "one token": Case(T=1, past=4, positions=(9, 2)),
    "nothing": Case(T=0),
    "keys before": Case(past=9, positions=(30, 9)),
    "more keys before than are there": Case(past=9, positions=(4, 0)),
    "as many as there are": Case(past=3),
    "packed": Case(lengths=(20, 0, 1, 35)),
    "packed, keys before": Case(lengths=(20, 0, 1, 35), past=6, positions=(2, 5, 100, 0)),
}
SLOTS = {
    **{gate: Case(gate=gate) for gate in GATES},
    "state": Case(initial=True),
    "state that never decays": Case(initial=True, gate="none"),
    "one token": Case(T=1, initial=True),
    "nothing": Case(T=0, initial=True),
    "packed": Case(lengths=(9, 0, 1, 66), gate="some reset"),
    "packed, state": Case(lengths=(3, 0, 35), initial=True, gate="slow"),
}


def normals(case: Case, dtype: torch.dtype) -> Any:
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

    return normal


def window_inputs(case: Case, dtype: torch.dtype) -> Tensors:
    (B, T, N), normal = case.rows, normals(case, dtype)
    keys = T + case.past * (1 if case.lengths is None else N)
    x = {"q": normal(B, T, HQ, K), "k": normal(B, keys, H, K), "v": normal(B, keys, H, V)}
    if case.sinks:
        x |= {"sink_q": normal(B, T, HQ, K), "sink_k": normal(N, S, H, K), "sink_v": normal(N, S, H, V)}
    return x


def window_results(case: Case, inputs: Tensors, engine: str) -> Tensors:
    x = {name: t.detach().clone().requires_grad_() for name, t in inputs.items()}
    o, lse = window_attention(
        x["q"],
        x["k"],
        x["v"],
        window=case.window,
        sinks=(x["sink_q"], x["sink_k"], x["sink_v"]) if case.sinks else None,
        position=None if case.positions is None else torch.tensor(case.positions),
        cu_seqlens=case.cu_seqlens,
        backend=engine,
    )
    return with_gradients({"o": o, "lse": lse}, x, True)


def slot_inputs(case: Case, dtype: torch.dtype) -> Tensors:
    """Some tokens are not written. One slot is never written to."""
    (B, T, N), normal = case.rows, normals(case, dtype)
    x = {"q": normal(B, T, HQ, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V)}
    g = GATES[case.gate](normal(B, T, H, M))
    g[:, ::7] = 0
    g[:, :, 0, 2] = 0
    s = normal(B, T, H, M).exp()
    s[:, ::7] = 0
    s[:, :, 0, 2] = 0
    x |= {"g": g, "s": s, "near": normal(B, T, HQ, V), "near_lse": normal(B, T, HQ)}
    x |= {name: normal(HQ) for name in ("slot_scale", "slot_mass", "slot_bias")}
    if case.initial:
        x |= {"initial_k": normal(N, H, K, M), "initial_v": normal(N, H, M, V)}
        x |= {"initial_mass": normal(N, H, M).exp()}
    return x


def slot_results(case: Case, inputs: Tensors, engine: str) -> Tensors:
    x = {name: t.detach().clone().requires_grad_() for name, t in inputs.items()}
    state = [t for name, t in x.items() if name.startswith("initial")]
    o, after = joined_slots(
        *(x[name] for name in ("q", "k", "v", "g", "s", "near", "near_lse")),
        slot_scale=x["slot_scale"],
        slot_mass=x["slot_mass"],
        slot_bias=x["slot_bias"],
        initial_state=JoinedSlotState(*state) if state else None,
        output_final_state=True,
        cu_seqlens=case.cu_seqlens,
        backend=engine,
    )
    assert after is not None
    outputs = {"o": o, "final_k": after.k, "final_v": after.v, "mass": after.mass}
    return with_gradients(outputs, x, True)


@cache
def exact(operation: str, name: str, dtype: torch.dtype) -> Tensors:
    """The token loop's results in fp64, for inputs of this dtype."""
    if operation == "window_attention":
        return window_results(WINDOWS[name], in_double(window_inputs(WINDOWS[name], dtype)), "reference")
    return slot_results(SLOTS[name], in_double(slot_inputs(SLOTS[name], dtype)), "reference")


@pytest.mark.parametrize("engine", engines_of("window_attention"))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_window_attention(engine: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, case in WINDOWS.items():
        monkeypatch.setattr(chunk_form, "LARGEST_BLOCK", 16 if name == "wider than a block" else 256)
        found = window_results(case, window_inputs(case, dtype), engine)
        try:
            assert_close(found, exact("window_attention", name, dtype), dtype)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize("engine", engines_of("joined_slots"))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_joined_slots(engine: str, dtype: torch.dtype) -> None:
    for name, case in SLOTS.items():
        found = slot_results(case, slot_inputs(case, dtype), engine)
        try:
            assert_close(found, exact("joined_slots", name, dtype), dtype)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize("engine", engines_of("joined_slots"))
def test_slots_that_take_hardly_anything_are_exact(engine: str) -> None:
    """1e-9 of each token: a slot is the average of what was written, in single precision too."""
    case = Case(T=40)
    inputs = {**slot_inputs(case, torch.float32), "s": torch.full((2, 40, H, M), 1e-9)}
    found, wanted = slot_results(case, inputs, engine), slot_results(case, in_double(inputs), "reference")
    names = ("o", "final_k", "final_v", "mass", "dq", "dv", "dnear", "dnear_lse", "dslot_scale", "dslot_mass")
    assert_close({name: found[name] for name in names}, {name: wanted[name] for name in names}, torch.float32)
    assert all(torch.isfinite(x).all() for x in found.values())


@pytest.mark.parametrize("engine", ["reference", *engines_of("joined_slots")])
def test_slots_that_nothing_was_written_to_change_nothing(engine: str) -> None:
    case = Case(T=20)
    inputs = slot_inputs(case, torch.float64)
    inputs["s"] = torch.zeros_like(inputs["s"])
    found = slot_results(case, inputs, engine)
    assert torch.equal(found["o"], inputs["near"])
    assert all(torch.isfinite(x).all() for x in found.values())
    assert not any(found[f"d{name}"].any() for name in ("k", "v", "slot_scale", "slot_mass", "slot_bias"))


@pytest.mark.parametrize("engine", ["reference", *engines_of("joined_slots")])
def test_slots_that_have_faded_away_are_empty(engine: str) -> None:
    """Written once and forgotten for long, also past what single precision can divide by: results stay finite."""
    inputs = slot_inputs(Case(T=20), torch.float32)
    inputs["s"][:, 3:] = 0.0
    inputs["g"][:] = -9.0
    found = slot_results(Case(T=20), inputs, engine)
    assert all(bool(torch.isfinite(x).all()) for x in found.values())
    late = found["o"][:, -1]
    torch.testing.assert_close(late, inputs["near"][:, -1].to(late.dtype))


@pytest.mark.parametrize("engine", ["reference", *engines_of("window_attention")])
def test_packed_sequences_do_not_see_each_other(engine: str) -> None:
    """Not even when all numbers of the others are NaN."""
    case = Case(lengths=(9, 40, 3), past=4, positions=(4, 2, 0))
    x = window_inputs(case, torch.float64)
    clean = window_results(case, x, engine)
    poisoned = {name: t.clone() for name, t in x.items()}
    for name in ("q", "k", "v", "sink_q"):
        stop, start = (13, 57) if name in ("k", "v") else (9, 49)
        poisoned[name][:, :stop] = torch.nan
        poisoned[name][:, start:] = torch.nan
    for name in ("sink_k", "sink_v"):
        poisoned[name][[0, 2]] = torch.nan
    found = window_results(case, poisoned, engine)
    for name in ("o", "lse", "dq"):
        assert torch.equal(found[name][:, 9:49], clean[name][:, 9:49]), name
    for name in ("dk", "dv"):
        assert torch.equal(found[name][:, 15:57], clean[name][:, 15:57]), name


def test_a_window_in_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of long sequences, of which a few blocks at a time are worked on."""
    case = Case(T=130, window=20)
    inputs = window_inputs(case, torch.float64)
    whole = window_results(case, inputs, "chunk")
    monkeypatch.setattr(chunk_form, "SCORES", 1)
    assert_close(window_results(case, inputs, "chunk"), whole, torch.float64)


def test_both_together_are_one_softmax() -> None:
    """Slots with nothing but the last token written to one of them are that token."""
    case = Case(T=12, window=4, sinks=False)
    x = window_inputs(case, torch.float64)
    near, lse = window_attention(x["q"], x["k"], x["v"], window=4)
    left_k, left_v = (torch.nn.functional.pad(x[name], (0, 0, 0, 0, 4, 0))[:, :12] for name in ("k", "v"))
    g = torch.full((2, 12, H, 1), -torch.inf, dtype=torch.float64)
    s = torch.ones_like(g)
    s[:, :4] = 0
    one, none = torch.ones(HQ), torch.zeros(HQ)
    o, _ = joined_slots(x["q"], left_k, left_v, g, s, near, lse, slot_scale=none, slot_mass=one, slot_bias=none)
    wider, _ = window_attention(x["q"], x["k"], x["v"], window=5)
    assert_close({"o": o}, {"o": wider}, torch.float64)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "window of 0": ({"window": 0}, "window must be a whole number from 1, got 0"),
    "window of a half": ({"window": 0.5}, "window must be a whole number from 1, got 0.5"),
    "fewer keys": ({"k": torch.zeros(2, 8, H, K), "v": torch.zeros(2, 8, H, V)}, "k has 8 time steps, expected P"),
    "values of other times": ({"v": torch.zeros(2, 8, H, V)}, "v has 8 time steps, k has 9"),
    "other rows": ({"k": torch.zeros(1, 9, H, K), "v": torch.zeros(1, 9, H, V)}, "k has 1 rows, q has 2"),
    "position, a list": ({"position": [0, 0]}, r"position must be an int32 or int64 tensor \[N\], got list"),
    "position, floats": ({"position": torch.zeros(2)}, r"position must be an int32 or int64 tensor \[N\]"),
    "position of others": ({"position": torch.zeros(3, dtype=torch.int64)}, "position has 3 sequences, q has 2"),
    "negative position": ({"position": torch.tensor([0, -1])}, "position must count tokens, from 0, .* is -1"),
    "sinks, two": ({"sinks": (torch.zeros(2), torch.zeros(2))}, r"sinks must be .*\(q, k, v\), got tuple"),
    "sinks of others": (
        {"sinks": (torch.zeros(2, 9, HQ, K), torch.zeros(3, S, H, K), torch.zeros(2, S, H, V))},
        r"the keys of sinks must have the shape \[2, 3, 2, 6\], got \[3, 3, 2, 6\]",
    ),
    "scale": ({"scale": "big"}, "scale must be a finite number or None, got 'big'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_of_window_attention(name: str) -> None:
    changes, message = WRONG[name]
    right = {"q": torch.zeros(2, 9, HQ, K), "k": torch.zeros(2, 9, H, K), "v": torch.zeros(2, 9, H, V), "window": 3}
    call = {**right, **changes}
    with pytest.raises(GSAError, match=f"^window_attention: .*{message}"):
        window_attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)


def test_wrong_arguments_of_joined_slots() -> None:
    x = slot_inputs(replace(Case(), T=5), torch.float32)
    wrong = {
        "near": (torch.zeros(2, 5, HQ, V + 1), r"near must have the shape \[B, T, HQ, V\] = \[2, 5, 4, 5\]"),
        "near_lse": (torch.zeros(2, 5, HQ, 1), r"near_lse must have the shape \[B, T, HQ\]"),
        "slot_bias": (torch.zeros(3), r"slot_bias must have the shape \[HQ\] = \[4\], got \[3\]"),
        "g": (torch.ones(2, 5, H, M), "g must be log gates, at most 0"),
        "s": (-torch.ones(2, 5, H, M), "s must be write strengths, at least 0, but the smallest is -1"),
    }
    for name, (value, message) in wrong.items():
        with pytest.raises(GSAError, match=f"^joined_slots: {message}"):
            slot_results(Case(), {**x, name: value}, "auto")
    with pytest.raises(GSAError, match=r"^joined_slots: initial_state must be a JoinedSlotState"):
        joined_slots(
            *(x[name] for name in ("q", "k", "v", "g", "s", "near", "near_lse")),
            slot_scale=x["slot_scale"],
            slot_mass=x["slot_mass"],
            slot_bias=x["slot_bias"],
            initial_state=torch.zeros(3),
        )
