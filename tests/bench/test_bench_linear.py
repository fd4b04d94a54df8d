"""The benchmark of matrix-vector products measures what it says."""

import json

import pytest

from gsa.bench import linear
from gsa.errors import GSAError
from gsa.ops.native import library

from ..tables import printed

needs_native = pytest.mark.skipif(library.unavailable(None) is not None, reason="the native engine cannot run here")
SMALL = linear.Model(layers=2, width=64, kv=32, mlp=96, vocabulary=100)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> dict:
    """A real report, of small sizes and without waiting."""
    monkeypatch.setattr("gsa.bench.timing.TURN", 0.0001)
    return linear.measure(SMALL, seconds=0.0, rounds=2)


@needs_native
def test_report(report: dict) -> None:
    rows = {row["name"]: row for row in report["rows"]}
    assert set(rows) == {"torch fp32", "torch bf16", *linear.WAYS}
    parameters = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64) + 100 * 64
    for name, row in rows.items():
        assert row["tokens_per_second"] == pytest.approx(1e3 / row["ms"])
        if name.endswith("fp32"):
            assert row["gbytes_per_second"] * row["ms"] * 1e6 == pytest.approx(4 * parameters)
        assert row["read_gbytes_per_second"] > 0
    errors = {name: row["error"] for name, row in rows.items()}
    assert 0 < errors["fp32"] < 1e-6 < errors["bf16"] < errors["int8"] < errors["int8 x int8"] < errors["int4"] < 0.1
    assert report["ratios"]["bf16 / torch bf16"] == pytest.approx(rows["torch bf16"]["ms"] / rows["bf16"]["ms"])
    steps = report["steps"]
    assert report["ratios"]["step, fused / step"] == pytest.approx(steps["step"] / steps["step, fused"])
    shown = printed(linear.speed_table(report))
    assert "tokens/s" in shown
    assert "int4 x int8" in shown


@needs_native
def test_the_three_ways_of_a_step_agree() -> None:
    one, stacked, fused = (step() for step in linear._steps(SMALL.weights()).values())
    assert (one - stacked).norm() < 1e-3 * one.norm()
    assert (one - fused).norm() < 2e-2 * one.norm()  # a last digit may change an integer activation


@needs_native
def test_json_is_all_that_is_printed(
    report: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(linear, "measure", lambda *args: report)
    capsys.readouterr()
    linear.linear(json=True)
    assert json.loads(capsys.readouterr().out) == report
    linear.linear()
    assert "tokens/s" in capsys.readouterr().out


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GSAError, match="threads must be at least 1, got 0"):
        linear.linear(threads=0)
    monkeypatch.setattr(library, "unavailable", lambda device: "it is not built")
    with pytest.raises(GSAError, match="the native engine cannot run here: it is not built"):
        linear.linear()
