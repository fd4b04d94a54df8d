"""The working memory of the chunk engine."""

import pytest
import torch

from gsa.ops.chunk import scratch
from tests.ops.cases import Case, slot_inputs, slot_results

CASE = Case(T=100, R=2, gate="some reset", write=True)


def test_scratch_is_given_back_when_it_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    x = slot_inputs(CASE, torch.float32)
    held = scratch.scratch_for(torch.float32, torch.device("cpu"))
    slot_results(CASE, x, "chunk")
    assert held.buffers
    monkeypatch.setattr(scratch.Scratch, "KEPT_BYTES", 1000)
    slot_results(CASE, x, "chunk")
    assert not held.buffers
