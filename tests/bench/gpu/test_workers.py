"""Processes that work: all results come, whoever dies; and nothing is left running."""

import os
import time
from functools import partial
from pathlib import Path

import pytest

from gsa.bench.gpu.workers import WorkerDied, results

from . import worker_cases


def test_all_results_come_with_their_places() -> None:
    assert dict(results([partial(worker_cases.square, x) for x in range(9)], 2)) == {x: x * x for x in range(9)}
    assert list(results([], 2)) == []


def test_errors_and_deaths_stay_where_they_happen() -> None:
    tasks = [
        partial(worker_cases.square, 3),
        worker_cases.crash,
        partial(worker_cases.fail, "why"),
        partial(worker_cases.leave, 3),
        partial(worker_cases.square, 5),
    ]
    found = dict(results(tasks, 1))
    assert (found[0], found[4]) == (9, 25)
    assert isinstance(found[1], WorkerDied)
    assert "SIGSEGV" in str(found[1])
    assert str(found[2]) == "KeyError: 'why'"
    assert "exit code 3" in str(found[3])


def test_kernels_are_compiled_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dict(results([worker_cases.interpreted], 1)) == {0: False}


def test_whoever_is_left_is_ended(tmp_path: Path) -> None:
    note = tmp_path / "note"
    tasks = [partial(worker_cases.square, 2), partial(worker_cases.wait_with_a_child, str(note))]
    found = results(tasks, 2)
    assert next(found) == (0, 4)
    for _ in range(600):
        if note.exists():
            break
        time.sleep(0.05)
    processes = [int(x) for x in note.read_text().split()]
    assert all(_runs(x) for x in processes)
    found.close()
    for _ in range(100):
        if not any(_runs(x) for x in processes):
            break
        time.sleep(0.05)
    assert not any(_runs(x) for x in processes)


def _runs(process: int) -> bool:
    """Whether it does; one that has ended and that nobody has asked for does not."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
