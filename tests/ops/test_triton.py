"""What is particular to the GPU engine: many tiles, its plans, and where it runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gsa.errors import BackendUnavailable, GSAError
from gsa.ops import SlotState, engines, gated_slot_attention, registry
from gsa.ops.calls import SlotCall
from gsa.ops.triton import availability, plan, segments
from gsa.ops.triton.launch import TARGETS, Target, recording
from tests.ops.cases import Case, assert_close, linear_inputs, linear_results, slot_inputs, slot_results

OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
SIDES = {
    "key": ("key", None),
    "value": (None, "value"),
    "both": ("key", "value"),
    "head": ("head", None),
    "neither": (None, None),
}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 by 32 and chunks of 16: small tensors have many of both, on both sides of the state."""
    monkeypatch.setattr(plan, "NARROW", 16)
    for key, found in plan.TABLE.items():
        tiles = {kind: (32, *rest) for kind, (_, *rest) in found.tiles.items()}
        blocks = {kind: (16, warps) for kind, (_, warps) in found.blocks.items()}
        monkeypatch.setitem(plan.TABLE, key, plan.Settings(16, tiles, blocks))


@pytest.mark.any_device
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "case",
    [
        Case(B=1, T=40, H=1, K=60, V=44, M=20),
        Case(B=1, T=20, H=1, R=2, K=20, V=17, M=40, gate="some reset", write=True, recompute=False),
        Case(H=1, K=36, V=36, M=33, lengths=(20, 0, 17), gate="fast", readout="swish", scale=None),
    ],
    ids=str,
)
def test_slot_attention_in_many_tiles(case: Case) -> None:
    inputs = slot_inputs(case)
    assert_close(slot_results(case, inputs, "triton"), slot_results(case, inputs, "reference"), torch.float64)


@pytest.mark.any_device
@pytest.mark.quick_if_interpreted(sides=["neither"], segment=[32])
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("segment", [512, 32])
def test_linear_attention_in_many_tiles(sides: str, segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "segment_length", lambda *sizes: segment)
    case = Case(B=1, T=50, H=1, R=2, K=36, V=44, gate="fast", scale=0.3)
    inputs = linear_inputs(case, *SIDES[sides])
    assert_close(linear_results(case, inputs, "triton"), linear_results(case, inputs, "reference"), torch.float64)


@pytest.mark.any_device
@pytest.mark.slow
@pytest.mark.parametrize("gate", ["paper", "some reset"])
def test_the_heads_of_the_paper(gate: str) -> None:
    """Heads of 512 with 64 slots, with the tiles they have on a GPU, in bf16 and fp32."""
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(B=1, T=130, H=1, K=512, V=512, M=64, gate=gate, scale=0.05)
        inputs = slot_inputs(case, dtype)
        exact = slot_results(case, {name: t.double() for name, t in inputs.items()}, "reference")
        found = slot_results(case, inputs, "triton")
        if dtype == torch.float32:
            assert_close(found, exact, dtype)
        else:
            for name, value in found.items():
                rounded = (exact[name].to(value.dtype).double() - exact[name]).norm()
                limit = max(2 * rounded, 1e-5 * exact[name].norm())
                assert (value.double() - exact[name]).norm() <= limit, name


@pytest.mark.any_device
def test_packed_sequences_that_change_in_place() -> None:
    """The cut of a tensor of bounds is remembered, and forgotten with its values."""
    case = Case(H=1, initial=False, lengths=(30, 10))
    x = slot_inputs(case)
    bounds = torch.tensor([0, 30, 40], device=x["q"].device)
    args = [x[n] for n in "qkvg"]
    first, _ = gated_slot_attention(*args, cu_seqlens=bounds, backend="triton")
    again, _ = gated_slot_attention(*args, cu_seqlens=bounds, backend="triton")
    assert torch.equal(first, again)
    bounds[1] = 12
    changed, _ = gated_slot_attention(*args, cu_seqlens=bounds, backend="triton")
    expected, _ = gated_slot_attention(*args, cu_seqlens=bounds, backend="reference")
    torch.testing.assert_close(changed, expected)
    bounds[1] = 41
    with pytest.raises(GSAError, match="must not decrease"):
        gated_slot_attention(*args, cu_seqlens=bounds, backend="triton")


@pytest.mark.parametrize(("B", "T"), [(3, 130), (2, 64), (1, 1), (2, 0), (0, 5)])
@pytest.mark.parametrize("segment", [64, 512])
def test_rows_are_cut_like_sequences(B: int, T: int, segment: int) -> None:
    """The tables that are made on the device are those that are made from a list of sequences."""
    made = segments.cut_rows(B, T, torch.device("cpu"), segment, 16)
    bounds = [(0, b * T, (b + 1) * T) for b in range(B)]
    for ours, theirs in zip(
        made, segments.cut_sequences(bounds, torch.device("cpu"), segment, 16, segment >= T), strict=True
    ):
        assert ours is theirs if isinstance(ours, bool) else torch.equal(ours, theirs)


