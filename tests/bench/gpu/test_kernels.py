"""`gsa kernels` compiles the GPU kernels where there is no GPU, and fails if one is at fault."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from gsa.extras import how_to_install
from gsa.ops.triton.launch import TARGETS
from tests.cli.running import run
from tests.ops import ahead_cases


@pytest.mark.slow
def test_quick(capsys: pytest.CaptureFixture) -> None:
    """At the paper's sizes nothing spills, all fits, and what multiplies matrices has the instructions for it."""
    code, out, err = run(capsys, "kernels", "--quick", "--json")
    report = json.loads(out)
    assert report["faults"] == []
    assert (code, err) == (0, "")
    operations = {use.split(",")[0] for row in report["rows"] for use in row["uses"]}
    assert operations == {"gsa forward", "gsa backward", "gla", "step"}
    for row in report["rows"]:
        figures = row["figures"]
        assert (row["of"], row["target"], row["dtype"], row["width"], row["slots"]) == ("gsa", "sm_90", "bf16", 512, 64)
        assert figures["spilled_bytes"] == 0
        assert figures["shared_bytes"] <= 227 << 10
        assert bool(figures["dots"]) == bool(figures["matrix_instructions"])
        assert 0 < figures["registers"] <= 255
        assert figures["code_bytes"] > 0
    assert any(row["figures"]["dots"] for row in report["rows"])


def test_faults_are_the_end(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels that go wrong, each in its way, in place of the engine's."""
    names = ("good", "spills", "too large", "fma", "broken")
    monkeypatch.setattr("gsa.bench.gpu.launches.sources", partial(ahead_cases.listed, names))
    code, out, err = run(capsys, "kernels", "--quick", "--jobs", "1")
    assert code == 2
    assert "Kernels of gsa for sm_90, bf16" in out
    assert "wgmma" in out
    size = "sm_90, bf16, width 512, 64 slots"
    told = [line for line in out.splitlines() if size in line]
    for beginning in (
        f"multiply for spills, {size}: spills ",
        f"multiply for too large, {size}: needs 262144 bytes of shared memory, sm_90 has 232448",
        f"multiply for fma, {size}: 1 of 1 matrix products without matrix instructions",
        f"broken for broken, {size}: does not compile: CompilationError: at 2:4: ... Cannot make_shape_compatible: ",
    ):
        assert any(line.startswith(beginning) for line in told), beginning
    assert len(told) == 4
    assert err == f"gsa: kernels: 4 found at fault, the first: {told[0]}\n"


def test_without_faults_all_is_well(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsa.bench.gpu.launches.sources", partial(ahead_cases.listed, ("good", "no product")))
    code, out, err = run(capsys, "kernels", "--quick", "--jobs", "1", "--target", "gfx942")
    assert (code, err) == (0, "")
    assert "v_mfma" in out


def test_without_triton(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert run(capsys, "kernels") == (2, "", f"gsa: kernels: compiling needs Triton: {how_to_install('gpu')}\n")


@pytest.mark.parametrize("option", ["width", "slots", "jobs"])
def test_numbers_that_cannot_be(capsys: pytest.CaptureFixture, option: str) -> None:
    code, _, err = run(capsys, "kernels", f"--{option}", "0")
    assert (code, err) == (2, f"gsa: kernels: {option} must be at least 1, got 0\n")


@pytest.mark.slow
def test_ctrl_c_ends_it_and_all_it_has_started() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "gsa", "kernels", "--jobs", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        workers: list[int] = []
        while not any(os.getpgid(worker) == worker for worker in workers):  # it leads a group when it works
            assert process.poll() is None
            time.sleep(0.1)
            workers = _children(process.pid)
        time.sleep(1)
        workers = _children(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    assert err.endswith("gsa: stopped\n")
    assert "Traceback" not in err
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _children(process: int) -> list[int]:
    return [int(x) for x in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_beside_flash_linear_attention(capsys: pytest.CaptureFixture, target: str) -> None:
    code, out, _ = run(capsys, "kernels", "--quick", "--target", target, "--fla", "--json")
    report = json.loads(out)
    assert (code, report["faults"]) == (0, [])
    theirs = [row for row in report["rows"] if row["of"] == "fla"]
    assert len(theirs) > 15
    assert all(row["tried"] >= 1 and row["figures"]["target"] == target for row in theirs)
    code, out, _ = run(capsys, "kernels", "--quick", "--target", target, "--fla")
    assert code == 0
    assert "Gated slot attention, forward and backward" in out
    assert "chunk_gsa_fwd_kernel_inter" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sizes"),
    [(("--width", "512", "--slots", "64"), 9), (("--target", "sm_80", "--dtype", "fp16"), 12)],
    ids=["every target and dtype", "every size"],
)
def test_a_cross_section(capsys: pytest.CaptureFixture, options: tuple[str, ...], sizes: int) -> None:
    """Every target and dtype at the paper's size, and every size where it is tightest; `gsa kernels` has all 108."""
    code, out, _ = run(capsys, "kernels", *options, "--json")
    report = json.loads(out)
    assert (code, report["faults"]) == (0, [])
    found = {use.split(", ", 1)[1] for row in report["rows"] for use in row["uses"] if use.startswith("gsa forward")}
    assert len(found) == sizes
