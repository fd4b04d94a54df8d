"""Out of memory is one kind of error, whoever notices: Python, numpy, torch, the native engine, a worker process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import gsa
from gsa import GSAError, cli
from gsa.data.worker import _tried
from gsa.errors import OutOfMemory, memory_errors, raised_by
from gsa.ops import gated_slot_attention, use_backend
from gsa.ops.native import library
from gsa.train.loop import Trainer
from gsa.train.run import train
from tests.train.runs import prepared, run_settings

TOO_MUCH = 2**50  # bytes


def gpu_is_full() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has")


def gpu_is_full_in_silence() -> None:
    raise torch.OutOfMemoryError


def driver_is_full() -> None:
    raise RuntimeError("CUDA error: out of memory")


def python_is_full() -> None:
    raise MemoryError


FULL: dict[Callable[[], object], str] = {
    lambda: torch.empty(TOO_MUCH, dtype=torch.uint8): rf"you tried to allocate {TOO_MUCH} bytes",
    lambda: np.empty(TOO_MUCH, np.uint8): "Unable to allocate 1.00 PiB",
    gpu_is_full: r"CUDA out of memory. Tried to allocate 20.00 GiB.$",
    gpu_is_full_in_silence: "it cannot be had",
    driver_is_full: "out of memory",
    python_is_full: "it cannot be had",
}


@pytest.mark.parametrize("around", [raised_by, memory_errors])
@pytest.mark.parametrize("full", FULL)
def test_want_of_memory_is_one_error(full: Callable[[], object], around: Callable[[str], object]) -> None:
    with pytest.raises(OutOfMemory, match=f"^fill: not enough memory: .*{FULL[full]}") as raised, around("fill"):
        full()
    assert isinstance(raised.value, GSAError)
    assert isinstance(raised.value, MemoryError)


@pytest.mark.parametrize("around", [raised_by, memory_errors])
def test_other_errors_stay_what_they_are(around: Callable[[str], object]) -> None:
    with pytest.raises(RuntimeError, match=r"^wrong shapes$") as raised, around("fill"):
        raise RuntimeError("wrong shapes")
    assert not isinstance(raised.value, MemoryError)


def test_the_operation_that_knows_more_is_not_overruled() -> None:
    with pytest.raises(OutOfMemory, match=r"^fill: not enough memory: "), memory_errors("train"), memory_errors("fill"):
        python_is_full()
    with pytest.raises(OutOfMemory, match=r"^operator: pool: full$"), raised_by("operator"):
        raise OutOfMemory("pool: full")


@pytest.mark.skipif(library.unavailable(None) is not None, reason="the native engine cannot run here")
def test_an_operator_says_that_it_lacks_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr("gsa.ops.native.results.LARGE", 1)
    monkeypatch.setattr("gsa.ops.native.results.mmap.mmap", full)
    x = torch.zeros(1, 63, 1, 37)
    with use_backend("native"), pytest.raises(OutOfMemory, match=r"^gated_slot_attention: no memory for a result of"):
        gated_slot_attention(x, x, x, x)


def test_an_engine_of_generation_says_that_it_lacks_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = gsa.Engine("gsa-tiny", batch_size=1)

    def full(*args: object, **options: object) -> None:
        python_is_full()

    monkeypatch.setattr(engine._scheduler, "_admit", full)
    with pytest.raises(OutOfMemory, match=r"^engine: not enough memory: "):
        engine.generate([1, 2, 3])


def test_training_says_what_needs_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(tmp_path)
    monkeypatch.setattr(Trainer, "_step", lambda self, *args: gpu_is_full())
    with pytest.raises(OutOfMemory, match=r"^train: not enough memory: CUDA out of memory.* smaller micro-batches"):
        train(run_settings(tmp_path))


def test_a_worker_says_that_it_lacks_memory() -> None:
    failure = _tried(python_is_full)
    assert (failure.kind, failure.message) == (OutOfMemory, "data: not enough memory: it cannot be had")


def test_the_command_ends_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "run", lambda args: gpu_is_full())
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "gsa: command: not enough memory: CUDA out of memory. Tried to allocate 20.00 GiB.\n"
    )
