"""The benchmark on a GPU, every line of it on a CPU: stand-ins play torch.cuda, keep time and count calls."""

import inspect
import json
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gsa.bench import memory, ops
from gsa.bench.gpu import device as gpu_device
from gsa.bench.gpu import ops as gpu_ops
from gsa.bench.gpu import ops_tables
from gsa.bench.timing import gpu_clock, race
from gsa.errors import GSAError
from gsa.ops import SlotState, gated_slot_attention
from tests.cli.running import run
from tests.tables import printed

CPU = torch.device("cpu")


class Event:
    """A mark in a stream whose work is done as soon as it is asked for."""

    def __init__(self, enable_timing: bool = False):
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        assert self.at

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end.at - self.at)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What torch.cuda was asked to do; two GPUs of an imaginary kind."""
    asked = SimpleNamespace(allocated=1000, peak=1000, resets=0, synchronised=0, on=[])
    properties = SimpleNamespace(name="Imaginary 9000", total_memory=80 << 30, multi_processor_count=132)

    def reset() -> None:
        asked.resets += 1
        asked.peak = asked.allocated

    def synchronize() -> None:
        asked.synchronised += 1

    def device(x: torch.device) -> Any:
        asked.on.append(x)
        return nullcontext()

    stand_ins: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 1,
        "get_device_properties": lambda device: properties,
        "device": device,
        "synchronize": synchronize,
        "Event": Event,
        "reset_peak_memory_stats": reset,
        "memory_allocated": lambda: asked.allocated,
        "max_memory_allocated": lambda: asked.peak,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return asked


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """flash-linear-attention's functions, called as it wants them to be, computed by ours; what was called."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that there is no GPU
        import fla.ops.gsa as theirs
    called: list[str] = []

    def stand_in(name: str) -> Callable[..., Any]:
        signature = inspect.signature(getattr(theirs, name))

        def compute(*args: Any, **options: Any) -> Any:
            x = signature.bind(*args, **options)
            assert "kwargs" not in x.arguments  # where it loses what it does not know
            x.apply_defaults()
            a = x.arguments
            called.append(name)
            assert {a[n].dtype for n in "qkvsg"} == {torch.bfloat16}
            initial = None if a["initial_state"] is None else SlotState(*a["initial_state"])
            return gated_slot_attention(
                *(a[n] for n in "qkvgs"),
                scale=a["scale"],
                initial_state=initial,
                output_final_state=a["output_final_state"],
            )

        return compute

    for name in ("chunk_gsa", "fused_recurrent_gsa"):
        monkeypatch.setattr(theirs, name, stand_in(name))
    return called


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsa.bench.timing.TURN", 0.0)
    real = race

    def brief(contenders: dict, seconds: float, clock: Any) -> dict[str, float]:
        return real(contenders, 0.0, 1, clock)

    monkeypatch.setattr("gsa.bench.timing.race", brief)
    for name, value in {
        "BATCHES": ((2, 16), (1, 32)),
        "HEADS": ((1, 128), (2, 64)),
        "MATMUL": 8,
        "COPIED": 64,
        "STEPS": 2,
        "DECODED": (1, 3),
        "CACHED": 5,
    }.items():
        monkeypatch.setattr(gpu_ops, name, value)


def test_a_clock_that_waits_for_the_gpu(cuda: SimpleNamespace) -> None:
    assert 0.01 <= gpu_clock(lambda: time.sleep(0.01)) < 1
    assert cuda.synchronised == 1


def test_the_clock_is_what_race_goes_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsa.bench.timing.TURN", 0.0)
    readings = iter([5.0, 1.0, 3.0, 2.0])

    def clock(f: Callable[[], object]) -> float:
        f()
        return next(readings)

    assert race({"a": lambda: 0, "b": lambda: 0}, 0.0, 2, clock) == {"a": 3.0, "b": 1.0}


def test_peak_memory_is_what_a_call_takes(cuda: SimpleNamespace) -> None:
    def call() -> None:
        assert cuda.resets == 1
        cuda.peak = cuda.allocated + 640

    assert memory.gpu_peak(call) == 640
    assert cuda.synchronised == 2


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("quick", [False, True])
def test_report(cuda: SimpleNamespace, fla: list[str], quick: bool) -> None:
    ticks: list[str] = []
    report = gpu_ops.measure(CPU, quick, "auto", ticks.append)
    sizes = [(row["heads"], row["width"], row["B"], row["T"], row["backward"]) for row in report["rows"]]
    expected = [(1, 128, 2, 16)] if quick else [(1, 128, 2, 16), (1, 128, 1, 32), (2, 64, 2, 16), (2, 64, 1, 32)]
    assert sizes == [(*size, backward) for size in expected for backward in (False, True)]
    assert [row["B"] for row in report["decode"]] == ([1] if quick else [1, 3])
    assert len(ticks) == len(sizes) + len(report["decode"])
    assert cuda.on == [CPU]
    assert cuda.resets == 3 * len(sizes)
    for row in report["rows"]:
        assert min(row["ms"], row["softmax_ms"], row["fla_ms"]) > 0
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["B"] * row["T"] / row["ms"])
        assert (row["matmul_share"] is None) == row["backward"]
        assert row["mib"] == row["softmax_mib"] == row["fla_mib"] == 0
    for row in report["decode"]:
        assert min(row["us"], row["softmax_us"], row["fla_us"], row["copy_share"]) > 0
    assert report["gpu"] == "Imaginary 9000"
    assert report["notes"] == []
    assert set(fla) == {"chunk_gsa", "fused_recurrent_gsa"}
    assert json.loads(json.dumps(report)) == report
    printed(*ops_tables.tables(report))


