"""The figures of a GPU, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gsa.bench.ops import SLOTS

if TYPE_CHECKING:
    from rich.table import Table


def show(report: dict[str, Any]) -> None:
    """Prints all there is to know."""
    from rich.console import Console

    from gsa.bench.gpu.ops import CACHED, MATMUL

    console = Console()
    console.print(speed_table(report))
    console.print(decode_table(report))
    console.print(
        "softmax: causal softmax attention, heads of 64, same width (decoding: behind "
        f"{CACHED} tokens)\n"
        "fla: flash-linear-attention's gated slot attention; times as fast: their time over ours\n"
        f"matmul: share of the rate of a {MATMUL} x {MATMUL} bf16 matmul, {report['matmul_tflops']:.0f} TFLOP/s\n"
        f"copy: share of the bandwidth of a large copy, {report['copy_gb_per_second']:.0f} GB/s\n"
        "MiB: memory beside the inputs\n" + _setting(report),
        highlight=False,
    )
    for note in report["notes"]:
        console.print(f"left out: {note}", highlight=False, markup=False)


def _setting(report: dict[str, Any]) -> str:
    runtime = f"HIP {report['hip']}" if report["hip"] else f"CUDA {report['cuda']}"
    fla = f"fla-core {report['fla']}" if report["fla"] else "flash-linear-attention is not installed"
    return (
        f"{report['gpu']} ({report['processors']} processors, {report['memory_gib']:.0f} GiB), {runtime}, "
        f"torch {report['torch']}, triton {report['triton']}, {fla}, engine {report['backend']}"
    )


def speed_table(report: dict[str, Any]) -> Table:
    """Whole sequences."""
    rows = [
        (
            f"{row['heads']}x{row['width']}",
            f"{row['B']}x{row['T']}",
            "fwd+bwd" if row["backward"] else "fwd",
            _number(row["ms"], 3),
            _number(row["softmax_ms"], 3),
            _number(row["fla_ms"], 3),
            _ratio(row["softmax_ms"], row["ms"]),
            _ratio(row["fla_ms"], row["ms"]),
            _percent(row["matmul_share"]),
            _number(row["mib"]),
            _number(row["softmax_mib"]),
            _number(row["fla_mib"]),
        )
        for row in report["rows"]
    ]
    names = ("heads", "BxT", "pass", "ms", "softmax", "fla", "", "", "matmul", "MiB", "softmax", "fla")
    return _table(f"Gated slot attention, {SLOTS} slots, bf16", names, rows)


def decode_table(report: dict[str, Any]) -> Table:
    """Single tokens."""
    rows = [
        (
            f"{row['heads']}x{row['width']}",
            str(row["B"]),
            _number(row["us"], 1),
            _number(row["softmax_us"], 1),
            _number(row["fla_us"], 1),
            _ratio(row["softmax_us"], row["us"]),
            _ratio(row["fla_us"], row["us"]),
            _percent(row["copy_share"]),
        )
        for row in report["decode"]
    ]
    names = ("heads", "B", "us", "softmax", "fla", "", "", "copy")
    return _table("One token of each sequence", names, rows)


def _table(title: str, names: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0), collapse_padding=True)
    for name in names:
        table.add_column(name, justify="left" if name in ("heads", "BxT", "pass") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _number(x: float | None, digits: int = 0) -> str:
    return "" if x is None else f"{x:.{digits}f}"


def _ratio(theirs: float | None, ours: float | None) -> str:
    return "" if theirs is None or ours is None else f"{theirs / ours:.2f}x"


def _percent(x: float | None) -> str:
    return "" if x is None else f"{100 * x:.0f}%"
