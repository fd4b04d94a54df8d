"""`gsa paper mqar`: how many of the pairs that it has read a model recalls, by its state; the paper's figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from gsa.bench.arguments import listed, listed_numbers
from gsa.console import tell
from gsa.errors import GSAError
from gsa.options import check_count
from gsa.paper.cells import Cell, Result, run_cells
from gsa.paper.mqar_report import PAPER, mqar_picture, mqar_tables
from gsa.paper.recall_model import CONVOLVED, SYSTEMS
from gsa.paper.recall_run import SOLVED, RecallRun, run_recall, settings_of
from gsa.paper.record import folder_of, save_record
from gsa.table import show
from gsa.threads import usable_cores

RATES = (3e-3, 1e-2, 3e-2)
"""Of the scaled setting; small models of few steps want larger ones than zoology's."""
FULL_RATES = tuple(10 ** (-4 + 2 * place / 3) for place in range(4))
"""zoology's: four from 1e-4 to 1e-2."""
QUICK = ("xfmr", "gsa", "gla", "linear")
MOST_HEADS, LEAST_HEAD_WIDTH = 4, 8
"""Of systems with slots, whose state heads do not change; others have one head, since more would shrink theirs."""


@dataclass(frozen=True)
class Grid:
    """Which runs there are."""

    base: RecallRun
    systems: tuple[str, ...]
    widths: tuple[int, ...]
    rates: tuple[float, ...]
    seeds: int
    further: tuple[int, ...] = ()
    """Widths at which systems are tried without their convolution as well, and variants."""
    variants: tuple[dict[str, Any], ...] = ()
    """Systems with other slots or heads."""
    gain: float | None = None
    """The standard deviation of fresh weights is this over the root of the width; the base's own without it."""

    def runs(self) -> list[RecallRun]:
        """One for every row of the table, with the first rate and seed."""
        plain = [{"system": system, "width": width} for width in self.widths for system in self.systems]
        bare = [
            {"system": system, "width": width, "convolution": False}
            for width in self.further
            for system in self.systems
            if system not in CONVOLVED
        ]
        varied = [
            {**variant, "width": width}
            for width in self.further
            for variant in self.variants
            if variant["system"] in self.systems
        ]
        return [self._run(row) for row in [*plain, *varied, *bare]]

    def _run(self, row: dict[str, Any]) -> RecallRun:
        heads = min(MOST_HEADS, max(row["width"] // LEAST_HEAD_WIDTH, 1)) if SYSTEMS[row["system"]].slots else 1
        std = self.base.std if self.gain is None else self.gain / row["width"] ** 0.5
        return replace(self.base, **{"heads": heads, "std": std, **row})


SCALED = RecallRun(
    length=48,
    pairs=12,
    easy_pairs=2,
    vocab_size=256,
    examples=16384,
    test_examples=1000,
    batch_size=32,
    epochs=8,
    slots=16,
)
FULL = RecallRun(length=512, pairs=64, batch_size=128, slots=64)
SHORT = replace(SCALED, length=32, pairs=8, vocab_size=128, examples=4096, test_examples=250, epochs=4)
VARIANTS = (
    {"system": "gsa", "slots": 8},
    {"system": "gsa", "slots": 32},
    {"system": "gsa", "heads": 1},
    {"system": "gla", "heads": 4},
)
"""What slots and heads do to recall and to the size of the state."""
SETTINGS = {
    "scaled": Grid(SCALED, tuple(SYSTEMS), (16, 32, 64), RATES, 3, (32,), VARIANTS, gain=0.8),
    "full": Grid(FULL, tuple(SYSTEMS), (64, 128, 256, 512), FULL_RATES, 3),
    "quick": Grid(SHORT, QUICK, (16, 32), (1e-2,), 1, gain=0.8),
}


def mqar(
    *,
    out: str = "paper/mqar",
    full: bool = False,
    quick: bool = False,
    systems: str | None = None,
    widths: str | None = None,
    seeds: int | None = None,
    processes: int | None = None,
    plan: bool = False,
    json: bool = False,
    markdown: bool = False,
) -> None:
    """Trains small models to recall pairs (MQAR), with every mixer, and shows accuracy against the size of their state.

    Two layers without MLPs learn from examples of zoology's task: keys with values, then each key again, where its
    value is asked. All systems get the same examples, steps and learning rates; the best rate is run with further
    seeds. The scaled setting takes about two hours on two cores. Results come cell by cell: the same command goes on
    where it was stopped, and with more systems, widths or seeds it adds what is missing.

    Args:
        out: Folder for results: mqar.json, a picture as SVG and PNG, and a file for every run.
        full: zoology's largest setting, which is the paper's: 512 tokens, 64 pairs, widths from 64 to 512, 100,000
            examples, 64 epochs, best of four rates. The cost is told first; with --plan, nothing else happens.
        quick: A small task, four systems, one rate, one seed: a look in less than three minutes.
        systems: Systems with commas between, or all: xfmr, gsa, raven, abc, gla, hgrn2, retnet, mamba, linear, hybrid.
        widths: Model widths with commas between.
        seeds: Runs of the best rate.
        processes: Runs at a time, each of one thread; as many as cores by default.
        plan: Tell what would be run and how long it takes, and stop.
        json: Print JSON instead of tables.
        markdown: Print the tables as Markdown.
    """
    if full and quick:
        raise GSAError("paper: full and quick exclude each other")
    if json and markdown:
        raise GSAError("paper: json and markdown exclude each other")
    setting = "full" if full else "quick" if quick else "scaled"
    grid = SETTINGS[setting]
    if systems is not None:
        grid = replace(grid, systems=tuple(listed("systems", systems, SYSTEMS, {"all": SYSTEMS}, "paper")))
    if widths is not None:
        chosen = tuple(listed_numbers("widths", widths, least=2, operation="paper"))
        grid = replace(grid, widths=chosen, further=tuple(width for width in grid.further if width in chosen))
    if seeds is not None:
        check_count("paper: seeds", seeds, most=1000)
        grid = replace(grid, seeds=seeds)
    if processes is not None:
        check_count("paper: processes", processes, most=4096)
    workers = processes or usable_cores()
    if plan or full:
        tell(_cost(grid, workers))
    if plan:
        return
    folder = folder_of(out)
    rows = measure(grid, folder / "cells", workers)
    settings = {"setting": setting, **asdict(grid)}
    record = save_record(folder / "mqar.json", "mqar", settings, rows=rows, paper=PAPER)
    mqar_picture(record, folder / "mqar")
    show(record, mqar_tables(record), json=json, markdown=markdown)
    tell(f"{folder}: mqar.json, mqar.svg, mqar.png")


def measure(grid: Grid, folder: Path, processes: int) -> list[dict[str, Any]]:
    """The rows of the table: of every system and width the best rate, and what its seeds came to."""
    runs = grid.runs()
    first = [replace(run, lr=rate) for run in runs for rate in grid.rates]
    swept = _run(first, folder, processes)
    best: list[RecallRun] = []
    for place in range(0, len(first), len(grid.rates)):
        tried = zip(first[place : place + len(grid.rates)], swept[place:], strict=False)
        best.append(max(tried, key=lambda one: _merit(one[1]))[0])
    again = [replace(run, seed=seed) for run in best for seed in range(1, grid.seeds)]
    _run(again, folder, processes)
    return [_row(run, grid, folder, processes) for run in best]


def _merit(result: Result) -> tuple[float, int]:
    """By how much is recalled; of runs that ended because they had solved the task, the one that was there first."""
    return min(result["accuracy"], SOLVED), -len(result["by_epoch"])


def _run(runs: Sequence[RecallRun], folder: Path, processes: int) -> list[Result]:
    cells = [Cell(_name(run), settings_of(run)) for run in runs]
    return run_cells(
        cells, run_recall, folder, processes=processes, say=tell, told=lambda result: f"{result['accuracy']:.1%}"
    )


def _name(run: RecallRun) -> str:
    slots = f", {run.slots} slots" if run.has_slots else ""
    bare = "" if run.convolution else ", no convolution"
    what = f"{SYSTEMS[run.system].label}, width {run.width}, heads {run.heads}{slots}{bare}"
    return f"{what}, rate {run.lr:.2g}, seed {run.seed}"


def _row(run: RecallRun, grid: Grid, folder: Path, processes: int) -> dict[str, Any]:
    """What is known of a system at its best rate; all of it is there already."""
    seeds = _run([replace(run, seed=seed) for seed in range(grid.seeds)], folder, processes)
    rates = _run([replace(run, lr=rate, seed=0) for rate in grid.rates], folder, processes)
    accuracies = [result["accuracy"] for result in seeds]
    return {
        "system": run.system,
        "label": SYSTEMS[run.system].label,
        "width": run.width,
        "heads": run.heads,
        "slots": run.slots if run.has_slots else None,
        "convolution": run.convolution,
        "variant": run.convolution and _is_variant(run, grid),
        "state": seeds[0]["state"],
        "parameters": seeds[0]["parameters"],
        "lr": run.lr,
        "by_rate": {f"{rate:.3g}": result["accuracy"] for rate, result in zip(grid.rates, rates, strict=True)},
        "accuracies": accuracies,
        "accuracy": mean(accuracies),
        "epochs": [len(result["by_epoch"]) for result in seeds],
        "seconds": sum(result["seconds"] for result in [*rates, *seeds[1:]]),
    }


def _is_variant(run: RecallRun, grid: Grid) -> bool:
    usual = grid._run({"system": run.system, "width": run.width})
    return (run.heads, run.slots) != (usual.heads, usual.slots)


def _cost(grid: Grid, processes: int) -> str:
    """What a grid takes on this machine, from steps that are measured now."""
    import time

    runs = grid.runs()
    seconds = 0.0
    tell(f"a few steps of each of {len(runs)} models, to tell what all would take")
    for run in runs:
        few = replace(run, examples=3 * run.batch_size, test_examples=1, epochs=1)
        run_recall(settings_of(replace(few, examples=run.batch_size)))  # what happens once
        began = time.perf_counter()
        run_recall(settings_of(few))
        seconds += (time.perf_counter() - began) / 3 * run.steps * (len(grid.rates) + grid.seeds - 1)
    count = len(runs) * (len(grid.rates) + grid.seeds - 1)
    hours = seconds / processes / 3600
    told = f"{hours / 24:,.0f} days" if hours > 48 else f"{hours:.1f} hours"
    return (
        f"{count} runs of at most {runs[0].steps:,} steps each, {processes} at a time: at most about {told} on this "
        "machine; runs that solve the task end early"
    )
