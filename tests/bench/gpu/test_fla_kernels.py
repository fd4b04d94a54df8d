"""flash-linear-attention's kernels, as it would launch them on a GPU that is not here."""

import sys
from functools import partial

import pytest

from gsa.bench.gpu import fla_kernels
from gsa.bench.gpu.launches import Case
from gsa.bench.gpu.workers import results
from gsa.errors import GSAError
from gsa.ops.triton.launch import TARGETS


@pytest.mark.slow
def test_all_its_kernels_with_all_their_settings() -> None:
    case = Case(TARGETS["sm_90"], "bf16", 512, 64, thorough=False)
    ((_, sources),) = results([partial(fla_kernels.sources, case)], 1)
    settings = {group[0].name: group for group in sources}
    assert {"chunk_fwd_kernel_h", "chunk_gsa_fwd_kernel_inter", "chunk_gsa_bwd_kernel_dqkvg"} < set(settings)
    assert all(len({source.name for source in group}) == 1 for group in sources)
    # Tiles of 128 are for GPUs with as much shared memory as this one: without any, it would try smaller ones.
    tiles = {dict(source.constants)[_place(source, "BV")] for source in settings["chunk_gla_bwd_kernel_dv"]}
    assert tiles == {64, 128}
    assert len(settings["chunk_fwd_kernel_h"]) > 10
    # Compiled in another process, which is shown the same; the first settings do.
    ((_, (figures, tried)),) = results([partial(fla_kernels.compiled_best, settings["softmax_fwd_kernel"])], 1)
    assert (figures.kernel, figures.target, figures.faults, tried) == ("softmax_fwd_kernel", "sm_90", [], 1)


def _place(source: object, name: str) -> tuple[int]:
    return ([parameter for parameter, _ in source.signature].index(name),)


def test_it_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(GSAError, match="needs flash-linear-attention"):
        fla_kernels.require_fla()
