"""The tables of `gsa kernels`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

Rows = list[dict[str, Any]]

NAMES = {"gsa": "gsa", "fla": "flash-linear-attention"}
TRAINING = {"gsa": ("gsa forward", "gsa backward"), "fla": ("chunk_gsa",)}
"""The operations that do the same."""
FIGURES = ("registers", "spilled", "shared", "code", "matrix")


def show(report: dict[str, Any]) -> None:
    """Prints the tables, and beneath each what is wrong."""
    from rich.console import Console

    console = Console()
    groups: dict[tuple[str, ...], Rows] = {}
    for row in report["rows"]:
        groups.setdefault((row["of"], row["target"], row["dtype"]), []).append(row)
    for (of, target, dtype), rows in groups.items():
        console.print(kernel_table(f"Kernels of {NAMES[of]} for {target}, {dtype}", rows))
        for fault in (fault for row in rows for fault in row["faults"]):
            console.print(fault, highlight=False, soft_wrap=True)
    if any(of == "fla" for of, _, _ in groups):
        console.print(comparison(report["rows"]))
        print(
            "flash-linear-attention times many settings on the GPU. Taken here are the first, in its order,\n"
            "that neither spill nor need too much shared memory, or else those that spill least."
        )
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    print(
        "Registers of a thread, bytes it spills, KiB of shared memory of a program, KiB of code, matrix instructions\n"
        "(fma: products without). "
        f"The largest over all sizes and uses. Compiled, not run; {versions}."
    )


def kernel_table(title: str, rows: Rows) -> Table:
    """A line for each kernel: the largest figures over all sizes."""
    table = _table(title, ("kernel",), ("n", *FIGURES))
    for kernel in sorted({row["kernel"] for row in rows}):
        group = [row for row in rows if row["kernel"] == kernel]
        table.add_row(kernel, str(len(group)), *_cells(group, max))
    return table


def comparison(rows: Rows) -> Table:
    """Two lines for each target, dtype and size: ours for training, and theirs; spills and code of all kernels."""
    table = _table("Gated slot attention, forward and backward", ("width, slots", "of"), ("n", *FIGURES))
    sizes = dict.fromkeys(use.split(", ", 1)[1] for row in rows if row["of"] == "fla" for use in row["uses"])
    for size in sizes:
        for of, operations in TRAINING.items():
            wanted = {f"{operation}, {size}" for operation in operations}
            group = [row for row in rows if row["of"] == of and wanted & set(row["uses"])]
            short = size.replace("width ", "").replace(" slots", "").replace(",", "")
            table.add_row(short, of, str(len(group)), *_cells(group, sum))
    return table


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


def _table(title: str, names: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, overflow="fold", no_wrap=name != "kernel")  # which may be long
    for name in numbers:
        table.add_column(name, justify="left" if name == FIGURES[-1] else "right", no_wrap=True)
    return table
