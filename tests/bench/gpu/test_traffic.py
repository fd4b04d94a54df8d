"""Bytes of the GPU kernels: counted on short sequences, extrapolated to full ones, and documented truly."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gsa.bench.gpu import traffic
from gsa.bench.gpu.counting import Work
from gsa.bench.gpu.roofline import MACHINES, Machine, extrapolated, model
from gsa.bench.gpu.traffic_tables import (
    BEGIN,
    END,
    kernel_table,
    model_table,
    tables,
    traffic_table,
    written_into,
)
from gsa.errors import GSAError
from gsa.ops.triton.launch import TARGETS
from tests.cli.running import run
from tests.tables import printed

PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"
H800 = MACHINES[0]
COUNTED: dict[Any, Any] = {}  # of narrow heads, by one test for the others


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small heads, which the interpreter is soon done with."""
    monkeypatch.setattr(traffic, "WIDTH", 32)
    monkeypatch.setattr(traffic, "SLOTS", 16)
    monkeypatch.setattr(traffic, "_counts_so_far", COUNTED)


@pytest.mark.parametrize(("segments", "chunks"), [(1, 3), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_longer_sequences_do_what_shorter_ones_foretell(narrow: None, segments: int, chunks: int) -> None:
    known = ((1, 1), (1, 2)) if segments == 1 else ((2, 1), (3, 1), (2, 2))
    counts = {at: traffic._counted(TARGETS["sm_90"], *at) for at in (*known, (segments, chunks))}
    for part in ("forward", "backward"):
        works = {at: getattr(count, part) for at, count in counts.items()}
        assert extrapolated(works, segments, chunks, heads=1) == works[segments, chunks]


@pytest.mark.parametrize("T", [512, pytest.param(2048, marks=pytest.mark.slow)])
def test_counts_are_those_of_the_launch_table(narrow: None, monkeypatch: pytest.MonkeyPatch, T: int) -> None:
    found = traffic.count_ours(TARGETS["sm_90"], 2, T)  # compares names and grids of all kernels
    tokens = 2 * T * traffic.HEADS
    inputs = tokens * (3 * 32 * 2 + 16 * 4)
    assert sum(work.read_once for work in found.forward) >= inputs
    assert sum(work.written_once for work in found.forward) >= tokens * 32 * 2
    assert found.saved.inputs == inputs
    assert found.saved.extra >= tokens * 16 * 4  # the slot scores
    launched, saved = traffic._launched(TARGETS["sm_90"], 2, T)
    monkeypatch.setattr(traffic, "_launched", lambda *_: (launched[:-1], saved))
    with pytest.raises(AssertionError, match="the launch table says otherwise"):
        traffic.count_ours(TARGETS["sm_90"], 2, T)


def test_other_kernels_are_not_extrapolated() -> None:
    with pytest.raises(AssertionError, match="a longer sequence has other kernels"):
        extrapolated({(1, 1): [Work("a")], (1, 2): [Work("b")]}, 1, 5, heads=1)
    with pytest.raises(AssertionError, match="not a count"):
        extrapolated({(1, 1): [Work("a", read=4)], (1, 2): [Work("a", read=3)]}, 1, 9, heads=1)


MACHINE = Machine("toy", "sm_90", bandwidth=100.0, matrix={"bf16": 1000.0, "tf32": 500.0}, arithmetic=50.0)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (Work("memory", 132, read_once=150, written_once=50), 2.0),
        (Work("products", 132, read_once=100, products={"bf16": 2000, "tf32": 500}), 3.0),
        (Work("arithmetic", 132, read_once=100, flops=200), 4.0),
        (Work("half the processors", 66, read_once=100, flops=200), 8.0),
        (Work("many programs", 1320, read_once=100, flops=200), 4.0),
        (Work("torch", 0, read_once=100), 1.0),
    ],
)
def test_a_kernel_waits_for_the_slowest(work: Work, seconds: float) -> None:
    found = model([work], MACHINE)
    assert found.seconds == pytest.approx(seconds)
    assert found.bandwidth_share == pytest.approx((work.read_once + work.written_once) / 100 / seconds)
    assert found.matrix_share == pytest.approx(sum(work.products.values()) / 1000 / seconds)


def test_kernels_come_one_after_another() -> None:
    works = [Work("a", 132, read=800, read_once=100), Work("b", 132, read=100, read_once=100, flops=150)]
    found = model(works, MACHINE)
    assert found.seconds == pytest.approx(1 + 3)
    assert found.seconds_uncached == pytest.approx(8 + 3)
    assert (found.asked, found.once) == (900, 200)


def made_up(reads: int) -> dict[str, Any]:
    work = Work("kernel", 264, reads, 64, reads, 64, {"bf16": 10**6}, 10, 10)
    part = [asdict(work), asdict(Work("torch.add", 0, 8, 8, 8, 8))]
    return {"8 x 2048": {"forward": part, "backward": part, "saved": {"inputs": 65536, "extra": 131072}}}