@pytest.mark.usefixtures("small", "cuda")
def test_tables(fla: list[str]) -> None:
    report = gpu_ops.measure(CPU, True, "auto", lambda what: None)
    shown = printed(*ops_tables.tables(report | {"notes": ["fla, [here]: no"]}), width=120)  # for any times
    assert "2x16" in shown
    assert "fwd+bwd" in shown
    assert "Imaginary 9000 (132 processors, 80 GiB)" in shown
    assert "left out: fla, [here]: no" in shown
    shown = printed(*ops_tables.tables(report | {"fla": None, "hip": "7.0"}))
    assert "HIP 7.0" in shown
    assert "flash-linear-attention is not installed" in shown


@pytest.mark.usefixtures("small", "cuda")
def test_without_flash_linear_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_device.installed("no-such-package") is None
    monkeypatch.setattr(gpu_device, "installed", lambda package: None)
    assert gpu_device.fla_functions() is None
    report = gpu_ops.measure(CPU, True, "auto", lambda what: None)
    assert {row["fla_ms"] for row in report["rows"]} == {None}
    assert {row["fla_us"] for row in report["decode"]} == {None}
    printed(*ops_tables.tables(report))


@pytest.mark.usefixtures("small", "cuda")
def test_a_rival_that_fails_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch, fla: list[str]) -> None:
    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("no such instruction\nand much more")

    monkeypatch.setattr("fla.ops.gsa.chunk_gsa", broken)
    report = gpu_ops.measure(CPU, True, "auto", lambda what: None)
    assert report["rows"][0]["fla_ms"] is None
    assert report["rows"][0]["fla_mib"] is None
    assert report["decode"][0]["fla_us"] > 0
    assert report["notes"][0] == "fla, 2 x 16, forward: RuntimeError: no such instruction"
    printed(*ops_tables.tables(report))


@pytest.mark.usefixtures("cuda")
def test_ours_may_lack_memory_and_nothing_else() -> None:
    def full() -> None:
        raise torch.OutOfMemoryError

    notes: list[str] = []
    assert list(gpu_ops.runnable({"slots": full, "softmax": lambda: None}, "1 x 2", notes)) == ["softmax"]
    assert notes == ["slots, 1 x 2: out of memory"]

    def broken() -> None:
        raise RuntimeError("wrong")

    with pytest.raises(RuntimeError, match="wrong"):
        gpu_ops.runnable({"slots": broken}, "1 x 2", notes)


@pytest.mark.usefixtures("small", "cuda")
def test_a_row_of_what_lacked_memory(monkeypatch: pytest.MonkeyPatch, fla: list[str]) -> None:
    """The row is there, and empty."""
    monkeypatch.setattr(gpu_ops, "runnable", lambda contenders, where, notes: {"softmax": contenders["softmax"]})
    report = gpu_ops.measure(CPU, True, "auto", lambda what: None)
    assert report["rows"][0]["ms"] is report["rows"][0]["tokens_per_second"] is report["decode"][0]["us"] is None
    printed(*ops_tables.tables(report))


def test_which_gpu(cuda: SimpleNamespace) -> None:
    assert gpu_device.find_gpu("cuda") == torch.device("cuda:1")
    assert gpu_device.find_gpu("cuda:0") == torch.device("cuda:0")
    with pytest.raises(GSAError, match="--device cuda:2: there are 2 GPUs, counted from 0"):
        gpu_device.find_gpu("cuda:2")


@pytest.mark.parametrize("name", ["meta", "gpu", "cuda:first"])
def test_devices_it_cannot_measure(name: str) -> None:
    with pytest.raises(GSAError, match=f"--device must be cpu, cuda or cuda:N, got '{name}'"):
        ops.ops(device=name)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = run(capsys, "bench", "ops", "--device", "cuda")
    assert code == 2
    assert "bench: --device cuda: no NVIDIA or AMD GPU was found" in err


@pytest.mark.usefixtures("small", "cuda")
def test_the_command(monkeypatch: pytest.MonkeyPatch, fla: list[str], capsys: pytest.CaptureFixture) -> None:
    """With JSON, nothing else is printed."""
    monkeypatch.setattr(gpu_device, "find_gpu", lambda name: {"cuda:1": CPU}[name])
    ops.ops(quick=True, device="cuda:1", json=True)
    assert json.loads(capsys.readouterr().out)["gpu"] == "Imaginary 9000"
    ops.ops(quick=True, device="cuda:1")
    assert "One token of each sequence" in capsys.readouterr().out
