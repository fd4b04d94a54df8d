"""The compiler for GPUs that are elsewhere: its figures are right, and everything that can be wrong is found."""

from functools import partial
from typing import Any

import pytest

from gsa.bench.gpu.workers import results
from gsa.ops.triton.launch import TARGETS

from . import ahead_cases

INSTRUCTIONS = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "gfx942": "v_mfma"}


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], Any]:
    """All cases for all targets, from processes where kernels are compiled."""
    tasks = {
        (name, target): partial(ahead_cases.compiled_case, name, target)
        for name in ahead_cases.CASES
        for target in TARGETS
        if (name, target) != ("tf32x3", "gfx942")  # which does not know it
    }
    for target in TARGETS:
        tasks["ours", target] = partial(ahead_cases.recorded_source, target)
        tasks["triton's", target] = partial(ahead_cases.what_triton_compiles, target)
    got = dict(results(list(tasks.values()), 2))
    return {name: got[place] for place, name in enumerate(tasks)}


@pytest.mark.parametrize("target", TARGETS)
def test_a_good_kernel(found: dict, target: str) -> None:
    good = found["good", target]
    assert good.faults == []
    assert (good.kernel, good.target, good.warps, good.stages) == ("multiply", target, 4, 1)
    assert set(good.matrix_instructions) == {INSTRUCTIONS[target]}
    assert (good.dots, good.fma_dots, good.spilled_bytes, good.stack_bytes) == (1, 0, 0, 0)
    assert 16 < good.registers <= 512
    assert 1000 < good.code_bytes < 100_000
    assert good.seconds >= 0
    # Both operands are there at once, except that AMD's may share their place.
    assert good.shared_bytes in (64 * 64 * 2, 2 * 64 * 64 * 2)
    assert good.shared_limit == TARGETS[target].shared_bytes


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_a_spill(found: dict, target: str) -> None:
    # A product of 128 x 128 in one warp: 512 registers of 32 lanes for the sums alone, or 256 of 64.
    figures = found["spills", target]
    if target == "gfx942":  # which has as many
        assert figures.faults == []
        assert figures.registers > 256
        return
    assert figures.stack_bytes > 0
    assert figures.spilled_bytes > 1000
    assert f"spills {figures.spilled_bytes} bytes a thread" in figures.faults


@pytest.mark.parametrize("target", TARGETS)
def test_too_much_shared_memory(found: dict, target: str) -> None:
    figures = found["too large", target]
    assert figures.shared_bytes > TARGETS[target].shared_bytes
    expected = f"needs {figures.shared_bytes} bytes of shared memory, {target} has {TARGETS[target].shared_bytes}"
    assert expected in figures.faults


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_product_without_matrix_instructions(found: dict, target: str) -> None:
    assert found["fma", target].faults == ["1 of 1 matrix products without matrix instructions"]
    assert found["fma", target].matrix_instructions == {}
    # In three steps of less precision each, they are there.
    assert found["tf32x3", target].faults == []
    assert found["tf32x3", target].dots == 3


def test_amd_multiplies_single_precision(found: dict) -> None:
    assert found["fma", "gfx942"].faults == []
    assert set(found["fma", "gfx942"].matrix_instructions) == {"v_mfma"}


@pytest.mark.parametrize("target", TARGETS)
def test_without_a_product_nothing_lacks(found: dict, target: str) -> None:
    figures = found["no product", target]
    assert (figures.dots, figures.matrix_instructions, figures.faults) == (0, {}, [])


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_compiled_is_what_would_run(found: dict, target: str) -> None:
    source, (signature, constants, attributes, warps, stages) = found["ours", target], found["triton's", target]
    assert dict(source.signature) == signature
    assert dict(source.constants) == constants
    assert {place: [list(x) for x in known] for place, known in source.attributes} == attributes
    assert (source.warps, source.stages) == (warps, stages) == (2, 3)
    # And that is not nothing: numbers of one and what is missing are constants, 16 divides what it divides.
    types = dict(source.signature)
    assert types["one"] == types["missing"] == types["WIDTH"] == "constexpr"
    assert (types["sixteens"], types["large"], types["number"], types["flag"]) == ("i32", "i64", "fp32", "u1")
    divisible = {place[0] for place, known in source.attributes if ("tt.divisibility", 16) in known}
    assert divisible == {0, 4, 6}  # a, sixteens and large; b is a view that begins elsewhere
