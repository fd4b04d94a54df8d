"""Inputs for the operators, and their results gathered by name: what the matrix of engines and cases is made of.

All is drawn on the CPU, so that every device is given the same numbers, and then moved to the one under test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import logsigmoid

from gsa.ops import SlotState, backends, gated_linear_attention, gated_slot_attention
from tests.device import DEVICE

ENGINES = [name for name in backends() if name != "reference" and not (name == "native" and DEVICE.type != "cpu")]
"""What is held against the reference on this device. One that is missing here is not left out, but fails."""

INTERPRETED = "triton" if DEVICE.type == "cpu" else None
"""The engine whose kernels run in Triton's interpreter: a program after another, each thousands of times too slow."""
_FEW = settings(max_examples=10, phases=(Phase.generate,))  # to make a failing example smaller takes minutes

# Relative RMS error against the fp64 reference: (outputs and states, gradients).
TOLERANCE = {torch.float64: (1e-9, 1e-9), torch.float32: (1e-5, 1e-4)}

Gate = Callable[[Tensor], Tensor]
"""Standard normal noise -> log gates."""


def damped(tau: float) -> Gate:
    return lambda noise: logsigmoid(noise) / tau


def _some(noise: Tensor, share: float, value: float, rest: Tensor) -> Tensor:
    return torch.where(noise > torch.special.ndtri(torch.tensor(1 - share, device="cpu")), value, rest)


def _one_slot_resets(noise: Tensor) -> Tensor:
    g = torch.zeros_like(noise)
    g[..., 0] = -torch.inf
    return g


GATES: dict[str, Gate] = {
    "slow": damped(16.0),
    "paper": damped(8.0),
    "fast": damped(1.0),
    "strong": damped(0.1),
    "none": torch.zeros_like,
    "all reset": lambda noise: torch.full_like(noise, -torch.inf),
    "some reset": lambda noise: _some(noise, 0.05, -torch.inf, logsigmoid(noise) / 8),
    "thousand nats": lambda noise: _some(noise, 0.1, -1000.0, logsigmoid(noise) / 100),
    "one slot resets, the next keeps": _one_slot_resets,
}


@dataclass(frozen=True)
class Case:
    """One call: sizes, gates and options. `lengths` packs sequences of these lengths into a batch of one."""

    B: int = 2
    T: int = 150
    H: int = 2
    R: int = 1
    K: int = 12
    V: int = 9
    M: int = 7
    gate: str = "paper"
    write: bool = False
    """Pass the write strength s."""
    initial: bool = True
    readout: str = "softmax"
    scale: float | None = 1.0
    lengths: tuple[int, ...] | None = None
    recompute: bool = True

    def packed(self) -> Case:
        return self if self.lengths is None else replace(self, B=1, T=sum(self.lengths))

    @property
    def N(self) -> int:
        return self.B if self.lengths is None else len(self.lengths)

    @property
    def cu_seqlens(self) -> Tensor | None:
        return None if self.lengths is None else torch.tensor((0, *self.lengths), device="cpu").cumsum(0).to(DEVICE)


def light(case: Case, engine: str) -> Case:
    """The case, for kernels that are interpreted: one row in place of several, few chunks, one head unless plain."""
    if engine != INTERPRETED:
        return case
    plain = case.lengths is None and case.gate == "paper"
    return replace(case, B=min(case.B, 1), T=min(case.T, 80), H=case.H if plain else 1)


def tiny(case: Case, engine: str) -> Case:
    """The same where what is asked has nothing to do with sizes: also with one head, one query, and half as long."""
    return replace(light(case, engine), H=1, R=1, T=case.T // 2) if engine == INTERPRETED else case


def engines(slow: str | None) -> list[Any]:
    """All of them to parametrise a test with, one of them left to `make test-all`."""
    return [pytest.param(name, marks=pytest.mark.slow) if name == slow else name for name in ENGINES]


def for_every_engine(**strategies: st.SearchStrategy) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a property, test(engine, ...), for every engine: few examples, and slow, if it is interpreted.

    >>> @for_every_engine(size=st.integers(1, 9))
    ... def test_of_sizes(engine: str, size: int) -> None: ...
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize("engine", engines(slow=INTERPRETED))
        def holds(engine: str) -> None:
            @(_FEW if engine == INTERPRETED else settings())
            @given(**strategies)
            def check(**drawn: object) -> None:
                test(engine, **drawn)

            check()

        holds.__name__, holds.__doc__ = test.__name__, test.__doc__
        return holds

    return decorate


Tensors = dict[str, Tensor]


def slot_inputs(case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensors:
    """Inputs of gated_slot_attention for a case, drawn in fp64 and rounded to `dtype`; states in the dtype of sums."""
    case = case.packed()
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64, device="cpu")

    B, T, H, K, V, M, N = case.B, case.T, case.H, case.K, case.V, case.M, case.N
    x = {"q": normal(B, T, H * case.R, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V)}
    x["g"] = GATES[case.gate](normal(B, T, H, M))
    if case.write:
        x["s"] = torch.rand(B, T, H, M, generator=random, dtype=torch.float64, device="cpu")
    if case.initial:
        x["state_k"], x["state_v"] = normal(N, H, K, M), normal(N, H, M, V)
    states = torch.float64 if dtype == torch.float64 else torch.float32
    return {name: t.to(DEVICE, states if name.startswith("state") else dtype) for name, t in x.items()}


def linear_inputs(case: Case, gk: str | None, gv: str | None, dtype: torch.dtype = torch.float64) -> Tensors:
    """Inputs of gated_linear_attention; gk is "key" (one gate per feature), "head" or None, gv is "value" or None."""
    x = slot_inputs(replace(case, initial=False, write=False), torch.float64, seed=1)
    case, random = case.packed(), torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64, device="cpu")

    del x["g"]
    shape = (case.B, case.T, case.H)
    if gk is not None:
        width = {"key": case.K, "head": 1}[gk]
        x["gk"] = GATES[case.gate](normal(*shape, width))
    if gv is not None:
        x["gv"] = GATES[case.gate](normal(*shape, case.V))
    x = {name: t.to(DEVICE, dtype) for name, t in x.items()}
    if case.initial:
        states = torch.float64 if dtype == torch.float64 else torch.float32
        x["state"] = normal(case.N, case.H, case.K, case.V).to(DEVICE, states)
    return x


