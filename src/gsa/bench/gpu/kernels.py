"""`gsa kernels`: what compilers make of the GPU kernels, for GPUs that need not be here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from gsa.bench.arguments import prepare
from gsa.bench.gpu.workers import results
from gsa.errors import GSAError
from gsa.extras import require
from gsa.table import show
from gsa.threads import usable_cores

if TYPE_CHECKING:
    from gsa.bench.gpu.launches import Case
    from gsa.ops.triton.ahead_of_time import Figures, Source

WIDTHS = (64, 128, 256, 512)
SLOTS = (32, 64, 128)
PAPER_SIZE = (512, 64)
"""Width and slots of a head of the paper's models of 1.3B and 2.7B parameters."""


def kernels(
    quick: bool = False,
    target: Literal["all", "sm_80", "sm_90", "gfx942"] = "all",
    dtype: Literal["all", "bf16", "fp16", "fp32"] = "all",
    width: int | None = None,
    slots: int | None = None,
    fla: bool = False,
    jobs: int | None = None,
    json: bool = False,
    markdown: bool = False,
) -> None:
    """Compiles every GPU kernel ahead of time, with no GPU present, and checks what comes out.

    Of each: registers, bytes spilled for want of them, shared memory, matrix instructions and size of code. Ends with
    an error if one spills, needs more shared memory than there is, or multiplies matrices without matrix instructions.

    Args:
        quick: Only bf16 at the paper's sizes for sm_90, unless asked otherwise, and only as layers train and decode.
        target: The GPU: A100 (sm_80), H100 and H800 (sm_90), MI300 (gfx942), or all of them.
        dtype: Of what attends, or all.
        width: Of keys and values of a head; 64, 128, 256 and 512 by default.
        slots: Of a head; 32, 64 and 128 by default.
        fla: Also flash-linear-attention's kernels for the same, as installed, beside ours.
        jobs: How many to compile at a time; as many as there are cores by default.
        json: Print JSON with all figures instead of tables.
        markdown: Print the tables as Markdown.
    """
    from gsa.bench.gpu.kernel_tables import tables
    from gsa.bench.gpu.launches import DTYPES, Case
    from gsa.ops.triton.launch import TARGETS

    require("triton", "kernels: compiling")
    prepare("kernels", json=json, markdown=markdown, width=width, slots=slots, jobs=jobs)
    if fla:
        from gsa.bench.gpu.fla_kernels import require_fla

        require_fla()
    names = ["sm_90"] if quick and target == "all" else [x for x in TARGETS if target in ("all", x)]
    dtypes = ["bf16"] if quick and dtype == "all" else [x for x in DTYPES if dtype in ("all", x)]
    widths = [width] if width is not None else [PAPER_SIZE[0]] if quick else WIDTHS
    counts = [slots] if slots is not None else [PAPER_SIZE[1]] if quick else SLOTS
    cases = [
        Case(TARGETS[name], kind, side, count, thorough=not quick and (side, count) == PAPER_SIZE)
        for name in names
        for kind in dtypes
        for side in widths
        for count in counts
    ]
    report = measure(cases, fla, jobs or usable_cores())
    show(report, tables(report), json=json, markdown=markdown)
    faults = report["faults"]
    if faults:
        raise GSAError(f"kernels: {len(faults)} found at fault, the first: {faults[0]}")


@dataclass(frozen=True)
class Row:
    """What was found out about one kernel with its settings."""

    of: str
    """gsa, or fla: flash-linear-attention."""
    kernel: str
    target: str
    dtype: str
    width: int
    slots: int
    """Sizes for which it was compiled; the first of those in `uses`."""
    uses: list[str]
    """Operations and sizes that launch it."""
    tried: int
    """Settings that were compiled: flash-linear-attention leaves the choice to the GPU."""
    figures: Figures | None
    """None if it does not compile."""
    faults: list[str]


def measure(cases: list[Case], fla: bool, jobs: int) -> dict[str, Any]:
    """All figures of the command."""
    from importlib.metadata import version

    from rich.console import Console

    with Console(stderr=True).status("listing the kernels") as status:
        rows = _ours(cases, jobs, status.update)
        if fla:
            for target in dict.fromkeys(case.target for case in cases):
                rows += _theirs([case for case in cases if case.target == target], jobs, status.update)
    order = ("target", "dtype", "width", "slots", "kernel")
    rows.sort(key=lambda row: (row.of != "gsa", [getattr(row, name) for name in order]))
    versions = {"triton": version("triton")} | ({"fla-core": version("fla-core")} if fla else {})
    faults = [fault for row in rows if row.of == "gsa" for fault in row.faults]
    return {"versions": versions, "rows": [asdict(row) for row in rows], "faults": faults}


def _ours(cases: list[Case], jobs: int, tell: Callable[[str], None]) -> list[Row]:
    from gsa.bench.gpu.launches import sources
    from gsa.ops.triton.ahead_of_time import compiled

    uses: dict[Source, list[tuple[str, Case]]] = {}
    for case, found in zip(cases, _all_results([partial(sources, case) for case in cases], jobs), strict=True):
        for operation, source in found:
            uses.setdefault(source, []).append((operation, case))
    ours, rows = list(uses), []
    with closing(results([partial(compiled, source) for source in ours], jobs)) as found_out:
        for place, result in found_out:
            rows.append(_row("gsa", ours[place], uses[ours[place]], result, 1))
            tell(f"{len(rows)} of {len(ours)} compiled, the last: {ours[place].name} for {uses[ours[place]][0][1]}")
    return rows


def _theirs(cases: list[Case], jobs: int, tell: Callable[[str], None]) -> list[Row]:
    """For cases of one target, since a process shows the package one."""
    from gsa.bench.gpu import fla_kernels

    uses: dict[tuple[Source, ...], list[tuple[str, Case]]] = {}
    listed = _all_results([partial(fla_kernels.sources, case) for case in cases], jobs)
    for case, found in zip(cases, listed, strict=True):
        for settings in found:
            uses.setdefault(settings, []).append(("chunk_gsa", case))
    theirs, rows = list(uses), []
    with closing(results([partial(fla_kernels.compiled_best, settings) for settings in theirs], jobs)) as found_out:
        for place, result in found_out:
            settings = theirs[place]
            figures, tried = result if isinstance(result, tuple) else (result, len(settings))
            rows.append(_row("fla", settings[0], uses[settings], figures, tried))
            tell(f"fla: {len(rows)} of {len(theirs)} compiled for {settings[0].target.name}")
    return rows


def _all_results(tasks: list[partial[Any]], jobs: int) -> list[Any]:
    """What all tasks return, in their order."""
    found = dict(results(tasks, jobs))
    for result in found.values():
        if isinstance(result, Exception):
            raise result
    return [found[place] for place in range(len(tasks))]


def _row(of: str, source: Source, uses: list[tuple[str, Case]], result: Figures | Exception, tried: int) -> Row:
    case = uses[0][1]
    named = [f"{operation}, {case}" for operation, case in uses]
    if isinstance(result, Exception):
        lines = str(result).strip().splitlines()  # the place, much source, and why
        figures, faults = None, ["does not compile: " + " ... ".join(dict.fromkeys((lines[0], lines[-1])))]
    else:
        figures, faults = result, result.faults
    return Row(
        of,
        source.name,
        case.target.name,
        case.dtype,
        case.width,
        case.slots,
        named,
        tried,
        figures,
        [f"{source.name} for {named[0]}: {fault}" for fault in faults],
    )