def test_bounds_are_cut_for_every_device() -> None:
    bounds = torch.tensor([0, 3, 5])
    here = segments.segments(1, 5, bounds, torch.device("cpu"), 512, 64)
    assert segments.segments(1, 5, bounds, torch.device("cpu"), 512, 64) is here
    there = segments.segments(1, 5, bounds, torch.device("cpu", 0), 512, 64)
    assert there is not here


@pytest.mark.slow
def test_gradients_lie_as_compilers_expect() -> None:
    """Also of inputs that are not dense: as torch.empty_like would lie."""
    x = slot_inputs(Case(T=5, initial=False, write=True))
    q, k, v, g, s = (x[n].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for n in "qkvgs")
    slots = (q, k, v, g, s, None, None, None, 1.0, "softmax", "marks", True)
    torch.library.opcheck(torch.ops.gsa.triton_gsa.default, slots, test_utils=OPCHECKS)
    torch.library.opcheck(
        torch.ops.gsa.triton_gla.default, (q, k, v, None, None, None, None, 0.5, "marks", True), test_utils=OPCHECKS
    )
    *_, scores, kept_k, kept_v = torch.ops.gsa.triton_gsa(*slots)
    grads = torch.ops.gsa.triton_gsa_backward(
        torch.ones_like(v), None, None, *(t.detach() for t in (q, k, v, g, s)), *[None] * 3, 1.0, "softmax", "marks",
        True, scores.detach(), kept_k.detach(), kept_v.detach()
    )  # fmt: skip
    for t, grad in zip((q, k, v, g, s), grads, strict=False):
        assert grad.stride() == torch.empty_like(t).stride()


def test_grids_have_one_dimension_and_nothing_is_atomic() -> None:
    sources = [path.read_text() for path in Path(plan.__file__).parent.rglob("*.py")]
    assert not any("atomic_" in source for source in sources)
    from gsa.ops.triton.slot_attention import forward

    # More than 2**32 entries in q, and more than 65535 programs.
    q = torch.empty(64, 65536, 8, 256, dtype=torch.bfloat16, device="meta")
    g = torch.empty(64, 65536, 8, 64, device="meta")
    with recording(TARGETS["sm_90"]) as launches:
        forward(SlotCall(q, q, q, g, None, None, None, None, 1.0, "softmax", "marks", False))
    assert all(isinstance(x.programs, int) and 0 < x.programs < 2**31 for x in launches)
    assert max(x.programs for x in launches) > 65535


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_long_and_short_sequences_fill_the_processors(target: Target) -> None:
    """At the paper's sizes: one segment for each of many sequences, several for one long sequence."""
    for B, T in ((8, 2048), (4, 4096), (2, 8192), (1, 16384)):
        length = plan.segment_length(target, B * T, 4, 512)
        assert length >= plan.MIN_SEGMENT
        programs = B * -(-T // length) * 4 * 4
        assert programs >= 0.8 * target.processors


def test_it_is_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engines.triton is not None  # its kernels are defined while TRITON_INTERPRET is set
    monkeypatch.delenv("TRITON_INTERPRET")
    x = slot_inputs(Case(T=3))
    with pytest.raises(BackendUnavailable, match="NVIDIA and AMD GPUs, not on cpu"):
        gated_slot_attention(*(x[n] for n in "qkvg"), backend="triton")
    assert registry.engine_name("auto", torch.device("cuda")) == "triton"
    assert registry.engine_name("auto", torch.device("cpu")) != "triton"
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "not installed" in (availability.unavailable(torch.device("cuda")) or "")
    assert registry.engine_name("auto", torch.device("cuda")) == "chunk"


def test_nothing_heavy_is_imported_with_the_operators() -> None:
    code = (
        "import sys, gsa, gsa.ops; print(gsa.ops.backends()['triton']); "
        "heavy = {'transformers', 'triton', 'datasets', 'matplotlib', 'jsonargparse', 'rich'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "GPU" in run.stdout or run.stdout == "None\n"


@pytest.mark.any_device
def test_an_empty_sequence_keeps_its_state() -> None:
    case = Case(H=1, lengths=(0, 5, 0))
    x = slot_inputs(case)
    state = SlotState(x["state_k"], x["state_v"])
    _, final = gated_slot_attention(
        *(x[n] for n in "qkvg"),
        initial_state=state,
        output_final_state=True,
        cu_seqlens=case.packed().cu_seqlens,
        backend="triton",
    )
    assert final is not None
    for before, after in zip(state, final, strict=True):
        assert torch.equal(before[[0, 2]], after[[0, 2]])