def slot_results(case: Case, inputs: Tensors, backend: str, gradients: bool = True) -> Tensors:
    """Outputs, final states and all gradients (for random output gradients) of gated_slot_attention."""
    case = case.packed()
    x = {name: t.detach().requires_grad_(gradients) for name, t in inputs.items()}  # where and as they lie
    initial = SlotState(x["state_k"], x["state_v"]) if case.initial else None
    o, state = gated_slot_attention(
        x["q"],
        x["k"],
        x["v"],
        x["g"],
        x.get("s"),
        scale=case.scale,
        readout=case.readout,
        initial_state=initial,
        output_final_state=True,
        cu_seqlens=case.cu_seqlens,
        backend=backend,
        recompute=case.recompute,
    )
    assert state is not None
    return with_gradients({"o": o, "final_k": state.k, "final_v": state.v}, x, gradients)


def linear_results(case: Case, inputs: Tensors, backend: str) -> Tensors:
    """The same of gated_linear_attention."""
    case = case.packed()
    x = {name: t.detach().requires_grad_() for name, t in inputs.items()}
    o, state = gated_linear_attention(
        x["q"],
        x["k"],
        x["v"],
        gk=x.get("gk"),
        gv=x.get("gv"),
        scale=case.scale,
        initial_state=x.get("state"),
        output_final_state=True,
        cu_seqlens=case.cu_seqlens,
        backend=backend,
        recompute=case.recompute,
    )
    assert state is not None
    return with_gradients({"o": o, "final": state}, x, True)


def with_gradients(outputs: Tensors, inputs: Tensors, gradients: bool) -> Tensors:
    results = {name: y.detach() for name, y in outputs.items()}
    if gradients:
        random = torch.Generator().manual_seed(3)
        # Multiples of 1/8, which every dtype holds exactly.
        cotangents = [
            torch.randn(y.shape, generator=random, device="cpu").mul(8).round().div(8).to(y) for y in outputs.values()
        ]
        pairs = [(y, d) for y, d in zip(outputs.values(), cotangents, strict=True) if y.requires_grad]
        found = torch.autograd.grad(
            [y for y, _ in pairs] or [sum(x.sum() * 0 for x in inputs.values())],
            list(inputs.values()),
            [d for _, d in pairs] or None,
            allow_unused=True,
            materialize_grads=True,
        )
        results |= {f"d{name}": grad for name, grad in zip(inputs, found, strict=True)}
    return results


def relative_error(actual: Tensor, exact: Tensor, size_of: Tensor | None = None) -> float:
    """RMS error relative to the size of `exact`, or of another tensor; of an all-zero tensor, the error itself."""
    assert actual.shape == exact.shape
    if exact.numel() == 0:
        return 0.0
    size = (exact if size_of is None else size_of).double().norm().item()
    difference = (actual.double() - exact.double()).norm().item()
    return difference / size if size > 0 else difference


def assert_close(actual: Tensors, exact: Tensors, dtype: torch.dtype, sizes: Tensors | None = None) -> None:
    """Every result within the tolerance of its dtype; NaN and inf nowhere that `exact` has none.

    Errors are relative to `sizes`, by default the results themselves. Of small tensors those may be small by chance, as
    differences of large numbers are; what holds for every seed is relative to the sums of absolute values.
    """
    assert actual.keys() == exact.keys()
    outputs, gradients = TOLERANCE[dtype]
    for name, value in exact.items():
        assert actual[name].isfinite().all() or not value.isfinite().all(), f"{name} is not finite"
        limit = gradients if name.startswith("d") else outputs
        error = relative_error(actual[name], value, None if sizes is None else sizes[name])
        assert error <= limit, f"{name}: relative error {error:.2e}, limit {limit:.0e}"


def in_double(inputs: Tensors) -> Tensors:
    return {name: t.double() for name, t in inputs.items()}
