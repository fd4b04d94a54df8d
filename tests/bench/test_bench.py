"""The benchmark measures what it says; that it is fast is no test's business."""

import json
import time

import pytest

from gsa.bench import ops
from gsa.bench.memory import measurable, measured_alone
from gsa.bench.timing import race
from gsa.errors import GSAError

from ..tables import printed


def test_race_finds_the_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {"slow": 0, "fast": 0}

    def work(name: str, seconds: float) -> None:
        runs[name] += 1
        time.sleep(seconds)

    monkeypatch.setattr("gsa.bench.timing.TURN", 0.001)
    best = race({"slow": lambda: work("slow", 0.02), "fast": lambda: work("fast", 0.002)}, seconds=0, rounds=3)
    assert 0.002 <= best["fast"] < best["slow"]
    assert runs == {"slow": 4, "fast": 4}  # one to warm up, and three rounds


@pytest.fixture(scope="module")
def report() -> dict:
    """A real report, of small sizes and without waiting."""

    def contest(entries: list[ops.Entry], against: bool, backend: str, rounds: int) -> tuple[list[ops.Row], float]:
        small = [ops.Entry(1, 64, e.T // 64, e.backward, e.tau) for e in entries]
        return real(small, against, backend, seconds=0.0, rounds=rounds)

    real = ops.contest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gsa.bench.timing.TURN", 0.0001)
        patch.setattr(ops, "contest", contest)
        return ops.measure(quick=False, backend="auto", progress=False)


def test_report(report: dict) -> None:
    assert report["sgemm_gflops"] > 0
    assert report["import_seconds"] > 0
    for row in report["rows"]:
        assert row["ms"] > 0
        assert row["us_per_token"] == pytest.approx(1e3 * row["ms"] / row["T"])
        assert (row["sgemm_share"] is None) == row["backward"]
        assert (row["softmax_ms"] is None) != (row["relative"] is None)
        if row["speedup"] is not None:
            assert row["speedup"] == pytest.approx(row["softmax_ms"] / row["ms"])
    shown = printed(ops.speed_table(report))
    assert "fwd+bwd" in shown
    assert "import gsa adds" in shown


def test_json_is_all_that_is_printed(
    report: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(ops, "measure", lambda *args, **options: report)
    capsys.readouterr()
    ops.ops(json=True)
    assert json.loads(capsys.readouterr().out) == report
    ops.ops()
    assert "speed-up" in capsys.readouterr().out


@pytest.mark.slow
def test_quick_measures_less(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    def contest(entries: list[ops.Entry], against: bool, backend: str, rounds: int) -> tuple[list[ops.Row], float]:
        lengths.extend(e.T for e in entries)
        return [ops.Row(e.heads, e.width, e.T, e.backward, e.tau) for e in entries], 1.0

    monkeypatch.setattr(ops, "contest", contest)
    ops.measure(quick=True, backend="auto", progress=False)
    assert set(lengths) == {2048}


def test_bad_threads() -> None:
    with pytest.raises(GSAError, match="threads must be at least 1, got 0"):
        ops.ops(threads=0)


@pytest.mark.skipif(not measurable(), reason="this system does not tell a process's peak memory")
def test_peak_memory_is_at_least_what_cannot_be_avoided() -> None:
    forward = ops.peak_memory(ops.Entry(2, 64, 8192, False), 16, "chunk", 1)
    assert 1.0 <= forward < 6  # at this size the working memory counts for more than the tensors


def test_a_measurement_that_fails_says_why() -> None:
    with pytest.raises(GSAError, match=r"a measurement in a process of its own failed: .*no attribute 'nothing'"):
        measured_alone("gsa.bench.ops:nothing", {})
