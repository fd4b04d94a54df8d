"""The figures of a GPU, as tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gsa.bench.gpu.ops import CACHED, MATMUL
from gsa.bench.ops import SLOTS, passes
from gsa.table import Column, Table

HEADS = Column("heads", lambda row: f"{row['heads']}x{row['width']}", left=True)


def tables(report: dict[str, Any]) -> list[Table]:
    """Whole sequences, and single tokens with what the words mean."""
    return [speed_table(report), decode_table(report)]


def speed_table(report: dict[str, Any]) -> Table:
    """Whole sequences."""
    columns = [
        HEADS,
        Column("BxT", lambda row: f"{row['B']}x{row['T']}", left=True),
        Column("pass", passes, left=True),
        Column("ms", "ms", "{:.3f}"),
        Column("softmax", "softmax_ms", "{:.3f}"),
        Column("fla", "fla_ms", "{:.3f}"),
        Column("softmax x", _times_as_fast("softmax_ms", "ms"), "{:.2f}x"),
        Column("fla x", _times_as_fast("fla_ms", "ms"), "{:.2f}x"),
        Column("matmul", "matmul_share", "{:.0%}"),
        Column("MiB", "mib", "{:.0f}"),
        Column("softmax MiB", "softmax_mib", "{:.0f}"),
        Column("fla MiB", "fla_mib", "{:.0f}"),
    ]
    return Table(f"Gated slot attention, {SLOTS} slots, bf16", columns, report["rows"])


def decode_table(report: dict[str, Any]) -> Table:
    """Single tokens."""
    columns = [
        HEADS,
        Column("B", "B"),
        Column("us", "us", "{:.1f}"),
        Column("softmax", "softmax_us", "{:.1f}"),
        Column("fla", "fla_us", "{:.1f}"),
        Column("softmax x", _times_as_fast("softmax_us", "us"), "{:.2f}x"),
        Column("fla x", _times_as_fast("fla_us", "us"), "{:.2f}x"),
        Column("copy", "copy_share", "{:.0%}"),
    ]
    notes = [
        f"softmax: causal softmax attention, heads of 64, same width (decoding: behind {CACHED} tokens)",
        "fla: flash-linear-attention's gated slot attention; softmax x, fla x: their time over ours",
        f"matmul: share of the rate of a {MATMUL} x {MATMUL} bf16 matmul, {report['matmul_tflops']:.0f} TFLOP/s",
        f"copy: share of the bandwidth of a large copy, {report['copy_gb_per_second']:.0f} GB/s",
        "MiB: memory beside the inputs",
        _setting(report),
        *(f"left out: {note}" for note in report["notes"]),
    ]
    return Table("One token of each sequence", columns, report["decode"], notes)


def _times_as_fast(theirs: str, ours: str) -> Callable[[dict[str, Any]], float | None]:
    """Their time over ours, where there are both."""
    return lambda row: None if row[theirs] is None or row[ours] is None else row[theirs] / row[ours]


def _setting(report: dict[str, Any]) -> str:
    runtime = f"HIP {report['hip']}" if report["hip"] else f"CUDA {report['cuda']}"
    fla = f"fla-core {report['fla']}" if report["fla"] else "flash-linear-attention is not installed"
    return (
        f"{report['gpu']} ({report['processors']} processors, {report['memory_gib']:.0f} GiB), {runtime}, "
        f"torch {report['torch']}, triton {report['triton']}, {fla}, engine {report['backend']}"
    )
