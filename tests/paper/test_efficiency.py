"""`gsa paper efficiency`: what is measured, and what is told of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gsa.errors import GSAError
from gsa.mixers import mixer
from gsa.paper import efficiency as module
from gsa.paper.efficiency import NO_RECOMPUTATION, Sizes, decoding, efficiency
from gsa.paper.efficiency_report import PAPER_DECODING
from tests.ops.isas import needs_native

TINY = Sizes("tiny", (32, 64), 24, (3, 5), 1)


@needs_native
def test_the_command_writes_tables_a_picture_and_all_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(module, "QUICK", TINY)
    monkeypatch.setattr("gsa.bench.memory.measured_alone", lambda task, setting: {"peak": 2**30})
    efficiency(out=str(tmp_path / "out"), systems="xfmr,gsa", quick=True, device="cpu")
    printed = capsys.readouterr().out
    for words in ("Training, tokens a second", "32 x 2", "Memory of a training step, 64 tokens", "no recomputation"):
        assert words in printed
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert files == {"cells", *(f"efficiency.{k}" for k in ("json", "svg", "png"))}
    record = json.loads((tmp_path / "out" / "efficiency.json").read_text())
    trained = {(row["system"], row["length"], row["batch_size"]) for row in record["training"]}
    assert trained == {(s, n, 64 // n) for s in ("xfmr", "gsa", NO_RECOMPUTATION) for n in (32, 64)}
    assert all(row["tokens_per_second"] > 0 for row in record["training"])
    assert record["paper"]["decoding"]["gsa"]["16384"] == PAPER_DECODING["gsa"][16384]
    assert {row["runner"] for row in record["decoding"]} == {"CompiledRunner"}
    seconds = {(row["system"], row["decoded"]): row["seconds"] for row in record["decoding"]}
    assert seconds["gsa", 5] > seconds["gsa", 3] > 0


def test_what_was_measured_before_a_stop_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUICK", TINY)
    monkeypatch.setattr("gsa.bench.memory.measured_alone", lambda task, setting: {"peak": 2**30})
    begun: list[str] = []
    for part in ("training", "memory", "decoding"):
        measure = getattr(module, part)

        def counted(*args: Any, part: str = part, measure: Any = measure) -> Any:
            begun.append(part)
            if part == "decoding" and begun.count(part) == 1:
                raise KeyboardInterrupt
            return measure(*args)

        monkeypatch.setattr(module, part, counted)
    options: Any = {"out": str(tmp_path / "out"), "systems": "xfmr,retnet", "quick": True, "device": "cpu"}
    with pytest.raises(KeyboardInterrupt):
        efficiency(**options)
    measured = ["training", "training", "memory", "memory", "decoding"]
    assert begun == measured
    efficiency(**options)
    assert begun == [*measured, "decoding"]  # which was not finished
    efficiency(**options)
    assert begun == [*measured, "decoding"]


def test_the_papers_order_of_decoding_is_by_state() -> None:
    last = {system: times[16384] for system, times in PAPER_DECODING.items()}
    assert last["gsa"] < last["gla"] < last["retnet"] < last["xfmr"]


def test_recomputation_changes_no_gradient() -> None:
    import torch

    torch.manual_seed(0)
    layer = mixer("gsa", hidden_size=16, num_attention_heads=2, num_slots=4)
    x = torch.randn(1, 70, 16)
    gradients = []
    for recompute in (True, False):
        layer.recompute = recompute
        gradients.append(torch.autograd.grad(layer(x)[0].square().sum(), list(layer.parameters())))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_every_system_is_decoded_by_the_same_engine() -> None:
    import torch

    rows = decoding(list(module.SYSTEMS), Sizes("tiny", (32,), 3, (2,), 1), torch.device("cpu"))
    assert len({row["runner"] for row in rows}) == 1
    assert [row["system"] for row in rows if row["state_bytes"] is None] == ["xfmr"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"systems": "gsa,gsb"}, "'gsb' is not known"),
        ({"size": "huge"}, "size must be one of tiny, small"),
        ({"lengths": "100,250"}, "lengths must divide the longest, 250, got 100,250"),
        ({"device": "tpu"}, "device"),
        ({"json": True, "markdown": True}, "exclude each other"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_measured(options: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(GSAError, match=message):
        efficiency(out=str(tmp_path / "out"), **options)
    assert not (tmp_path / "out").exists()
