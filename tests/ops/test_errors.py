"""Bad input is refused with a sentence that names the operation, the argument, what came and what was expected."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gsa.errors import BackendUnavailable, GSAError
from gsa.ops import (
    BoundedMemoryState,
    SlotState,
    attention_with_bounded_memory,
    backends,
    engines,
    gated_linear_attention,
    gated_slot_attention,
    gated_slot_attention_step,
    registry,
    use_backend,
)
from tests.device import DEVICE
from tests.ops.cases import ENGINES

B, T, H, HQ, K, V, M = 2, 5, 2, 4, 6, 3, 7


def slot_arguments() -> dict[str, Any]:
    return {
        "q": torch.randn(B, T, HQ, K),
        "k": torch.randn(B, T, H, K),
        "v": torch.randn(B, T, H, V),
        "g": -torch.rand(B, T, H, M),
        "s": torch.rand(B, T, H, M),
        "initial_state": SlotState(torch.zeros(B, H, K, M), torch.zeros(B, H, M, V)),
    }


SLOT_MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no tensor": ({"q": [1.0]}, "q must be a tensor [B, T, HQ, K], got list"),
    "dimensions": ({"k": torch.randn(B, T, K)}, f"k must have the shape [B, T, H, K], got [{B}, {T}, {K}]"),
    "integers": (
        {"v": torch.ones(B, T, H, V, dtype=torch.int64)},
        "v must be floating point (64, 32 or 16 bits), got torch.int64",
    ),
    "float8": ({"g": torch.zeros(B, T, H, M).to(torch.float8_e4m3fn)}, "g must be floating point (64, 32 or 16 bits)"),
    "sparse": ({"q": torch.randn(B, T, HQ, K).to_sparse()}, "q must be dense, got torch.sparse_coo"),
    "nested": (
        {"q": torch.nested.nested_tensor([torch.randn(T, HQ, K), torch.randn(2, HQ, K)], layout=torch.jagged)},
        "q must be dense, got a nested tensor; sequences can be packed, see cu_seqlens",
    ),
    "numpy": ({"q": torch.randn(B, T, HQ, K).numpy()}, "q must be a tensor [B, T, HQ, K], got ndarray"),
    "complex": (
        {"q": torch.zeros(B, T, HQ, K, dtype=torch.complex64)},
        "q must be floating point (64, 32 or 16 bits), got torch.complex64",
    ),
    "whole gates": (
        {"g": torch.zeros(B, T, H, M, dtype=torch.int32)},
        "g must be floating point (64, 32 or 16 bits), got torch.int32",
    ),
    "no gates": ({"g": None}, "g must be a tensor [B, T, H, M], got NoneType"),
    "a word for a flag": ({"recompute": "no"}, "recompute must be True or False, got 'no'"),
    "a number for a flag": ({"output_final_state": 1}, "output_final_state must be True or False, got 1"),
    "mixed dtypes": ({"k": torch.randn(B, T, H, K).double()}, "k is torch.float64, q is torch.float32"),
    "device": ({"g": torch.empty(B, T, H, M, device="meta")}, "g is on meta, q is on cpu"),
    "rows": ({"v": torch.randn(3, T, H, V)}, "v has 3 rows, q has 2"),
    "time": ({"k": torch.randn(B, 4, H, K)}, "k has 4 time steps, q has 5"),
    "heads of v": ({"v": torch.randn(B, T, 1, V)}, "v has 1 heads, k has 2"),
    "heads of q": ({"q": torch.randn(B, T, 3, K)}, "q has 3 heads, which is not a multiple of the 2 heads of k and v"),
    "heads of g": ({"g": -torch.rand(B, T, 3, M)}, "g has 3 heads, k has 2"),
    "key width": ({"k": torch.randn(B, T, H, 5)}, "k has 5 features per head, q has 6"),
    "no width": ({"v": torch.randn(B, T, H, 0)}, "v has heads of width 0"),
    "no slots": ({"g": torch.zeros(B, T, H, 0)}, "g has no slots"),
    "slots of s": ({"s": torch.rand(B, T, H, 4)}, "s has width 4, expected M = 7"),
    "huge scale": ({"scale": 10**400}, "scale must be a finite number or None, got 1000"),
    "scale": ({"scale": float("nan")}, "scale must be a finite number or None, got nan"),
    "readout": ({"readout": "sofmax"}, "unknown readout 'sofmax'; expected one of 'softmax', 'identity'"),
    "readout type": ({"readout": ["softmax"]}, "unknown readout ['softmax']"),
    "state type": ({"initial_state": torch.zeros(B, H, K, M)}, "initial_state must be a SlotState(k, v), got Tensor"),
    "state shape": (
        {"initial_state": SlotState(torch.zeros(B, H, M, K), torch.zeros(B, H, M, V))},
        f"initial_state.k must have the shape [N, H, K, M] = [{B}, {H}, {K}, {M}], got [{B}, {H}, {M}, {K}]",
    ),
    "state device": (
        {"initial_state": SlotState(torch.zeros(B, H, K, M), torch.zeros(B, H, M, V, device="meta"))},
        "initial_state.v is on meta, q is on cpu",
    ),
    "packed rows": ({"cu_seqlens": torch.tensor([0, T])}, "cu_seqlens packs sequences into a batch of 1, but q has 2"),
    "packed list": ({"cu_seqlens": [0, T]}, "cu_seqlens must be an int32 or int64 tensor [N+1], got list"),
    "packed floats": ({"cu_seqlens": torch.tensor([0.0, T])}, "cu_seqlens must be an int32 or int64 tensor"),
    "packed elsewhere": (
        {"cu_seqlens": torch.tensor([0, T], device="meta")},
        "cu_seqlens is on meta, expected cpu or the CPU",
    ),
    "packed nothing": ({"cu_seqlens": torch.tensor([], dtype=torch.int64)}, "cu_seqlens is empty"),
    "backend type": ({"backend": 3}, "backend must be a name, got int"),
    "backend": ({"backend": "chunks"}, "unknown engine 'chunks'; expected 'auto' or one of 'reference'"),
}


@pytest.mark.parametrize("name", SLOT_MISTAKES)
def test_slot_attention(name: str) -> None:
    wrong, message = SLOT_MISTAKES[name]
    with pytest.raises(GSAError, match="^" + re.escape("gated_slot_attention: " + message)):
        gated_slot_attention(**(slot_arguments() | wrong))


@pytest.mark.any_device
@pytest.mark.parametrize("engine", ["reference", *ENGINES])
@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([1, 5], "cu_seqlens must run from 0 to T = 5, but runs from 1 to 5"),
        ([0, 4], "cu_seqlens must run from 0 to T = 5, but runs from 0 to 4"),
        ([0, 3, 2, 5], "cu_seqlens must not decrease, but entry 2 is 2 after 3"),
    ],
)
def test_packing(engine: str, bounds: list[int], message: str) -> None:
    x = {n: t[:1].to(DEVICE) for n, t in slot_arguments().items() if n in "qkvg"}
    with pytest.raises(GSAError, match="^gated_slot_attention: " + re.escape(message)):
        gated_slot_attention(**x, cu_seqlens=torch.tensor(bounds), backend=engine)
    with pytest.raises(GSAError, match="^attention_with_bounded_memory: " + re.escape(message)):
        attention_with_bounded_memory(
            x["q"], x["k"], x["v"], x["g"], cu_seqlens=torch.tensor(bounds, dtype=torch.int32), backend=engine
        )


LINEAR_MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "key gate": ({"gk": -torch.rand(B, T, H, 4)}, "gk has width 4, expected K = 6 or 1"),
    "value gate": ({"gv": -torch.rand(B, T, H, 1)}, "gv has width 1, expected V = 3"),
    "gate of query heads": ({"gk": -torch.rand(B, T, HQ, K)}, "gk has 4 heads, k has 2"),
    "state": (
        {"initial_state": torch.zeros(B, H, V, K)},
        "initial_state must have the shape [N, H, K, V] = [2, 2, 6, 3]",
    ),
}


@pytest.mark.parametrize("name", LINEAR_MISTAKES)
def test_linear_attention(name: str) -> None:
    wrong, message = LINEAR_MISTAKES[name]
    arguments = {n: t for n, t in slot_arguments().items() if n in "qkv"}
    with pytest.raises(GSAError, match="^" + re.escape(f"gated_linear_attention: {message}")):
        gated_linear_attention(**(arguments | wrong))


def test_bounded_memory() -> None:
    x = slot_arguments()
    with pytest.raises(GSAError, match="attention_with_bounded_memory: w has 3 heads, k has 2"):
        attention_with_bounded_memory(x["q"], x["k"], x["v"], torch.randn(B, T, 3, M))
    with pytest.raises(GSAError, match=r"initial_state must be a BoundedMemoryState\(k, v, log_z\), got SlotState"):
        attention_with_bounded_memory(x["q"], x["k"], x["v"], x["g"], initial_state=x["initial_state"])
    with pytest.raises(GSAError, match="attention_with_bounded_memory: normalise must be True or False, got None"):
        attention_with_bounded_memory(x["q"], x["k"], x["v"], x["g"], normalise=None)
    state = BoundedMemoryState(*x["initial_state"], torch.zeros(B, H))
    with pytest.raises(GSAError, match=r"initial_state.log_z must have the shape \[N, H, M\], got"):
        attention_with_bounded_memory(x["q"], x["k"], x["v"], x["g"], initial_state=state)


def test_step() -> None:
    x = {n: t[:, 0] for n, t in slot_arguments().items() if n in "qkvg"}
    state = slot_arguments()["initial_state"]
    with pytest.raises(GSAError, match=r"gated_slot_attention_step: q must have the shape \[B, HQ, K\], got"):
        gated_slot_attention_step(**(x | {"q": torch.randn(B, T, HQ, K)}), state=state)
    with pytest.raises(GSAError, match=r"gated_slot_attention_step: state must be a SlotState\(k, v\), got NoneType"):
        gated_slot_attention_step(**x, state=None)
    with pytest.raises(GSAError, match=r"state.v must have the shape \[B, H, M, V\] = "):
        gated_slot_attention_step(**x, state=SlotState(state.k, state.k))
    wide = SlotState(state.k[:1].expand(B, H, K, M), state.v)
    with pytest.raises(
        GSAError,
        match=r"state\.k is a view that cannot be written to, .*; pass state\.k\.clone\(\)",
    ):
        gated_slot_attention_step(**x, state=wide, inplace=True)
    with pytest.raises(GSAError, match="gated_slot_attention_step: inplace must be True or False, got 'no'"):
        gated_slot_attention_step(**x, state=state, inplace="no")
    half = SlotState(state.k.half(), state.v.half())
    with pytest.raises(GSAError, match=r"state\.k must be torch.float32 to be updated in place, got torch.float16"):
        gated_slot_attention_step(**x, state=half, inplace=True)
    gated_slot_attention_step(**x, state=half)


def test_backends() -> None:
    assert backends() == {"reference": None, "chunk": None, "native": None, "triton": None}
    with pytest.raises(GSAError, match="unknown engine 'fast'"), use_backend("fast"):
        pass


def test_an_engine_has_what_it_lists_and_nothing_unknown() -> None:
    """What an engine lacks, it cannot do: so a name with a mistake in it must not pass for a lack."""
    known = set(engines.reference.__all__)
    for name in engines.MODULES:
        module = getattr(engines, name)
        assert set(module.__all__) <= known
        assert all(callable(getattr(module, operation)) for operation in module.__all__)
    assert known - set(engines.triton.__all__) == {"joined_slots", "matvec", "selective_scan", "window_attention"}
    assert all(set(getattr(engines, name).__all__) == known for name in ("chunk", "native"))


def test_use_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """It decides what "auto" means, loses to a backend that is named, and ends with its context."""
    used = []
    for name in engines.MODULES:
        module = getattr(engines, name)
        spy = lambda call, name=name, run=module.gated_slot_attention: used.append(name) or run(call)  # noqa: E731
        monkeypatch.setattr(module, "gated_slot_attention", spy)
    x = slot_arguments()
    gated_slot_attention(**x)
    with use_backend("reference"):
        gated_slot_attention(**x)
        gated_slot_attention(**x, backend="chunk")
        with use_backend("auto"):
            gated_slot_attention(**x)
    gated_slot_attention(**x)
    assert used == ["native", "reference", "chunk", "native", "native"]


def test_an_engine_that_cannot_run_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.MODULES, "imaginary", "gsa.ops.chunk.engine")
    monkeypatch.setitem(
        registry.AVAILABILITY, "imaginary", SimpleNamespace(unavailable=lambda device: "no such hardware")
    )
    assert backends()["imaginary"] == "no such hardware"
    with pytest.raises(BackendUnavailable, match="'imaginary' cannot run here: no such hardware"):
        gated_slot_attention(**slot_arguments(), backend="imaginary")
    with pytest.raises(BackendUnavailable), use_backend("imaginary"):
        pass
    monkeypatch.setitem(registry.PREFERENCE, "cpu", ("imaginary", "chunk"))
    gated_slot_attention(**slot_arguments())  # only "auto" goes on to the next
