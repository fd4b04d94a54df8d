"""Cells of a grid: runs that do not depend on each other, in several processes of one thread each, or, where time is
what is measured, one after the other in this process.

Each cell's result is a file of its own as soon as it is there. The same command goes on with the cells that are
missing.
"""

from __future__ import annotations

import hashlib
import json
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from gsa.errors import GSAError
from gsa.files import read_json, written
from gsa.locks import locked

Result = dict[str, Any]
Compute = Callable[[dict[str, Any]], Result]
"""A function at the top of a module, so that another process finds it; what it takes and gives can be JSON."""


@dataclass(frozen=True)
class Cell:
    """One run: what it is called where people read, and all that decides its result."""

    name: str
    settings: dict[str, Any]

    @property
    def file(self) -> str:
        """Of its result. Cells with other settings have other files."""
        text = json.dumps(self.settings, sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def run_cells(
    cells: Sequence[Cell],
    compute: Compute,
    folder: Path,
    *,
    processes: int,
    say: Callable[[str], None],
    told: Callable[[Result], str] = lambda result: "",
) -> list[Result]:
    """The results of all cells, in their order. `told` puts a result into a few words for the line that reports it.

    A result has its `seconds` and its `settings` with it. Ctrl-C loses the cells that were being computed, no others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, "paper"):
        found: dict[str, Result] = {}
        for cell in cells:
            known = _read(folder / cell.file, cell)
            if known is not None:
                found[cell.file] = known
        missing = [cell for cell in dict.fromkeys(cell.file for cell in cells) if cell not in found]
        by_file = {cell.file: cell for cell in cells}
        if found and missing:
            say(f"{len(found)} of {len(by_file)} are there already")
        if missing:
            _compute([by_file[file] for file in missing], compute, folder, processes, say, told, found)
    return [found[cell.file] for cell in cells]


def kept(cell: Cell, compute: Compute, folder: Path) -> Result:
    """The result of one cell that has the machine and all threads of this process to itself."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, "paper"):
        result = _read(folder / cell.file, cell)
        if result is None:
            result = _timed(compute, cell.settings)
            _write(folder / cell.file, result)
    return result


def _compute(
    cells: Sequence[Cell],
    compute: Compute,
    folder: Path,
    processes: int,
    say: Callable[[str], None],
    told: Callable[[Result], str],
    found: dict[str, Result],
) -> None:
    """Computes cells, and adds their results to `found`."""
    began = time.monotonic()
    # Fresh processes: threads that run here, and memory, stay here.
    pool = ProcessPoolExecutor(min(processes, len(cells)), get_context("spawn"), _begin)
    try:
        futures: dict[Future[Result], Cell] = {pool.submit(_timed, compute, cell.settings): cell for cell in cells}
        for number, future in enumerate(as_completed(futures), 1):
            cell = futures[future]
            try:
                result = future.result()
            except BrokenProcessPool:
                raise GSAError(
                    f"paper: the process that computed {cell.name} or one beside it was killed; is there enough "
                    "memory? The same command goes on with what is missing"
                ) from None
            _write(folder / cell.file, result)
            found[cell.file] = result
            left = (time.monotonic() - began) / number * (len(cells) - number)
            words = told(result)
            say(
                f"[{number}/{len(cells)}] {cell.name}: {words}{', ' if words else ''}{result['seconds']:.0f} s"
                + (f"; about {_duration(left)} left" if number < len(cells) else "")
            )
    except BaseException:
        for process in list(getattr(pool, "_processes", {}).values()):
            with suppress(OSError):
                process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin() -> None:
    """One thread, and Ctrl-C is the parent's business."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _timed(compute: Compute, settings: dict[str, Any]) -> Result:
    began = time.perf_counter()
    result = compute(settings)
    return {**result, "settings": settings, "seconds": round(time.perf_counter() - began, 1)}


def _write(path: Path, result: Result) -> None:
    with written(path) as place:
        place.write_text(json.dumps(result, indent=1) + "\n")


def _read(path: Path, cell: Cell) -> Result | None:
    """A result that is there already. One that cannot be read, or is of other settings, is computed anew."""
    try:
        result = read_json(path)
    except GSAError:
        return None
    return result if result.get("settings") == cell.settings and "seconds" in result else None


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
