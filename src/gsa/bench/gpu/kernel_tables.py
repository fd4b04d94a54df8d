"""The tables of `gsa kernels`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from gsa.table import Column, Table

Rows = list[dict[str, Any]]

NAMES = {"gsa": "gsa", "fla": "flash-linear-attention"}
TRAINING = {"gsa": ("gsa forward", "gsa backward"), "fla": ("chunk_gsa",)}
"""The operations that do the same."""


def tables(report: dict[str, Any]) -> list[Table]:
    """Of each library, target and dtype the kernels, and beneath them what is wrong; then both libraries together."""
    groups: dict[tuple[str, ...], Rows] = {}
    for row in report["rows"]:
        groups.setdefault((row["of"], row["target"], row["dtype"]), []).append(row)
    found = [
        kernel_table(f"Kernels of {NAMES[of]} for {target}, {dtype}", rows)
        for (of, target, dtype), rows in groups.items()
    ]
    if any(of == "fla" for of, _, _ in groups):
        found.append(comparison(report["rows"]))
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    explained = (
        "Registers of a thread, bytes it spills, KiB of shared memory of a program, KiB of code, matrix instructions\n"
        "(fma: products without). "
        f"The largest over all sizes and uses. Compiled, not run; {versions}."
    )
    *others, last = found
    return [*others, replace(last, notes=[*last.notes, explained])]


def kernel_table(title: str, rows: Rows) -> Table:
    """A line for each kernel: the largest figures over all sizes."""
    lines = []
    for kernel in sorted({row["kernel"] for row in rows}):
        group = [row for row in rows if row["kernel"] == kernel]
        lines.append([kernel, str(len(group)), *_cells(group, max)])
    return Table(title, _columns("kernel"), lines, [fault for row in rows for fault in row["faults"]])


def comparison(rows: Rows) -> Table:
    """Two lines for each target, dtype and size: ours for training, and theirs; spills and code of all kernels."""
    lines = []
    sizes = dict.fromkeys(use.split(", ", 1)[1] for row in rows if row["of"] == "fla" for use in row["uses"])
    for size in sizes:
        for of, operations in TRAINING.items():
            wanted = {f"{operation}, {size}" for operation in operations}
            group = [row for row in rows if row["of"] == of and wanted & set(row["uses"])]
            short = size.replace("width ", "").replace(" slots", "").replace(",", "")
            lines.append([short, of, str(len(group)), *_cells(group, sum)])
    note = (
        "flash-linear-attention times many settings on the GPU. Taken here are the first, in its order,\n"
        "that neither spill nor need too much shared memory, or else those that spill least."
    )
    return Table("Gated slot attention, forward and backward", _columns("width, slots", "of"), lines, [note])


def _columns(*names: str) -> list[Column]:
    """What a line is about, and its figures."""
    headers = (*names, "n", "registers", "spilled", "shared", "code", "matrix")
    return [Column(header, place, left=header in (*names, "matrix")) for place, header in enumerate(headers)]


def _cells(group: Rows, over: Callable[[Iterable[int]], int]) -> list[str]:
    """The figures of several kernels together: the most registers and shared memory, and spills and code `over` all."""
    figures = [row["figures"] for row in group if row["figures"] is not None]
    if not figures:
        return ["none compiles", "", "", "", ""]
    kinds = sorted({kind.removesuffix(".mma_async") for x in figures for kind in x["matrix_instructions"]})
    lacking = sum(x["fma_dots"] for x in figures)
    return [
        str(max(x["registers"] for x in figures)),
        str(over(x["spilled_bytes"] for x in figures)),
        f"{max(x['shared_bytes'] for x in figures) / 1024:.1f}",
        f"{over(x['code_bytes'] for x in figures) / 1024:.0f}",
        ", ".join([*kinds, *([f"{lacking} fma"] if lacking else [])]) or "-",
    ]