@pytest.fixture
def report() -> dict[str, Any]:
    return traffic.report_of({("ours", "sm_90"): made_up(10**9), ("fla", "sm_90"): made_up(2 * 10**9)})


def test_tables(report: dict[str, Any]) -> None:
    (machine,) = report["machines"].values()
    assert machine["processors"] == 132
    for table in tables(report):
        assert all(len(row) == len(table.columns) for row in table.rows)
    assert "H800, 8 x 2048" in printed(*tables(report))
    (row,) = kernel_table(report, "ours", "forward").rows  # and none for what comes to nothing per token
    assert row == ["kernel", "2.0", "15,259", "0", "15,259", "0.0", "0.0"]


def test_the_document_keeps_what_is_around_its_tables() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter"
    once = written_into(text, ["new", "newer"])
    assert once == f"before\n{BEGIN}\n\nnew\n\nnewer\n\n{END}\nafter"
    assert written_into(once, ["new", "newer"]) == once
    with pytest.raises(GSAError, match="the document needs the lines"):
        written_into("no marks", [])


def test_command(
    report: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(traffic, "measure", lambda **_: report)
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    code, out, _ = run(capsys, "bench", "traffic", "--json", "--page", page)
    assert (code, json.loads(out)) == (0, report)
    assert "**Bytes moved per token and head" in page.read_text()
    code, out, _ = run(capsys, "bench", "traffic")
    assert code == 0
    assert "Bytes moved per token" in out
    code, _, err = run(capsys, "bench", "traffic", "--page", tmp_path / "missing.md")
    assert code == 2
    assert "there is no document" in err


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(GSAError, match="counting needs Triton"):
        traffic.measure(progress=False)


def documented(label: str, place: int = 0) -> list[str]:
    """The cells of a row of the page that begins so; of several, the one at this place."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in lines[place].strip("|").split("|")]


def numbers(cell: str) -> list[float]:
    """Those of `12,929 (29,961)`."""
    return [float(number.strip("(),").replace(",", "")) for number in cell.split()]


def test_the_page_says_what_the_forward_kernels_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first size on the first machine; the rest takes minutes."""
    monkeypatch.setattr(traffic, "_backward", lambda *_: None)
    monkeypatch.setattr(traffic, "_counts_so_far", {})
    found = asdict(traffic.count_ours(TARGETS[H800.target], *traffic.SIZES[0]))
    report = traffic.report_of({("ours", H800.target): {traffic.size_name(*traffic.SIZES[0]): found}})
    assert kernel_table(report, "ours", "forward").markdown() in PAGE.read_text()
    (moved,), (expected,) = traffic_table(report).rows, model_table(report, "forward").rows
    assert documented(moved[0])[1] == moved[1]
    assert documented(expected[0]) == expected


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize("size", traffic.SIZES, ids=lambda size: traffic.size_name(*size))
def test_the_page_says_what_is_saved(machine: Machine, size: tuple[int, int]) -> None:
    _, saved = traffic._launched(TARGETS[machine.target], *size)
    per = size[0] * size[1] * traffic.HEADS
    cells = documented(f"{machine.name}, {traffic.size_name(*size)}", 1)
    assert [numbers(cells[1]), numbers(cells[3])] == [[saved.inputs / per], [saved.extra / per]]


def test_the_page_lists_the_kernels_that_are_launched() -> None:
    launched, _ = traffic._launched(TARGETS[H800.target], *traffic.SIZES[0])
    expected = [f"| {x.kernel.__name__} | {x.programs / H800.processors:,.1f} |" for x in launched]
    lines = PAGE.read_text().splitlines()
    begin, end = (next(i for i, line in enumerate(lines) if f"kernel, {name}," in line) for name in ("ours", "FLA"))
    rows = [
        line
        for line in lines[begin:end]
        if line.startswith("| ") and not line.startswith(("|  |", "| ---", "| torch."))
    ]
    assert [" ".join(row.split()[:5]) for row in rows] == expected


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize("size", traffic.SIZES, ids=lambda size: traffic.size_name(*size))
def test_less_is_moved_and_saved_than_by_flash_linear_attention(machine: Machine, size: tuple[int, int]) -> None:
    """By what the page says, which the other tests compare with the kernels."""
    label = f"{machine.name}, {traffic.size_name(*size)}"
    _, forward, fla_forward, both, fla_both = documented(label)
    for ours, theirs in ((forward, fla_forward), (both, fla_both)):
        assert all(a < b for a, b in zip(numbers(ours), numbers(theirs), strict=True)), (ours, theirs)
    *_, ours, theirs = documented(label, 1)
    assert numbers(ours) < numbers(theirs)


@pytest.mark.slow
def test_the_whole_page_is_true() -> None:
    report = traffic.measure(progress=False)
    text = PAGE.read_text()
    assert written_into(text, [table.markdown() for table in tables(report)]) == text
